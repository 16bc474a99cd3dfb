"""The fast path's life: every way to end it, under load, as root and as an ordinary user.

Whatever happens, nothing stays mounted, nobody hangs, and what fsync has acknowledged is there.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount import harness
from tests.mount.harness import Mount, Volume, device_of, run, unprivileged
from tests.mount.test_hostile import CHECK, LOAD

ROOT = os.geteuid() == 0
IN_FOLDER = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"']


class Site:
    """A volume of one user, and that user's way to run programs on it."""

    def __init__(self, folder: Path, user: tuple[list[str], str] | None) -> None:
        self.become, self.interpreter = user or ([], sys.executable)
        encfsd = (self.interpreter, "-m", "encfsd.cli")
        self.volume = Volume(folder, encfsd=encfsd, key_file=True, user=self.become)
        self.volume.init()
        self.acknowledged = folder / "acknowledged"
        self.acknowledged.touch(mode=0o666)
        self.acknowledged.chmod(0o666)

    def command(self, code: str, *arguments: str) -> list[str]:
        """Return a command that runs Python on the mount."""
        where = [*self.become, *IN_FOLDER, str(self.volume.point)]
        return [*where, self.interpreter, "-I", "-c", code, *arguments]

    def python(self, code: str, *arguments: str) -> str:
        """Run Python on the mount."""
        return run(self.command(code, *arguments)).stdout

    @contextlib.contextmanager
    def under_load(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Have programs write, replace and make, and note what is durable; kill them at the end."""
        command = self.command(LOAD, str(self.acknowledged), "0")
        load = subprocess.Popen(command, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while len(self.acknowledged.read_text().split()) < 200:
                assert time.monotonic() < deadline and load.poll() is None
                time.sleep(0.01)
            yield load
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(load.pid, signal.SIGKILL)
            load.wait(30)

    def check(self) -> None:
        """Mount again and look for everything that was acknowledged; then verify all."""
        assert device_of(self.volume.point) is None
        with self.volume.mounted():
            self.python(CHECK, str(self.acknowledged), "0")
        self.volume.encfsd("verify", *self.volume.unlock, self.volume.source)


@pytest.fixture(params=["root", "user"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Return a site of the user who runs the tests, and one of an ordinary user if that is root."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to other users
        folder = Path(name)
        if request.param == "root":
            yield Site(folder, None)
            return
        if not ROOT or shutil.which("setpriv") is None:
            pytest.skip("becomes another user")
        user = unprivileged(folder)
        if user is None:
            pytest.skip("no Python that an ordinary user may run")
        device = Path("/dev/fuse")
        mode = device.stat().st_mode
        device.chmod(0o666)  # as udev makes it
        try:
            yield Site(folder, user)
        finally:
            device.chmod(mode)


# ---- the ways to end it ----


def _terminate(_: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    """Programs keep files open: they are cut off after a while."""
    mount.process.send_signal(signal.SIGTERM)
    assert mount.process.wait(60) == 0, mount.log.read_text()
    load.wait(60)


def _insist(_: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    mount.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    mount.process.send_signal(signal.SIGTERM)
    assert mount.process.wait(60) == 0, mount.log.read_text()
    load.wait(60)


def _unmount_lazily(site: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    """Who is on the mount goes on; when the last one leaves, the daemon ends."""
    run(["umount", "-l", site.volume.point])
    before = len(site.acknowledged.read_text())
    deadline = time.monotonic() + 60
    while len(site.acknowledged.read_text()) == before:
        assert time.monotonic() < deadline and mount.process.poll() is None
        time.sleep(0.01)
    os.killpg(load.pid, signal.SIGKILL)
    assert mount.process.wait(60) == 0, mount.log.read_text()


def _abort(site: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    device = device_of(site.volume.point)
    assert device is not None
    with tempfile.TemporaryDirectory() as connections:
        run(["mount", "-t", "fusectl", "fusectl", connections])
        try:
            Path(connections, device.partition(":")[2], "abort").write_text("1")
        finally:
            run(["umount", connections])
    assert mount.process.wait(60) == 0, mount.log.read_text()
    load.wait(60)


def _kill(_: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    mount.process.kill()
    load.wait(60)


def _unmount_when_free(site: Site, mount: Mount, load: "subprocess.Popen[bytes]") -> None:
    """While programs are on it `encfsd umount` refuses, and nothing happens to them."""
    assert site.volume.encfsd("umount", site.volume.point, check=False).returncode == 34
    assert load.poll() is None
    os.killpg(load.pid, signal.SIGKILL)
    load.wait(60)
    site.volume.umount(mount)


ENDS = {
    "SIGTERM": _terminate,
    "SIGTERM twice": _insist,
    "umount -l": _unmount_lazily,
    "abort": _abort,
    "kill -9": _kill,
    "encfsd umount": _unmount_when_free,
}
End = Callable[[Site, Mount, "subprocess.Popen[bytes]"], None]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_nothing_hangs_and_what_was_acknowledged_stays(site: Site, end: End) -> None:
    if not ROOT and end is _abort:
        pytest.skip("only root may mount fusectl")
    with site.volume.mounted() as mount, site.under_load() as load:
        end(site, mount, load)
        mount.release()
    site.check()


UNSYNCED = """
import os, sys
for n in range(50):
    with open(f"f{n}", "wb") as file:
        file.write(bytes([n]) * (n * 9001))
os.rename("f0", "g0")
"""

COMPLETE = """
import os
assert not os.path.exists("f0") and os.path.getsize("g0") == 0
for n in range(1, 50):
    assert open(f"f{n}", "rb").read() == bytes([n]) * (n * 9001), n
"""


@pytest.mark.parametrize("end", ["encfsd umount", "SIGTERM", "umount -l"])
def test_an_orderly_end_keeps_what_nobody_synced(site: Site, end: str) -> None:
    with site.volume.mounted() as mount:
        site.python(UNSYNCED)
        if end == "SIGTERM":
            mount.process.send_signal(signal.SIGTERM)
        elif end == "umount -l":
            run(["umount", "-l", site.volume.point])
        else:
            site.volume.encfsd("umount", site.volume.point)
        assert mount.wait() == 0, mount.log.read_text()
    with site.volume.mounted():
        site.python(COMPLETE)


HOLD = """
import os, sys
file = open("held", "wb")
file.write(b"before" * 1000)
file.flush()
print("open", flush=True)
sys.stdin.readline()
file.write(b"behind" * 1000)
file.flush()
os.fsync(file.fileno())
os.rename("held", "kept")
os.close(os.open("new", os.O_CREAT | os.O_WRONLY))
print("synced", flush=True)
"""


def test_who_is_inside_after_a_lazy_unmount_goes_on(site: Site) -> None:
    with site.volume.mounted() as mount:
        holder = subprocess.Popen(
            site.command(HOLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdin is not None and holder.stdout is not None
        with holder.stdin, holder.stdout:
            assert holder.stdout.readline() == "open\n"
            run(["umount", "-l", site.volume.point])
            assert mount.process.poll() is None
            holder.stdin.write("\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "synced\n"
            assert holder.wait(30) == 0
        assert mount.wait() == 0, mount.log.read_text()
    with site.volume.mounted():
        code = "print(open('kept', 'rb').read() == b'before' * 1000 + b'behind' * 1000)"
        assert site.python(code) == "True\n"


# ---- requests that fail, or are given up ----


def test_a_request_that_fails_inside_fails_alone(site: Site) -> None:
    volume = site.volume
    with volume.mounted():
        site.python("[open(n, 'wb').write(n.encode() * 200000) for n in 'ab']")
    victim = max((volume.source / "objects").rglob("*"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(4 * 4096 + 100)  # the first slot behind the roots
        file.write(b"damaged")
    code = """
import errno
seen = []
for name in "ab":
    try:
        seen.append(open(name, "rb").read() == name.encode() * 200000)
    except OSError as error:
        seen.append(errno.errorcode[error.errno])
print(sorted(map(str, seen)))
open("c", "w").write("works")
"""
    with volume.mounted():
        for _ in range(3):
            assert site.python(code) == "['EIO', 'True']\n"
        counters = json.loads(volume.encfsd("stats", "--json", volume.point).stdout)
        read = counters["opcodes"]["READ"]
        assert read["failed"] >= 1
        assert sum(count for _, count in read["latency"]) == read["native"] + read["forwarded"]
        assert (read["native"] > 0) == harness.fast_path


KILLED = """
import os, sys, threading
def work(number):
    for _ in range(10**9):
        fd = os.open(f"f{number}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.write(fd, bytes(1 << 20))
        os.fsync(fd)
        os.close(fd)
        os.listdir(".")
for number in range(8):
    threading.Thread(target=work, args=(number,)).start()
print("runs", flush=True)
"""


def test_a_program_that_is_killed_in_its_calls_ends_and_harms_nobody(site: Site) -> None:
    with site.volume.mounted():
        for _ in range(10):
            program = subprocess.Popen(
                site.command(KILLED), stdout=subprocess.PIPE, start_new_session=True
            )
            assert program.stdout is not None
            with program.stdout:
                assert program.stdout.readline() == b"runs\n"
                time.sleep(0.1)
                os.killpg(program.pid, signal.SIGKILL)
                program.wait(30)
        site.python("open('after', 'w').write('works')")
    site.volume.encfsd("verify", *site.volume.unlock, site.volume.source)


# ---- without it ----


def test_a_fast_path_that_cannot_start_is_done_without(tmp_path: Path) -> None:
    script = Path(__file__).with_name("daemon_without_fast_path.py")
    volume = Volume(tmp_path, encfsd=(sys.executable, str(script)), key_file=True)
    volume.init()
    write = "import os; f = open('f', 'wb'); f.write(os.urandom(1 << 20) * 8); os.fsync(f.fileno())"
    digest = """
import hashlib, os
fd = os.open("f", os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
print(hashlib.sha256(os.pread(fd, 8 << 20, 0)).hexdigest())
"""
    with volume.mounted() as mount:
        run([sys.executable, "-I", "-c", write], cwd=volume.point)
        first = run([sys.executable, "-I", "-c", digest], cwd=volume.point).stdout
        log = mount.log.read_text()
        if harness.fast_path:
            reason = "no fast path (Resource temporarily unavailable): every request goes through"
            assert log.count(reason) == 1
        assert ", all through pyfuse3, " in log
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        lines = [line for line in mounts if f" {volume.point} " in line]
        assert len(lines) == 1
        assert "max_read=131072" in lines[0]
        counters = json.loads(volume.encfsd("stats", "--json", volume.point).stdout)
        opcodes = counters["opcodes"]
        if harness.fast_path:
            assert counters["fast_path"] == "off: it could not be started"
        assert opcodes["READ"]["forwarded"] >= 64
        assert all(opcode["native"] == 0 for name, opcode in opcodes.items() if name != "INIT")
    with volume.mounted():
        assert run([sys.executable, "-I", "-c", digest], cwd=volume.point).stdout == first


@pytest.mark.parametrize("words", [["--no-fast-path"], ["-o", "no_fast_path"]])
def test_the_fast_path_can_be_refused(volume: Volume, words: list[str]) -> None:
    with volume.mounted(*words) as mount:
        run(["touch", "f"], cwd=volume.point)
        log = mount.log.read_text()
        assert ", all through pyfuse3, " in log
        stats = volume.encfsd("stats", volume.point).stdout
        assert "fast path          off, as asked for\n" in stats
        assert "no fast path" not in log
