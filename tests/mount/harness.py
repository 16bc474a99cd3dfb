"""Mounts for tests, so that no test can hang on one.

A call on a mount whose daemon is stuck may wait in the kernel where no signal reaches it, and
only the end of the daemon's FUSE connection frees it. Hence:

- No test touches a mount from its own process. It runs a program there with `run`, which has a
  time limit. Python code goes through `run([sys.executable, "-c", ...])`.
- Each mount has a watchdog, a process of its own, which ends the daemon and the mount when the
  lifetime of the mount has passed or when the test process is gone, however it ended.
- Whether a mount is there is read from /proc/self/mountinfo, which never asks the daemon.

`release` is the one way to end a mount by force: abort the connection, kill, unmount lazily.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ENCFSD = (sys.executable, "-m", "encfsd.cli")
NOBODY = 65534
PASSPHRASE = "correct horse battery staple"

# Whether volumes are mounted with the fast path; pytest's --no-fast-path says no.
fast_path = True

_live: set["Mount"] = set()


def run(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program that may touch a mount; raise TimeoutExpired after `timeout` seconds.

    With `check`, a failure raises an AssertionError that shows what the program printed. A program
    that even SIGKILL does not end is stuck in a mount: then all mounts are released.
    """
    arguments = [str(argument) for argument in command]
    if cwd is not None:
        # Popen(cwd=...) would enter the folder before exec, while this process waits for it.
        arguments = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', str(cwd), *arguments]
    # Files, not pipes: a grandchild that holds a pipe open would keep us reading.
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            arguments, stdin=given, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
        try:
            process.wait(timeout)
        finally:
            _end(process)
        stdout.seek(0)
        stderr.seek(0)
        result = subprocess.CompletedProcess(
            arguments,
            process.returncode,
            stdout.read().decode(errors="surrogateescape"),
            stderr.read().decode(errors="surrogateescape"),
        )
    if check and result.returncode != 0:
        raise AssertionError(
            f"{arguments} exited with {result.returncode}\n{result.stdout}{result.stderr}"
        )
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group and reap the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        release_all()
        process.wait(10)


def device_of(point: Path) -> str | None:
    """Return "major:minor" of what is mounted at `point` now, or None if nothing is."""
    wanted = str(point).replace(" ", "\\040")
    found = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == wanted:
            found = fields[2]
    return found


def release(point: Path, pidfd: int) -> None:
    """End a mount by force. It may be stuck, half made or gone; safe to call again."""
    device = device_of(point)
    if device is not None:
        # Where a daemon cannot die because it waits for its own mount, this wakes it.
        abort = Path("/sys/fs/fuse/connections", device.partition(":")[2], "abort")
        with contextlib.suppress(OSError):
            abort.write_text("1")
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for command in (["umount", "--lazy"], ["fusermount3", "-u", "-z"]):
        if device_of(point) is None:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, str(point)], timeout=10, check=False, capture_output=True)


def release_all() -> None:
    """End every mount that this process has."""
    for mount in list(_live):
        mount.release()


atexit.register(release_all)


class Mount:
    """A running daemon and its mount point, usable as soon as the constructor returns."""

    def __init__(
        self,
        command: Sequence[str],
        point: Path,
        log: Path,
        *,
        lifetime: float,
        start: float,
        become: Sequence[str] = (),
    ) -> None:
        """Start `command`, which must stay in the foreground; wait at most `start` seconds.

        `become`: a prefix of commands of a user whom the mount lets in.
        """
        self.point = point
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", __file__, str(point), str(self.process.pid), str(lifetime)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        _live.add(self)
        try:
            deadline = time.monotonic() + start
            self._wait_for_mount(deadline)
            self._wait_for_answer(deadline, become)
        except BaseException:
            self.release()
            raise

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self.process.pid

    def _wait_for_mount(self, deadline: float) -> None:
        with Path("/proc/self/mountinfo").open("rb") as mountinfo:
            changed = select.poll()
            changed.register(mountinfo, select.POLLPRI)
            changed.register(self._pidfd, select.POLLIN)
            while device_of(self.point) is None:
                left = deadline - time.monotonic()
                if self.process.poll() is not None or left <= 0:
                    raise AssertionError(f"no mount at {self.point}:\n{self.log.read_text()}")
                changed.poll(left * 1000)

    def _wait_for_answer(self, deadline: float, become: Sequence[str]) -> None:
        """Wait until a mount answers: not one that the daemon gives up for another, nor none."""
        while True:
            device = device_of(self.point)
            left = max(deadline - time.monotonic(), 0.1)
            answer = run([*become, "stat", self.point], timeout=left, check=False)
            if answer.returncode == 0 and device is not None and device == device_of(self.point):
                return
            ended = select.select([self._pidfd], [], [], 0.02)[0]
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"no answer at {self.point}:\n{answer.stderr}\n{self.log.read_text()}"
                )

    def kill(self) -> None:
        """Kill the daemon as a crash would, and clear the dead mount away."""
        self.process.kill()
        self.release()

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until the daemon has ended by itself, e.g. after `encfsd umount`."""
        try:
            return self.process.wait(timeout)
        finally:
            self.release()

    def release(self) -> None:
        """End daemon, mount and watchdog by force, whatever state they are in."""
        if self not in _live:
            return
        _live.discard(self)
        release(self.point, self._pidfd)
        os.close(self._pidfd)
        # A watchdog that read a byte does nothing; one that only sees the end of file acts.
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._watchdog.stdin as pipe:
            pipe.write(b"q")
        self._watchdog.wait(30)
        self.process.wait(30)


def unprivileged(home: Path) -> tuple[list[str], str] | None:
    """Give `home` to an ordinary user; return a prefix of that user's commands, and a Python.

    None if there is no Python with the package in that user's reach.
    """
    os.chown(home, NOBODY, NOBODY)
    path = f"{Path(__file__).parents[2]}:{sysconfig.get_path('platlib')}"
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env"]
    prefix += [f"XDG_RUNTIME_DIR={home}", f"HOME={home}", f"PYTHONPATH={path}"]
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*prefix, python, "-c", "import encfsd.daemon"]
        if run(command, cwd=home, check=False).returncode == 0:
            return prefix, python
    return None


def way() -> list[str]:
    """Return the option of `encfsd mount` that chooses the way of requests."""
    return [] if fast_path else ["--no-fast-path"]


class Volume:
    """An encfsd volume in a scratch folder, with its own state directory and secret."""

    def __init__(
        self,
        folder: Path,
        *,
        encfsd: Sequence[str] = ENCFSD,
        key_file: bool = False,
        user: Sequence[str] = (),
    ) -> None:
        """Make the folders; `encfsd` is the command to test.

        `key_file`: not with a passphrase, which takes a second to check each time. `user`: prefix
        of a command that runs it as another user, see `unprivileged`.
        """
        self.user = user
        self.source = folder / "src"
        self.point = folder / "mnt"
        self.state_dir = folder / "state"
        self.log = folder / "daemon.log"
        self.passphrase_file = folder / "passphrase"
        self._encfsd = (*user, *encfsd)
        self.source.mkdir(mode=0o700)
        self.point.mkdir()
        self.state_dir.mkdir(mode=0o700)
        self.passphrase_file.touch(mode=0o600)
        self.passphrase_file.write_text(PASSPHRASE + "\n")
        self._secret = f"--passphrase-file={self.passphrase_file}"
        if key_file:
            path = folder / "key"
            path.touch(mode=0o600)
            path.write_bytes(os.urandom(64))
            self._secret = f"--key-file={path}"
        if user:
            for path in folder.iterdir():
                os.chown(path, NOBODY, NOBODY)

    @property
    def unlock(self) -> list[str]:
        """Options of every command that opens the volume."""
        return [self._secret, f"--state-dir={self.state_dir}"]

    def encfsd(
        self, *arguments: str | Path, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run an encfsd command, e.g. `volume.encfsd("info", volume.source)`."""
        return run([*self._encfsd, *arguments], timeout=timeout, check=check)

    def init(self, *options: str) -> None:
        """Create the volume."""
        self.encfsd("init", *self.unlock, *options, self.source)

    @contextlib.contextmanager
    def mounted(
        self, *options: str, lifetime: float = 240.0, start: float = 30.0
    ) -> Iterator[Mount]:
        """Mount for the length of a `with` block, then unmount and expect a clean exit.

        If the block raises, the mount is released by force. It may end the daemon itself
        (`mount.kill()`). After `lifetime` seconds the watchdog ends it.
        """
        options = ("-f", *self.unlock, *way(), *options)
        command = [*self._encfsd, "mount", *options, str(self.source), str(self.point)]
        mount = Mount(
            command, self.point, self.log, lifetime=lifetime, start=start, become=self.user
        )
        try:
            yield mount
            if mount.process.poll() is None:
                self.umount(mount)
        finally:
            mount.release()

    def umount(self, mount: Mount) -> None:
        """Unmount with `encfsd umount` and check that the daemon ended without an error."""
        self.encfsd("umount", self.point)
        status = mount.wait()
        assert status == 0, f"the daemon exited with {status}:\n{self.log.read_text()}"


def _watch(point: Path, pid: int, lifetime: float) -> None:
    """Be the watchdog: return when told so, else release the mount at the deadline or at EOF."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    told, _, _ = select.select([sys.stdin.fileno()], [], [], lifetime)
    if not told or not os.read(sys.stdin.fileno(), 1):
        release(point, pidfd)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
