"""Advisory locks between processes: flock, fcntl, locks of open file descriptions."""

import fcntl
import os
import struct
from collections.abc import Iterator
from functools import partial

from tests.mount.posix_checks import check, fails, in_child, read, start, write

F_OFD_SETLK = 37


def _lock(fd: int, kind: int, begin: int, length: int, command: int = fcntl.F_SETLK) -> str | None:
    return fails(fcntl.fcntl, fd, command, struct.pack("hhqqi4x", kind, 0, begin, length, 0))


def _blocker(fd: int, kind: int, begin: int, length: int) -> tuple[int, int, int, int]:
    """Return kind, start, length and process of the lock that is in the way."""
    asked = struct.pack("hhqqi4x", kind, 0, begin, length, 0)
    kind, _, begin, length, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return kind, begin, length, pid


@check()
def test_flock() -> Iterator[object]:
    write("f")
    fd = os.open("f", os.O_RDONLY)

    def other(operation: int) -> str | None:
        result: str | None = in_child(
            lambda: fails(fcntl.flock, os.open("f", os.O_RDONLY), operation | fcntl.LOCK_NB)
        )
        return result

    for operation in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN, fcntl.LOCK_EX):
        fcntl.flock(fd, operation)
        yield other(fcntl.LOCK_SH), other(fcntl.LOCK_EX)
    second = os.open("f", os.O_RDONLY)
    yield fails(fcntl.flock, second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    copy = os.dup(fd)
    os.close(fd)
    yield other(fcntl.LOCK_EX)
    os.close(copy)
    yield other(fcntl.LOCK_EX)


@check()
def test_a_lock_that_is_waited_for() -> Iterator[object]:
    write("counter", b"0")
    write("lock")

    def count(take: int) -> None:
        fd = os.open("lock", os.O_RDWR)
        for _ in range(50):
            if take == 0:
                fcntl.flock(fd, fcntl.LOCK_EX)
            else:
                fcntl.lockf(fd, fcntl.LOCK_EX)
            value = int(read("counter"))
            write("counter", b"%d" % (value + 1))
            if take == 0:
                fcntl.flock(fd, fcntl.LOCK_UN)
            else:
                fcntl.lockf(fd, fcntl.LOCK_UN)

    for take in (0, 1):
        for wait in [start(partial(count, take)) for _ in range(4)]:
            wait()
        yield read("counter")


@check()
def test_ranges() -> Iterator[object]:
    write("f", bytes(1000))
    fd = os.open("f", os.O_RDWR)
    assert _lock(fd, fcntl.F_WRLCK, 100, 50) is None
    assert _lock(fd, fcntl.F_RDLCK, 500, 0) is None
    own = os.getpid()

    def others() -> list[object]:
        theirs = os.open("f", os.O_RDWR)
        found: list[object] = []
        for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            for begin, length in ((0, 100), (0, 101), (149, 1), (150, 350), (600, 1), (0, 0)):
                found.append(_lock(theirs, kind, begin, length))
                found.append(_lock(theirs, fcntl.F_UNLCK, begin, length))
        kind, begin, length, pid = _blocker(theirs, fcntl.F_WRLCK, 0, 0)
        return [*found, kind, begin, length, pid == own]

    yield in_child(others)
    # Closing any descriptor of the file gives up the locks of the process, as POSIX wants it.
    os.close(os.open("f", os.O_RDONLY))
    yield in_child(others)
    reader = os.open("f", os.O_RDONLY)
    yield _lock(reader, fcntl.F_WRLCK, 0, 1), _lock(fd, fcntl.F_WRLCK, 0, -1)


@check()
def test_locks_of_open_file_descriptions() -> Iterator[object]:
    write("f", bytes(1000))
    first, second = os.open("f", os.O_RDWR), os.open("f", os.O_RDWR)
    yield _lock(first, fcntl.F_WRLCK, 0, 10, F_OFD_SETLK)
    yield _lock(second, fcntl.F_WRLCK, 5, 10, F_OFD_SETLK)
    yield _lock(second, fcntl.F_WRLCK, 10, 10, F_OFD_SETLK)
    os.close(os.open("f", os.O_RDONLY))
    yield _lock(second, fcntl.F_RDLCK, 5, 1, F_OFD_SETLK)
    os.close(first)
    yield _lock(second, fcntl.F_RDLCK, 5, 1, F_OFD_SETLK)


@check()
def test_locks_end_with_their_process() -> Iterator[object]:
    write("f", bytes(10))

    def take() -> None:
        fd = os.open("f", os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_EX)

    in_child(take)
    fd = os.open("f", os.O_RDWR)
    yield fails(fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield fails(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
