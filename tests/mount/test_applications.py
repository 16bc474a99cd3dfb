"""Real applications on a real mount: they do their work, and after a remount it is all there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mount.harness import Mount, Volume, run
from tests.mount.workloads import GIT, GIT_ENVIRONMENT, WORKLOADS

SCRIPT = Path(__file__).with_name("workloads.py")
STEPS = {"git": 25}
FREE_LIST = "--free-list=64M"


def workload(
    name: str, action: str, mount: Mount, log: Path, steps: int = 0, *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a workload in a process of its own."""
    return run(
        [sys.executable, SCRIPT, name, action, mount.point, log, str(steps)], timeout=timeout
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_and_remount(volume: Volume, tmp_path: Path, name: str) -> None:
    """What an application wrote is there and sound, before and after a remount."""
    log = tmp_path / "acknowledged"
    log.touch()
    with volume.mounted(FREE_LIST) as mount:
        workload(name, "write", mount, log, STEPS.get(name, 150))
        workload(name, "check", mount, log)
    with volume.mounted(FREE_LIST) as mount:
        workload(name, "check", mount, log)
    volume.encfsd("verify", *volume.unlock, volume.source)


@pytest.mark.parametrize("after", [3, 40])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_survives_kill(volume: Volume, tmp_path: Path, name: str, after: int) -> None:
    """After kill -9 of the daemon the application recovers all that was acknowledged."""
    if name == "git" and after > STEPS["git"]:
        after = STEPS["git"] // 2
    log = tmp_path / "acknowledged"
    log.touch()
    with volume.mounted(FREE_LIST) as mount:
        writer = subprocess.Popen(
            [sys.executable, SCRIPT, name, "write", mount.point, log, "100000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 60
            while log.read_text().count("\n") < after:
                assert writer.poll() is None, "the workload ended by itself"
                assert time.monotonic() < deadline, "the workload makes no progress"
                time.sleep(0.01)
            mount.kill()
            writer.wait(30)
        finally:
            if writer.poll() is None:
                os.killpg(writer.pid, signal.SIGKILL)
                writer.wait(30)
    with volume.mounted(FREE_LIST) as mount:
        workload(name, "check", mount, log)
    volume.encfsd("verify", *volume.unlock, volume.source)


def test_git_clone_of_a_thousand_commits(volume: Volume, tmp_path: Path) -> None:
    """Clone, gc and fsck of a repository of a thousand commits; the clone is the original."""
    origin = tmp_path / "origin"
    stream = "".join(
        f"commit refs/heads/main\ncommitter t <t@example.org> {1_700_000_000 + i} +0000\n"
        f"data 6\nc{i:05}\nM 100644 inline d{i % 40}/f{i % 300}\ndata 7\nv{i:05}\n\n"
        for i in range(1000)
    )
    run([*GIT, "init", "-q", "--bare", "-b", "main", origin], env=GIT_ENVIRONMENT)
    run([*GIT, "-C", origin, "fast-import", "--quiet"], env=GIT_ENVIRONMENT, stdin=stream)
    head = run([*GIT, "-C", origin, "rev-parse", "main^{tree}"], env=GIT_ENVIRONMENT).stdout
    with volume.mounted(FREE_LIST) as mount:
        clone = mount.point / "clone"
        run([*GIT, "clone", "-q", f"file://{origin}", clone], env=GIT_ENVIRONMENT, timeout=120)
        run([*GIT, "-C", clone, "gc", "-q", "--aggressive"], env=GIT_ENVIRONMENT, timeout=120)
        run([*GIT, "-C", clone, "fsck", "--full", "--strict"], env=GIT_ENVIRONMENT)
    with volume.mounted(FREE_LIST) as mount:
        clone = mount.point / "clone"
        run([*GIT, "-C", clone, "fsck", "--full", "--strict"], env=GIT_ENVIRONMENT)
        assert run([*GIT, "-C", clone, "status", "--short"], env=GIT_ENVIRONMENT).stdout == ""
        tree = run([*GIT, "-C", clone, "rev-parse", "main^{tree}"], env=GIT_ENVIRONMENT).stdout
        assert tree == head


def test_tar_and_rsync_keep_everything(volume: Volume, tmp_path: Path) -> None:
    """Both tar and rsync bring a tree in and find nothing to change after a remount."""
    tree = tmp_path / "tree"
    shutil.copytree(Path(os.__file__).parent / "asyncio", tree / "asyncio")
    (tree / "link").symlink_to("asyncio/events.py")
    (tree / "hard").hardlink_to(tree / "asyncio" / "events.py")
    os.mkfifo(tree / "fifo")
    sparse = tree / "sparse"
    with sparse.open("wb") as file:
        file.truncate(50 << 20)
        file.seek(20 << 20)
        file.write(b"in the middle")
    archive = tmp_path / "tree.tar"
    run(["tar", "-C", tree, "--sparse", "-cf", archive, "."])
    difference = ["rsync", "-aHAXni", "--checksum", "--delete"]
    with volume.mounted(FREE_LIST) as mount:
        (by_tar, by_rsync) = (mount.point / "tar", mount.point / "rsync")
        run(["mkdir", by_tar, by_rsync])
        run(["tar", "-C", by_tar, "-xpf", archive])
        run(["rsync", "-aHAX", f"{tree}/", f"{by_rsync}/"])
        # A file that was just written must not look like a hole to programs that keep holes.
        run(["tar", "-C", by_rsync, "--sparse", "-cf", tmp_path / "again.tar", "asyncio"])
        run(["tar", "-C", tree, "-df", tmp_path / "again.tar"])
    with volume.mounted(FREE_LIST) as mount:
        for copy in (mount.point / "tar", mount.point / "rsync"):
            assert run([*difference, f"{tree}/", f"{copy}/"], timeout=120).stdout == ""


def test_fio_verifies_what_it_wrote(volume: Volume) -> None:
    """Random overwrites of mixed sizes, read back with checksums, also after a remount."""
    job = [
        "fio", "--name=v", "--size=24M", "--rw=randwrite", "--bsrange=512-128k", "--verify=crc32c",
        "--verify_fatal=1", "--ioengine=psync", "--randrepeat=1", "--norandommap=0",
        "--fallocate=none", "--output-format=terse", "--verify_state_save=0",
    ]  # fmt: skip
    with volume.mounted(FREE_LIST) as mount:
        run([*job, f"--directory={mount.point}", "--do_verify=1"], timeout=120)
    with volume.mounted(FREE_LIST) as mount:
        run([*job, f"--directory={mount.point}", "--verify_only"], timeout=120)


def test_db_bench_with_compaction(volume: Volume) -> None:
    """RocksDB's own benchmark loads, compacts, reopens and checks its checksums."""
    arguments = ["--num=60000", "--value_size=400", "--write_buffer_size=1048576", "--seed=7"]
    with volume.mounted(FREE_LIST) as mount:
        run(
            ["db_bench", "--benchmarks=fillrandom,overwrite,compact", *arguments,
             f"--db={mount.point}/db"],
            timeout=180,
        )  # fmt: skip
    with volume.mounted(FREE_LIST) as mount:
        done = run(
            ["db_bench", "--benchmarks=readrandom,verifychecksum", *arguments,
             "--use_existing_db=1", "--verify_checksum=1", f"--db={mount.point}/db"],
            timeout=180,
        )  # fmt: skip
        assert "verifychecksum" in done.stdout
        assert "of 60000 found" in done.stdout
