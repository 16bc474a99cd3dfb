"""The harness gets out of a mount that never answers."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mount.harness import Mount, Volume, device_of, run

STUCK = (sys.executable, str(Path(__file__).with_name("stuck_daemon.py")))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) needs root")


class StuckMount(Mount):
    """Taken for usable as soon as it is in the mount table."""

    def _wait_for_answer(self, deadline: float, become: Sequence[str]) -> None:
        pass


def stuck_mount(folder: Path, *, lifetime: float = 60) -> StuckMount:
    volume = Volume(folder)
    command = [*STUCK, str(volume.point)]
    return StuckMount(command, volume.point, volume.log, lifetime=lifetime, start=10)


def test_a_mount_that_does_not_answer_fails_and_is_gone(tmp_path: Path) -> None:
    volume = Volume(tmp_path, encfsd=STUCK)
    with pytest.raises(subprocess.TimeoutExpired), volume.mounted(start=1):
        pass
    assert device_of(volume.point) is None


def test_a_daemon_that_ends_too_early_is_reported_with_its_log(tmp_path: Path) -> None:
    volume = Volume(tmp_path, encfsd=("sh", "-c", "echo no such luck; exit 3"))
    with pytest.raises(AssertionError, match="no such luck"), volume.mounted():
        pass


@pytest.mark.parametrize("folder", ["/", "mnt"])
def test_a_program_stuck_in_a_mount_times_out(tmp_path: Path, folder: str) -> None:
    mount = stuck_mount(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run(["ls", mount.point], cwd=tmp_path / folder, timeout=0.5)
    mount.release()
    assert device_of(mount.point) is None
    assert mount.process.returncode == -signal.SIGKILL


def test_the_watchdog_ends_a_mount_that_outlives_its_time(tmp_path: Path) -> None:
    mount = stuck_mount(tmp_path, lifetime=0)
    assert mount.wait(timeout=30) == -signal.SIGKILL
    assert device_of(mount.point) is None


def test_the_watchdog_ends_a_mount_whose_test_process_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.mount.test_harness import stuck_mount\n"
        "stuck_mount(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    repository = Path(__file__).parents[2]
    with Path("/proc/self/mountinfo").open("rb") as mountinfo:
        changed = select.poll()
        changed.register(mountinfo, select.POLLPRI)
        victim = run([sys.executable, "-c", script, tmp_path], cwd=repository, check=False)
        assert victim.returncode == -signal.SIGKILL, victim.stderr
        while device_of(tmp_path / "mnt") is not None:
            assert changed.poll(30_000), "still mounted"


def test_run_reports_what_a_failing_program_said() -> None:
    with pytest.raises(AssertionError, match="exited with 7\nout\nerr"):
        run(["sh", "-c", "echo out; echo err >&2; exit 7"])


def test_run_passes_standard_input_and_returns_the_output() -> None:
    assert run(["cat"], stdin="käse").stdout == "käse"
