"""One candidate's volume, mounted, and the programs that are run on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from candidates import BUILD, Candidate

from tests.mount import harness

DRIVER = BUILD / "bench" / "bench_syscalls"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
LIFETIME = 3600.0  # seconds, of a mount
START = 180.0  # until it is there: cryfs derives its key for 14 s on an idle machine
TIMEOUT = 180.0  # of a program on it
CACHE_LIFE = 2.0  # after which a candidate that keeps its mount has dropped its cache
PINNED, FREE = "pinned", "free"
CPUS = sorted(os.sched_getaffinity(0))
PIN_TO = CPUS[-1]
SPINNER = "spinner"


def may_drop_caches() -> bool:
    """Only root may."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    """Write out everything that is dirty and make the kernel forget everything that is clean."""
    harness.run(["sync"], timeout=TIMEOUT)
    if may_drop_caches():
        harness.run(["sh", "-c", f"echo 3 >{DROP_CACHES}"], timeout=TIMEOUT)


def make_template(candidate: Candidate, scratch: Path) -> Path:
    """Make a volume once; each place starts with a copy of it."""
    folder = scratch / f"template-{candidate.name.replace(' ', '')}"
    folder.mkdir(mode=0o700)
    (folder / "mnt").mkdir()
    (folder / "home").mkdir(mode=0o700)
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex() + "\n")
    candidate.initialise(folder)
    return folder


class Place:
    """A candidate's volume on one base; the raw directory is a place without a daemon."""

    def __init__(self, candidate: Candidate, template: Path, base: Path) -> None:
        self.candidate = candidate
        self.shared = base  # beside all places, on a plain file system
        self._folder = Path(tempfile.mkdtemp(prefix="place-", dir=base))
        subprocess.run(["cp", "-a", f"{template}/.", self._folder], check=True, timeout=TIMEOUT)
        self._mount: harness.Mount | None = None
        self._cpus = set(CPUS)
        self.directory = self._folder
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # ---- life ----

    @property
    def _top(self) -> Path:
        return self._folder / ("src" if self.candidate.command is None else "mnt")

    def _start(self) -> None:
        if self.candidate.command is None:
            return
        self._mount = harness.Mount(
            self.candidate.command(self._folder),
            self._folder / "mnt",
            self._folder / "log",
            lifetime=LIFETIME,
            start=START,
        )

    def _stop(self) -> None:
        """Unmount and wait until the daemon has ended, so that all it has to write is written."""
        mount, self._mount = self._mount, None
        if mount is None:
            return
        try:
            for attempt in range(20):
                done = harness.run(
                    ["fusermount3", "-u", mount.point], timeout=TIMEOUT, check=attempt == 19
                )
                if done.returncode == 0:
                    break
                time.sleep(0.2)  # something on the machine has looked at it
            mount.wait(TIMEOUT)
        finally:
            mount.release()

    def close(self) -> None:
        """Unmount and remove everything."""
        try:
            self._stop()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def work_in(self, name: str) -> Iterator[None]:
        """Have an empty `directory` for a work. It goes with the place, or before it."""
        self.directory = self._top / name
        harness.run(["mkdir", self.directory])
        try:
            yield
        finally:
            if self.candidate.keeps_mount and self._mount is not None:
                harness.run(["rm", "-rf", self.directory], timeout=TIMEOUT)

    def go_cold(self) -> None:
        """Lose the daemon's caches and the kernel's."""
        if self.candidate.keeps_mount:
            time.sleep(CACHE_LIFE)
        else:
            self._stop()
            self._start()
            self._pin()
        drop_caches()

    # ---- CPUs and memory ----

    def pin(self, way: str) -> None:
        """Hold the daemon and what `run` starts to one CPU, or let them run anywhere."""
        self._cpus = {PIN_TO} if way == PINNED else set(CPUS)
        self._pin()

    def _pin(self) -> None:
        if self._mount is None:
            return
        for task in Path(f"/proc/{self._mount.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                spins = (task / "comm").read_text().strip() == SPINNER
                cpus = set(CPUS) - self._cpus if spins else self._cpus
                os.sched_setaffinity(int(task.name), cpus or set(CPUS))

    def each_way(self) -> Iterator[str]:
        """Pin, then let go again."""
        for way in (PINNED, FREE):
            self.pin(way)
            yield way

    def resident(self) -> int:
        """Return the daemon's resident memory in bytes."""
        assert self._mount is not None
        pages = Path(f"/proc/{self._mount.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def has_daemon(self) -> bool:
        """Whether there is a process that serves it."""
        return self._mount is not None

    # ---- programs ----

    def run(self, *command: str | Path) -> str:
        """Run a program on the CPUs of the place; return what it prints."""
        cpus = ",".join(map(str, sorted(self._cpus)))
        return harness.run(["taskset", "-c", cpus, *command], timeout=TIMEOUT).stdout

    def drive(self, *arguments: str | Path | float) -> dict[str, float]:
        """Run the C driver; return nanoseconds by question."""
        lines = self.run(DRIVER, *map(str, arguments)).splitlines()
        answers = [json.loads(line) for line in lines]
        return {answer["name"]: answer["ns"] for answer in answers}

    def describe_end(self) -> str:
        """Return the end of the daemon's log, for the report of a failure."""
        log = self._folder / "log"
        return log.read_text(errors="replace")[-500:] if log.exists() else ""
