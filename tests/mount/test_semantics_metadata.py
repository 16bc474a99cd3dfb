"""Attributes: times, who may set them, what changes them; modes; blocks; statfs."""

import itertools
import mmap  # here, as other users may not read Python's files
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

from tests.mount.posix_checks import (
    AT_FDCWD,
    OTHER,
    USER,
    as_user,
    check,
    fails,
    opens,
    read,
    rename2,
    system,
    tick,
    write,
)

YEAR = 31_556_952 * 10**9


def times(path: str) -> tuple[int, int, int]:
    """Return atime, mtime and ctime in nanoseconds; zeros for what is not there."""
    if not os.path.lexists(path):
        return 0, 0, 0
    info = os.lstat(path)
    return info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns


# ---- times that are set ----


@check()
def test_times_of_any_sign() -> Iterator[object]:
    write("f", b"x")
    os.mkdir("d")
    os.symlink("f", "l")
    years = (1902, 1969, 1970, 1971, 2038, 2039, 2105, 2107, 2262)
    values = [-1, 0, 1, 999_999_999, -999_999_999, -1_000_000_001, 10**9, (1 << 31) * 10**9 + 5]
    values += [(year - 1970) * YEAR + 123_456_789 for year in years]
    for path, value in itertools.product(("f", "d", "l"), values):
        os.utime(path, ns=(value, value + 1), follow_symlinks=False)
        assert times(path)[:2] == (value, value + 1), (path, value)
    yield len(values)


@check(same=False)
def test_times_that_64_bits_of_nanoseconds_cannot_hold_are_clamped() -> Iterator[object]:
    write("f")
    os.utime("f", ns=(476 * YEAR, -400 * YEAR))  # 2446, 1570
    os.symlink("f", "l")  # the kernel keeps the times of a regular file itself
    os.utime("l", ns=(476 * YEAR, -400 * YEAR), follow_symlinks=False)
    assert times("l")[:2] == ((1 << 63) - 1, -(1 << 63))
    yield "right"


@check()
def test_times_now_and_omitted() -> Iterator[object]:
    write("f")
    os.utime("f", ns=(1, 2))
    now, omit = (1 << 30) - 1, (1 << 30) - 2

    def set_(atime: tuple[int, int], mtime: tuple[int, int]) -> list[bool]:
        import array  # noqa: PLC0415

        tick()
        before = times("f")
        spec = array.array("l", [*atime, *mtime])
        system("utimensat", AT_FDCWD, b"f", spec.tobytes(), 0)
        return [a != b for a, b in zip(before, times("f"), strict=True)]

    yield set_((0, omit), (0, now)), set_((0, now), (0, omit)), set_((5, 6), (0, omit))
    yield set_((0, omit), (0, omit)), set_((0, now), (0, now))
    yield fails(set_, (0, 1 << 30), (0, 0)), fails(set_, (0, -1), (0, 0))


@check()
def test_times_set_before_close_stay() -> Iterator[object]:
    for size in (0, 10, 5000, 3 << 20):
        for sync in (False, True):
            with open("f", "wb", buffering=0) as file:
                file.write(b"x" * size)
                os.utime(file.fileno(), ns=(11, -22))
                if sync:
                    os.fsync(file.fileno())
            assert times("f")[:2] == (11, -22), (size, sync)
            os.sync() if sync else None
            fd = os.open("f", os.O_RDWR)
            assert read("f") == b"x" * size and os.stat("f").st_mtime_ns == -22
            os.fsync(fd)
            os.close(fd)
            assert os.stat("f").st_mtime_ns == -22, (size, sync)
            os.unlink("f")
    write("source", b"s" * 10_000)
    os.utime("source", ns=(1 * YEAR + 3, 2 * YEAR + 5))
    subprocess.run(["cp", "-p", "source", "copy"], check=True)
    yield os.stat("copy").st_mtime_ns
    subprocess.run(["tar", "cf", "t.tar", "--format=pax", "source"], check=True)
    os.mkdir("out")
    subprocess.run(["tar", "xf", "t.tar", "-C", "out"], check=True)
    yield os.stat("out/source").st_mtime_ns


# ---- times that change by themselves ----


def _open_in(name: str, flags: int) -> Callable[[], None]:
    return lambda: os.close(os.open(name, flags, 0o666))


def _written(data: bytes, sync: bool) -> None:
    with open("f", "r+b", buffering=0) as file:
        file.write(data)
        if sync:
            os.fsync(file.fileno())


OPERATIONS: dict[str, Callable[[], object]] = {
    "write": lambda: _written(b"w", False),
    "write and sync": lambda: _written(b"v", True),
    "write nothing": lambda: _written(b"", False),
    "truncate": lambda: os.truncate("f", 3),
    "extend": lambda: os.truncate("f", 10_000),
    "open truncating": _open_in("f", os.O_WRONLY | os.O_TRUNC),
    "open truncating what is empty": _open_in("f", os.O_WRONLY | os.O_TRUNC),
    "open": _open_in("f", os.O_RDWR),
    "open with O_CREAT": _open_in("f", os.O_RDWR | os.O_CREAT),
    "stat": lambda: os.stat("f"),
    "chmod": lambda: os.chmod("f", 0o640),
    "chmod to same": lambda: os.chmod("f", 0o640),
    "chown nothing": lambda: os.chown("f", -1, -1),
    "chown to same": lambda: os.chown("f", os.getuid(), os.getgid()),
    "utime": lambda: os.utime("f", ns=(1, 1)),
    "setxattr": lambda: os.setxattr("f", "user.a", b"1"),
    "setxattr again": lambda: os.setxattr("f", "user.a", b"2"),
    "removexattr": lambda: os.removexattr("f", "user.a"),
    "getxattr": lambda: fails(os.getxattr, "f", "user.a"),
    "link": lambda: os.link("f", "d/g"),
    "unlink a link": lambda: os.unlink("d/g"),
    "rename": lambda: os.rename("f", "d/f"),
    "rename back": lambda: os.rename("d/f", "f"),
    "rename within": lambda: os.rename("f", "f2"),
    "rename within, back": lambda: os.rename("f2", "f"),
    "mkdir": lambda: os.mkdir("d/sub"),
    "rename a directory": lambda: os.rename("d/sub", "sub"),
    "rename a directory back": lambda: os.rename("sub", "d/sub"),
    "exchange": lambda: rename2("f", "d/sub", 2),
    "exchange back": lambda: rename2("f", "d/sub", 2),
    "rmdir": lambda: os.rmdir("d/sub"),
    "symlink": lambda: os.symlink("x", "d/l"),
    "readlink": lambda: os.readlink("d/l"),
    "unlink a symlink": lambda: os.unlink("d/l"),
    "mkfifo": lambda: os.mkfifo("d/p"),
    "create": _open_in("d/new", os.O_CREAT | os.O_WRONLY),
    "rename over": lambda: os.rename("d/new", "d/p"),
    "fail to create": lambda: opens("d/p", os.O_CREAT | os.O_EXCL),
    "fail to unlink": lambda: fails(os.unlink, "d"),
    "lookup": lambda: os.path.exists("d/none"),
}


@check()
def test_what_changes_which_time() -> Iterator[object]:
    write("f", b"contents")
    os.mkdir("d")
    paths = ("f", "d", ".")
    for name, operation in OPERATIONS.items():
        before = {path: times(path) for path in paths}
        tick()
        operation()
        changed = {
            path: [
                which
                for which, a, b in zip("amc", before[path], times(path), strict=True)
                if a != b
            ]
            for path in paths
        }
        yield name, changed


@check()
def test_new_files_have_one_time() -> Iterator[object]:
    write("f")
    os.mkdir("d")
    os.symlink("x", "l")
    os.mkfifo("p")
    for name in ("f", "d", "l", "p"):
        yield len(set(times(name)))
    parent = os.stat(".")
    assert parent.st_mtime_ns == parent.st_ctime_ns == os.lstat("p").st_mtime_ns


# ---- modes ----


@check()
def test_umask_and_modes() -> Iterator[object]:
    for mask in (0, 0o022, 0o077, 0o777):
        os.umask(mask)
        fd = os.open(f"f{mask}", os.O_CREAT | os.O_WRONLY, 0o7777)
        yield oct(os.fstat(fd).st_mode)
        os.mkdir(f"d{mask}", 0o7777)
        os.mkfifo(f"p{mask}", 0o777)
        yield [oct(os.stat(f"{kind}{mask}").st_mode) for kind in "dp"]
    for mode in (0, 0o7777, 0o4000, 0o100644, 0o1644):
        os.chmod("f0", mode)
        yield oct(os.stat("f0").st_mode)


# Setgid without execution by the group is a matter of docs/conformance.md.
SET_BITS = [0o6777, 0o6755, 0o6745, 0o4711, 0o2777, 0o4666, 0o7777]


def _write_through(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"x")
    os.close(fd)


def _write_around_the_cache(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    os.pwritev(fd, [mmap.mmap(-1, 4096)], 0)
    os.close(fd)


def _write_mapped(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 4096) as shared:
        shared[0] = 0x78
        shared.flush()


WRITERS: dict[str, Callable[[str], object]] = {
    "write": _write_through,
    "write around the cache": _write_around_the_cache,
    "truncate": lambda path: os.truncate(path, 10),
    "extend": lambda path: os.truncate(path, 100_000),
    "open truncating": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    "write nothing": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "utime now": os.utime,
}


def run_here(*command: str) -> str:
    """Return what a program says."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


@check(root=True)
def test_writing_clears_setuid_and_setgid() -> Iterator[object]:
    for mode, (name, writer) in itertools.product(SET_BITS, WRITERS.items()):
        for who in (0, USER, OTHER):
            write("f", b"y" * 4096)
            os.chown("f", USER, USER)
            os.chmod("f", mode)
            error = as_user(who, partial(fails, writer, "f"))
            # First the mode alone, as exec wants it: asking for all would refresh an old one.
            yield run_here("stat", "-c", "%a", "f")
            yield oct(mode), name, who, error, oct(os.stat("f").st_mode)
            os.unlink("f")


@check(root=True)
def test_chown_clears_setuid_and_setgid() -> Iterator[object]:
    for mode in SET_BITS:
        for uid, gid in ((USER, -1), (-1, USER), (-1, -1), (0, 0), (OTHER, OTHER)):
            write("f")
            os.mkdir("d")
            for path in ("f", "d"):
                os.chmod(path, mode)
                os.chown(path, uid, gid)
                yield oct(mode), uid, gid, oct(os.stat(path).st_mode), os.stat(path).st_uid
            os.unlink("f")
            os.rmdir("d")
        write("f")
        os.chown("f", USER, USER)
        os.chmod("f", mode)
        yield as_user(USER, lambda: fails(os.chown, "f", -1, OTHER), groups=[OTHER])
        yield oct(os.stat("f").st_mode), os.stat("f").st_gid
        os.unlink("f")


@check(root=True)
def test_a_capability_of_a_file_ends_with_its_contents() -> Iterator[object]:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    for name, writer in WRITERS.items():
        write("f", b"x" * 5000)
        os.setxattr("f", "security.capability", capability)
        writer("f")
        yield name, os.listxattr("f")
    os.setxattr("f", "security.capability", capability)
    os.chown("f", USER, USER)
    yield os.listxattr("f")


@check(root=True)
def test_setgid_directories() -> Iterator[object]:
    os.mkdir("d")
    os.chown("d", 0, OTHER)
    os.chmod("d", 0o2777)

    def make(prefix: str) -> None:
        os.chdir("d")
        os.umask(0)
        os.close(os.open(prefix + "f", os.O_CREAT | os.O_WRONLY, 0o2771))
        os.close(os.open(prefix + "plain", os.O_CREAT | os.O_WRONLY, 0o2644))
        os.mkdir(prefix + "d", 0o755)
        os.mkfifo(prefix + "p", 0o644)
        os.symlink("x", prefix + "l")

    for uid, gid, groups in ((0, 0, []), (USER, USER, []), (USER, USER, [OTHER]), (7, OTHER, [])):
        prefix = f"{uid}-{gid}-{len(groups)}-"
        as_user(uid, partial(make, prefix), gid=gid, groups=groups)
        for name in ("f", "plain", "d", "p", "l"):
            info = os.lstat(f"d/{prefix}{name}")
            yield prefix + name, oct(info.st_mode), info.st_uid, info.st_gid
    write("g")
    for group in (USER, OTHER):
        os.chown("g", USER, group)
        as_user(USER, lambda: os.chmod("g", 0o2755))
        yield group, oct(os.stat("g").st_mode)


# ---- sizes ----


@check(same=False)
def test_blocks_count_what_is_stored() -> Iterator[object]:
    for size, least, most in ((1, 1, 8), (2048, 1, 8), (5000, 8, 24), (1 << 20, 2048, 2200)):
        with open("f", "wb", buffering=0) as file:
            file.write(b"x" * size)
            os.fsync(file.fileno())
        assert least <= os.stat("f").st_blocks <= most, (size, os.stat("f").st_blocks)
    os.truncate("f", 1 << 30)
    assert 2048 <= os.stat("f").st_blocks <= 2200
    os.truncate("f", 4096)
    assert os.stat("f").st_blocks <= 24
    os.truncate("f", 0)
    assert os.stat("f").st_blocks <= 1
    info = os.stat("f")
    assert info.st_blksize >= 4096
    yield "right"


@check(same=False)
def test_statfs_is_believable() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.sync()
    before = os.statvfs(".")
    assert before.f_frsize in {512, 1024, 4096} and before.f_bsize >= before.f_frsize
    assert before.f_namemax == 255
    assert 0 < before.f_bavail <= before.f_bfree < before.f_blocks
    assert 0 < before.f_favail <= before.f_ffree < before.f_files
    for _ in range(16):
        os.write(fd, os.urandom(1 << 20))
    os.fsync(fd)
    after = os.statvfs(".")
    used = (before.f_blocks - before.f_bfree) * before.f_frsize
    assert after.f_files - after.f_ffree >= 1
    assert (after.f_blocks - after.f_bfree) * after.f_frsize > used + (12 << 20)
    listed = subprocess.run(
        ["df", "-k", "--output=size,used,avail", "."], capture_output=True, text=True, check=True
    ).stdout.split()
    size, taken, free = map(int, listed[-3:])
    assert size >= taken + free > 0
    total = shutil.disk_usage(".")
    assert total.free > 0
    assert os.fstatvfs(fd).f_namemax == 255
    yield "right"


@check(same=False)
def test_inode_numbers_are_told_apart() -> Iterator[object]:
    for number in range(100):
        write(f"f{number}")
    inodes = {os.stat(f"f{number}").st_ino for number in range(100)}
    assert len(inodes) == 100
    for number in range(100):
        os.unlink(f"f{number}")
    for number in range(100):
        write(f"g{number}")
    again = {os.stat(f"g{number}").st_ino for number in range(100)}
    assert len(again) == 100
    yield "right"
