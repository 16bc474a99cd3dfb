"""docs/conformance.md is the whole list of what does not work as on ext4: each line of it is true.

Lines marked **F** are about mounts without the fast path, and untrue of one with it.

Each probe tries one thing. A deviation that is not listed fails, and so does one that is listed
but is none any more. The probes themselves are tried on a local ext4, where all must succeed.
"""

import ctypes
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mount import harness
from tests.mount.posix_checks import (
    AT_FDCWD,
    OTHER,
    RENAME_WHITEOUT,
    ROOT,
    USER,
    Ground,
    as_user,
    fails,
    read,
    rename2,
    system,
    tick,
    write,
)

TABLE = Path(__file__).parents[2] / "docs" / "conformance.md"
KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32

Probe = Callable[[], bool]
probes: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    """Enter a probe under its name; it says whether something works as on ext4."""
    probes[function.__name__.removeprefix("_").replace("_", "-")] = function
    return function


def listed(*, fast_path: bool) -> set[str]:
    """Return the names in the first column of the table, in the lines that hold for a mount."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|(.*)", TABLE.read_text(), re.MULTILINE)
    return {
        name
        for names, rest in rows
        if not (fast_path and "**F**" in rest)
        for name in re.findall("`([a-z0-9-]+)`", names)
    }


def _file(size: int = 5 * 4096) -> int:
    write("f", b"x" * size)
    fd = os.open("f", os.O_RDWR)
    os.fsync(fd)
    return fd


def _fallocates(mode: int, offset: int, length: int) -> tuple[str | None, bytes]:
    fd = _file()
    return fails(system, "fallocate", fd, mode, offset, length), read("f")


@probe
def _fallocate() -> bool:
    error, contents = _fallocates(0, 0, 10 * 4096)
    return error is None and len(contents) == 10 * 4096


@probe
def _fallocate_keep_size() -> bool:
    error, contents = _fallocates(KEEP_SIZE, 0, 10 * 4096)
    return error is None and contents == b"x" * 5 * 4096


@probe
def _fallocate_punch_hole() -> bool:
    error, contents = _fallocates(PUNCH_HOLE | KEEP_SIZE, 4096, 4096)
    return error is None and contents == b"x" * 4096 + bytes(4096) + b"x" * 3 * 4096


@probe
def _fallocate_zero_range() -> bool:
    error, contents = _fallocates(ZERO, 100, 5000)
    return error is None and contents == b"x" * 100 + bytes(5000) + b"x" * (5 * 4096 - 5100)


@probe
def _fallocate_collapse_range() -> bool:
    error, contents = _fallocates(COLLAPSE, 4096, 4096)
    return error is None and len(contents) == 4 * 4096


@probe
def _fallocate_insert_range() -> bool:
    error, contents = _fallocates(INSERT, 4096, 4096)
    return error is None and len(contents) == 6 * 4096


@probe
def _seek_finds_holes() -> bool:
    fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.pwrite(fd, b"x" * 65536, 1 << 20)
    os.ftruncate(fd, 4 << 20)
    os.fsync(fd)
    return os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20 and os.lseek(fd, 0, os.SEEK_HOLE) == 0


@probe
def _posix_fallocate() -> bool:
    fd = _file(10)
    os.posix_fallocate(fd, 0, 9000)  # libc writes if the kernel cannot
    return read("f") == b"x" * 10 + bytes(8990)


@probe
def _copy_file_range() -> bool:
    fd = _file()
    out = os.open("out", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    return os.copy_file_range(fd, out, 5000, 10, 0) == 5000 and read("out") == b"x" * 5000


@probe
def _tmpfile() -> bool:
    error = fails(lambda: os.close(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)))
    return error is None


@probe
def _birth_time() -> bool:
    write("f")
    buffer = ctypes.create_string_buffer(256)
    system("statx", AT_FDCWD, b"f", 0, 0xFFF, buffer)
    return bool(struct.unpack_from("I", buffer)[0] & 0x800)


@probe
def _file_attributes() -> bool:
    fd = _file()
    get_flags = 0x80086601
    return fails(fcntl.ioctl, fd, get_flags, bytes(8)) is None


@probe
def _fiemap() -> bool:
    fd = _file()
    request = struct.pack("QQIIII", 0, 1 << 40, 0, 0, 8, 0) + bytes(8 * 56)
    return fails(fcntl.ioctl, fd, 0xC020660B, request) is None


@probe
def _leases() -> bool:
    fd = _file()
    error = fails(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    os.close(fd)
    return error is None


@probe
def _change_notification() -> bool:
    libc = ctypes.CDLL(None)
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    system("inotify_add_watch", inotify, b".", 0x100)  # IN_CREATE
    write("watched")
    seen = b"watched" in os.read(inotify, 4096)
    os.close(inotify)
    os.unlink("watched")
    return seen


@probe
def _file_handles() -> bool:
    write("f", b"by handle")
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    system("name_to_handle_at", AT_FDCWD, b"f", handle, ctypes.byref(mount), 0)
    top = os.open(".", os.O_RDONLY)
    fd = system("open_by_handle_at", top, handle, os.O_RDONLY)
    return os.read(fd, 20) == b"by handle"


@probe
def _rename_whiteout() -> bool:
    write("f")
    return fails(rename2, "f", "g", RENAME_WHITEOUT) is None


@probe
def _xattr_create_and_replace() -> bool:
    write("f")
    return fails(os.setxattr, "f", "user.a", b"", os.XATTR_CREATE | os.XATTR_REPLACE) == "ENODATA"


@probe
def _truncate_to_same_size() -> bool:
    write("f", b"12345")
    os.utime("f", ns=(1, 2))
    os.truncate("f", 5)
    return os.stat("f").st_mtime_ns != 2


@probe
def _reading_changes_atime() -> bool:
    write("f", b"12345")
    os.utime("f", ns=(1, 2))
    tick()
    read("f")
    return os.stat("f").st_atime_ns != 1


@probe
def _times_after_2262() -> bool:
    os.symlink("f", "l")
    value = 15_000_000_000 * 10**9  # in 2445
    os.utime("l", ns=(value, value), follow_symlinks=False)
    return os.lstat("l").st_mtime_ns == value


@probe
def _setgid_without_execution() -> bool:
    write("f")
    os.chown("f", USER, USER)
    os.chmod("f", 0o2666)
    as_user(OTHER, partial(write, "f", b"x"))
    return os.stat("f").st_mode == 0o100666


@probe
def _read_without_waiting() -> bool:
    fd = _file()
    os.pread(fd, 100, 0)
    return fails(os.preadv, fd, [bytearray(100)], 0, os.RWF_NOWAIT) is None


@probe
def _setuid_ends_with_a_direct_write() -> bool:
    import mmap  # noqa: PLC0415

    fd = _file()
    os.chmod("f", 0o4777)

    def write_around_the_cache() -> None:
        buffer = mmap.mmap(-1, 4096)
        os.pwritev(os.open("f", os.O_WRONLY | os.O_DIRECT), [buffer], 0)

    as_user(USER, write_around_the_cache)
    return os.fstat(fd).st_mode == 0o100777


def _failing() -> set[str]:
    failing = set()
    for name, function in probes.items():
        os.mkdir(name)
        os.chmod(name, 0o777)
        os.chdir(name)
        try:
            works = function()
        except OSError:
            works = False
        if not works:
            failing.add(name)
        os.chdir("..")
    return failing


def _the_list_is_right(fast_path: str) -> Iterator[object]:
    found, expected = _failing(), listed(fast_path=fast_path == "True")
    assert found == expected, {
        "work, but are listed": sorted(expected - found),
        "do not work, and are not listed": sorted(found - expected),
    }
    yield "right"


@pytest.mark.skipif(not ROOT, reason="becomes other users")
def test_the_list_is_right(ground: Ground) -> None:
    ground.run(_the_list_is_right, str(harness.fast_path))


def _all_work() -> Iterator[object]:
    failing = _failing()
    assert not failing, failing
    yield "right"


def test_the_probes_are_right(ground: Ground) -> None:
    if ground.reference is None or not ROOT:
        pytest.skip("needs root and a local ext4")
    Ground(ground.reference, None).run(_all_work)
