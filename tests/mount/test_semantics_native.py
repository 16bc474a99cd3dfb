"""What only the fast path can do: fallocate, holes, copy_file_range, birth times, O_TMPFILE."""

import ctypes
import itertools
import mmap
import os
import resource
import signal
import stat
import struct
from collections.abc import Iterator
from functools import partial

import pytest

from tests.mount import harness
from tests.mount.harness import Volume
from tests.mount.posix_checks import (
    AT_FDCWD,
    OTHER,
    USER,
    Ground,
    as_user,
    check,
    fails,
    opens,
    outcome,
    read,
    system,
    tick,
    write,
)

NODE = 4096
KEEP_SIZE, PUNCH_HOLE, ZERO = 1, 2, 16
MODES = (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO, ZERO | KEEP_SIZE)
AT_SYMLINK_FOLLOW = 0x400
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
SET_BITS = (0o6755, 0o4711, 0o2777, 0o4666)  # without the case of docs/conformance.md


@pytest.fixture(autouse=True)
def _fast_path() -> None:
    if not harness.fast_path:
        pytest.skip("without the fast path docs/conformance.md says what is missing")


def _pattern(size: int, seed: int = 1) -> bytes:
    return bytes((i * 7 + i // 251 + seed) & 0xFF or 1 for i in range(size))


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    system("fallocate", fd, mode, offset, length)


# ---- fallocate ----

RANGES = (
    (0, NODE),
    (NODE, 2 * NODE),
    (100, 50),
    (100, 3 * NODE),
    (NODE - 1, 2),
    (9000, 100_000),
    (1 << 20, 1),
)


@check()
def test_fallocate() -> Iterator[object]:
    for size, synced in itertools.product((0, 10, 2048, 5000, 300_000), (False, True)):
        for mode, (offset, length) in itertools.product(MODES, RANGES):
            fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.write(fd, _pattern(size))
            if synced:
                os.fsync(fd)
            error = fails(_fallocate, fd, mode, offset, length)
            contents = read("f")
            yield size, synced, mode, offset, length, error, len(contents), hash_of(contents)
            os.pwrite(fd, b"after", offset)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            yield hash_of(read("f"))
            os.close(fd)


def hash_of(contents: bytes) -> str:
    import hashlib  # noqa: PLC0415

    return hashlib.sha256(contents).hexdigest()[:16]


@check()
def test_fallocate_of_mapped_pages() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(fd, _pattern(4 * NODE))
    with mmap.mmap(fd, 4 * NODE) as shared:
        shared[NODE] = 0xEE
        _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, NODE, NODE)
        yield shared[NODE - 1], shared[NODE], shared[2 * NODE - 1], shared[2 * NODE]
        shared[NODE + 5] = 0x55
        _fallocate(fd, ZERO, 2 * NODE, 100)
        yield shared[NODE + 5], shared[2 * NODE], shared[2 * NODE + 99], shared[2 * NODE + 100]
    yield hash_of(read("f"))


@check()
def test_fallocate_that_cannot_be() -> Iterator[object]:
    write("f", b"x" * 5000)
    os.mkdir("d")
    os.mkfifo("p")
    fd = os.open("f", os.O_RDWR)
    for mode, offset, length in (
        (PUNCH_HOLE, 0, NODE),
        (PUNCH_HOLE | ZERO | KEEP_SIZE, 0, NODE),
        (0, -1, NODE),
        (0, 0, 0),
        (0, 0, -1),
        (KEEP_SIZE, 1 << 62, 1 << 62),
        (1 << 20, 0, NODE),
    ):
        yield mode, offset, length, fails(_fallocate, fd, mode, offset, length)
    for path, flags in (("f", os.O_RDONLY), ("d", os.O_RDONLY), ("p", os.O_RDWR)):
        other = os.open(path, flags)
        yield path, fails(_fallocate, other, 0, 0, NODE)
        os.close(other)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    yield fails(_fallocate, fd, 0, 0, 8193), fails(_fallocate, fd, 0, 0, 8192), os.fstat(fd).st_size
    yield read("f") == b"x" * 5000 + bytes(3192)


@check()
def test_fallocate_and_times() -> Iterator[object]:
    for mode in MODES:
        write("f", b"x" * 10_000)
        fd = os.open("f", os.O_RDWR)
        os.fsync(fd)
        os.utime(fd, ns=(1, 2))
        tick()
        before = os.fstat(fd)
        _fallocate(fd, mode, 0, 20_000)
        after = os.fstat(fd)
        if mode != KEEP_SIZE:  # whether that is a change is a matter of taste
            yield (
                mode,
                after.st_mtime_ns > before.st_mtime_ns,
                after.st_ctime_ns > before.st_ctime_ns,
            )
        os.close(fd)


# ---- holes ----


def _map(fd: int) -> list[tuple[str, object]]:
    """Return where data and holes begin, as seen from many places."""
    size = os.fstat(fd).st_size
    places = sorted({0, 1, NODE - 1, NODE, 65536, 65537, 1 << 20, size // 2, size - 1, size})
    return [
        (f"{place} {whence}", outcome(os.lseek, fd, place, whence))
        for place in places
        if place >= 0
        for whence in (os.SEEK_DATA, os.SEEK_HOLE)
    ]


@check()
def test_holes_with_dirty_pages() -> Iterator[object]:
    for synced in (False, True):
        fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(fd, 4 << 20)
        yield "all hole", _map(fd)
        os.pwrite(fd, b"x" * 65536, 1 << 20)
        os.pwrite(fd, b"y", 65536)
        if synced:
            os.fsync(fd)
        yield synced, _map(fd)
        with mmap.mmap(fd, 4 << 20) as shared:
            shared[2 << 20] = 1
            yield "mapped", _map(fd)
        _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 1 << 20, 32768)
        yield "punched", _map(fd)
        os.ftruncate(fd, 70_000)
        yield "cut", _map(fd)
        os.ftruncate(fd, 200_000)
        yield "grown", _map(fd)
        os.close(fd)


@check()
def test_seeks_that_cannot_be() -> Iterator[object]:
    write("f", b"x" * 5000)
    write("empty")
    for path in ("f", "empty"):
        fd = os.open(path, os.O_RDONLY)
        for offset, whence in itertools.product((-1, 0, 5000, 5001), (os.SEEK_DATA, os.SEEK_HOLE)):
            yield path, offset, whence, outcome(os.lseek, fd, offset, whence)
        os.close(fd)


# ---- copy_file_range ----


def _copy(source: int, target: int, count: int, at: int, to: int, *, flags: int = 0) -> int:
    offsets = ctypes.c_int64(at), ctypes.c_int64(to)
    return system(
        "copy_file_range",
        source,
        ctypes.byref(offsets[0]),
        target,
        ctypes.byref(offsets[1]),
        count,
        flags,
    )


@check()
def test_copying_ranges() -> Iterator[object]:
    for synced, (at, to, count) in itertools.product(
        (False, True),
        (
            (0, 0, 300_000),
            (0, 0, 1 << 20),
            (100, 0, 5000),
            (NODE, 3 * NODE, 2 * NODE),
            (5, 500_000, 70_000),
            (299_999, 7, 100),
            (300_000, 0, 100),
            (400_000, 0, 100),
            (0, 100, 0),
        ),
    ):
        write("from", _pattern(300_000))
        write("to", _pattern(20_000, 77))
        source, target = os.open("from", os.O_RDONLY), os.open("to", os.O_RDWR)
        if synced:
            os.fsync(source)
            os.fsync(target)
        with mmap.mmap(target, 20_000) as shared:
            copied = outcome(_copy, source, target, count, at, to)
            yield synced, at, to, count, copied, os.fstat(target).st_size, hash_of(shared[:])
        yield hash_of(read("to"))
        os.fsync(target)
        os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
        yield hash_of(read("to")), hash_of(read("from"))
        os.close(source)
        os.close(target)


@check()
def test_copying_within_a_file() -> Iterator[object]:
    for at, to, count in (
        (0, 50_000, 50_000),
        (50_000, 0, 100),
        (0, 100, 200),
        (7, 7, 1),
        (0, NODE, NODE),
    ):
        write("f", _pattern(100_000))
        fd = os.open("f", os.O_RDWR)
        yield at, to, count, outcome(_copy, fd, fd, count, at, to), hash_of(read("f"))
        os.close(fd)


def _dirty_pages_are_copied() -> Iterator[object]:
    source = os.open("from", os.O_RDWR | os.O_CREAT)
    os.ftruncate(source, 8 << 20)
    os.pwrite(source, b"x" * NODE, 4 << 20)
    target = os.open("to", os.O_RDWR | os.O_CREAT)
    assert _copy(source, target, 8 << 20, 0, 0) == 8 << 20
    assert os.lseek(target, 0, os.SEEK_DATA) == 4 << 20, "a hole became data"
    assert os.lseek(target, 4 << 20, os.SEEK_HOLE) == (4 << 20) + NODE
    assert read("to") == read("from")
    yield "right"


def test_a_copy_keeps_holes(ground: Ground) -> None:
    ground.run(_dirty_pages_are_copied)


@check()
def test_copies_that_cannot_be() -> Iterator[object]:
    write("f", b"x" * 5000)
    write("g", b"y" * 5000)
    os.mkdir("d")
    fd = {
        "read": os.open("f", os.O_RDONLY),
        "write": os.open("g", os.O_WRONLY),
        "append": os.open("g", os.O_WRONLY | os.O_APPEND),
        "directory": os.open("d", os.O_RDONLY),
    }
    for source, target in itertools.product(fd, fd):
        yield source, target, outcome(_copy, fd[source], fd[target], 100, 0, 0)
    yield outcome(_copy, fd["read"], fd["write"], 100, 0, 0, flags=1)
    yield outcome(_copy, fd["read"], fd["write"], 100, -1, 0)


# ---- privileges ----


@check(root=True)
def test_allocating_and_copying_clear_setuid_and_setgid() -> Iterator[object]:
    write("source", b"s" * 5000)

    def copy() -> None:
        source, target = os.open("source", os.O_RDONLY), os.open("f", os.O_WRONLY)
        _copy(source, target, 100, 0, 0)

    changes = {f"fallocate {mode}": partial(_fallocate_path, mode) for mode in MODES} | {
        "copy": copy
    }
    for mode, (name, change) in itertools.product(SET_BITS, changes.items()):
        for who in (0, USER, OTHER):
            write("f", b"y" * 5000)
            os.chown("f", USER, USER)
            os.chmod("f", mode)
            error = as_user(who, partial(fails, change))
            yield oct(mode), name, who, error, oct(os.stat("f").st_mode)
    for name, change in changes.items():
        write("f", b"y" * 5000)
        os.setxattr("f", "security.capability", CAPABILITY)
        change()
        yield name, os.listxattr("f")


def _fallocate_path(mode: int) -> None:
    fd = os.open("f", os.O_WRONLY)
    _fallocate(fd, mode, 0, 10_000)
    os.close(fd)


# ---- birth times ----


def _birth(path: str) -> int:
    buffer = ctypes.create_string_buffer(256)
    system("statx", AT_FDCWD, os.fsencode(path), 0x100, 0xFFF, buffer)
    assert struct.unpack_from("I", buffer)[0] & 0x800, path
    seconds, nanoseconds = struct.unpack_from("qI", buffer, 80)
    return int(seconds * 10**9 + nanoseconds)


def _births() -> Iterator[object]:
    write("f")
    os.mkdir("d")
    os.symlink("x", "l")
    os.mkfifo("p")
    born = {path: _birth(path) for path in "fdlp"}
    for path in "fdlp":
        info = os.lstat(path)
        assert born[path] == info.st_ctime_ns, path
    tick()
    write("f", b"x" * 5000)
    os.utime("f", ns=(1, 2))
    os.chmod("f", 0o600)
    os.rename("f", "g")
    write("d/h")
    assert _birth("g") == born["f"] and _birth("d") == born["d"]
    assert _birth("d/h") > born["f"]
    write("born", repr({**born, "g": born["f"]}))
    yield "right"


def _still_born() -> Iterator[object]:
    import ast  # noqa: PLC0415

    os.chdir("../_births")
    born = ast.literal_eval(read("born").decode())
    del born["f"]
    assert {path: _birth(path) for path in born} == born
    yield "right"


def test_births_are_remembered(volume: Volume) -> None:
    with volume.mounted():
        Ground(volume.point, None).run(_births)
    with volume.mounted():
        Ground(volume.point, None).run(_still_born)


# ---- nameless files ----


def _give_name(fd: int, name: str) -> None:
    path = f"/proc/self/fd/{fd}".encode()
    system("linkat", AT_FDCWD, path, AT_FDCWD, name.encode(), AT_SYMLINK_FOLLOW)


@check()
def test_nameless_files() -> Iterator[object]:
    os.umask(0o027)
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o6666)
    info = os.fstat(fd)
    yield info.st_nlink, oct(info.st_mode), info.st_size, os.listdir(".")
    os.write(fd, _pattern(100_000))
    os.fsync(fd)
    os.setxattr(fd, "user.a", b"1")
    yield hash_of(os.pread(fd, 200_000, 0)), os.fstat(fd).st_nlink
    yield fails(_give_name, fd, "named"), fails(_give_name, fd, "named"), fails(_give_name, fd, "b")
    yield os.fstat(fd).st_nlink, sorted(os.listdir("."))
    os.close(fd)
    yield hash_of(read("named")), os.getxattr("b", "user.a"), os.stat("b").st_nlink
    os.unlink("b")
    os.unlink("named")


@check()
def test_nameless_files_that_cannot_be() -> Iterator[object]:
    write("f")
    yield opens(".", os.O_TMPFILE | os.O_RDONLY), opens("f", os.O_TMPFILE | os.O_RDWR)
    yield opens("missing", os.O_TMPFILE | os.O_RDWR)
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    yield fails(_give_name, fd, "named"), os.fstat(fd).st_nlink, os.listdir(".")
    os.close(fd)


@check(root=True)
def test_owners_of_nameless_files() -> Iterator[object]:
    os.mkdir("d")
    os.chown("d", 0, OTHER)
    os.chmod("d", 0o2777)

    def make() -> tuple[int, int, str]:
        os.umask(0)
        info = os.fstat(os.open("d", os.O_TMPFILE | os.O_RDWR, 0o2775))
        return info.st_uid, info.st_gid, oct(info.st_mode)

    yield as_user(USER, make), make()
    os.chmod("d", 0o755)
    yield as_user(USER, partial(opens, "d", os.O_TMPFILE | os.O_RDWR))


@check()
def test_a_nameless_file_inherits_the_default_acl() -> Iterator[object]:
    import subprocess  # noqa: PLC0415

    os.mkdir("d")
    subprocess.run(["setfacl", "-d", "-m", "u:4711:rwx,g::r-x,o::---", "d"], check=True)
    os.umask(0o077)
    fd = os.open("d", os.O_TMPFILE | os.O_RDWR, 0o666)
    yield oct(os.fstat(fd).st_mode), os.getxattr(fd, "system.posix_acl_access")
    os.close(fd)


def _keep_nameless() -> Iterator[object]:
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"kept" * 5000)
    os.fsync(fd)
    _give_name(fd, "named")
    os.fsync(fd)
    lost = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(lost, b"lost" * 5000)
    os.fsync(lost)
    yield stat.S_ISREG(os.stat("named").st_mode)


def _named_only() -> Iterator[object]:
    os.chdir("../_keep_nameless")
    assert os.listdir(".") == ["named"]
    assert read("named") == b"kept" * 5000
    yield "right"


@pytest.mark.parametrize("crashed", [False, True], ids=["after unmount", "after a crash"])
def test_what_was_given_a_name_stays(volume: Volume, crashed: bool) -> None:
    with volume.mounted() as mount:
        Ground(volume.point, None).run(_keep_nameless)
        if crashed:
            mount.kill()
    with volume.mounted():
        Ground(volume.point, None).run(_named_only)
    volume.encfsd("verify", *volume.unlock, volume.source)
