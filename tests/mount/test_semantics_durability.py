"""What a remount or a crash must leave as it was; random operations beside a model."""

import ast
import hashlib
import json
import mmap
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.mount.harness import Volume, run
from tests.mount.posix_checks import ROOT, Ground, fails, outcome, read, rename2, write


def attributes(path: str) -> list[object]:
    """Return everything that belongs to one file, but for atime and ctime."""
    info = os.lstat(path)
    names = os.listxattr(path, follow_symlinks=False)
    contents = None
    if stat.S_ISREG(info.st_mode):
        with open(path, "rb") as file:
            contents = hashlib.file_digest(file, "sha256").hexdigest()
    return [
        *(info.st_ino, info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_rdev),
        *(info.st_size, info.st_blocks, info.st_mtime_ns),
        [(name, os.getxattr(path, name, follow_symlinks=False).hex()) for name in sorted(names)],
        os.readlink(path) if stat.S_ISLNK(info.st_mode) else None,
        contents,
    ]


def everything() -> str:
    """Return the whole tree, as text that can be compared."""
    found = {path: attributes(path) for path in _paths()}
    return json.dumps(found, indent=1, sort_keys=True)


def _paths() -> Iterator[str]:
    yield "."
    for where, folders, files in os.walk("."):
        for name in folders + files:
            yield f"{where}/{name}"


def _change_times() -> dict[str, int]:
    return {path: os.lstat(path).st_ctime_ns for path in _paths()}


# ---- remount ----


def _populate(expected: str) -> Iterator[object]:
    os.chdir("..")
    os.makedirs("d/deep/er")
    for size in (0, 1, 2048, 2049, 4096, 4097, 100_000, 3 << 20):
        write(f"d/{size}", os.urandom(size))
    write(b"d/\xff\xfe" + b"n" * 200, b"an odd name")
    os.link("d/1", "d/deep/link")
    os.symlink(b"\xfftarget", "d/symlink")
    os.mkfifo("d/fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("d/socket")
    if ROOT:
        os.mknod("d/device", stat.S_IFBLK | 0o600, os.makedev(7, 300))
        os.chown("d/2049", 1, 2)
        os.setxattr("d/4097", "security.capability", bytes.fromhex("01000002" + "20" + "00" * 15))
    os.chmod("d/2048", 0o6751)
    os.chmod("d/deep", 0o3770)
    os.setxattr("d/0", "user.binary", bytes(range(256)))
    os.setxattr("d", "user.large", b"v" * 60_000)
    os.utime("d/4096", ns=(1, -(10**18) - 7))
    os.utime("d/symlink", ns=(3, 4), follow_symlinks=False)
    os.truncate("d/0", 5 << 40)
    os.truncate("d/0", 0)
    fd = os.open("d/sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"far away", 1 << 26)
    run(["setfacl", "-m", "u:65534:rw,d:g:4711:rx", "d/deep"])
    rename2("d/deep/er", "d/4096", 2)
    os.fsync(fd)
    os.close(fd)
    os.sync()
    os.chdir("d")
    Path(expected).write_text(everything())
    Path(expected + ".ctime").write_text(repr(_change_times()))
    yield "made"


def _compare(expected: str) -> Iterator[object]:
    os.chdir("../d")
    found = everything().splitlines()
    wanted = Path(expected).read_text().splitlines()
    wrong = [pair for pair in zip(wanted, found, strict=False) if pair[0] != pair[1]]
    assert not wrong and len(found) == len(wanted), wrong[:10]
    # The kernel stamps changes too, and tells later: a ctime may be that much newer, never older.
    before, now = ast.literal_eval(Path(expected + ".ctime").read_text()), _change_times()
    latest = os.stat(expected + ".ctime").st_mtime_ns
    assert all(before[path] <= now[path] <= latest for path in before)
    yield "same"


def test_a_remount_changes_nothing(volume: Volume, tmp_path: Path) -> None:
    expected = str(tmp_path / "expected")
    with volume.mounted():
        Ground(volume.point, None).run(_populate, expected)
        Ground(volume.point, None).run(_compare, expected)
    with volume.mounted("--free-list=0"):
        Ground(volume.point, None).run(_compare, expected)
    volume.encfsd("verify", *volume.unlock, volume.source)


# ---- crash ----


def _synced(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _durable_steps() -> Iterator[object]:
    os.chdir("..")
    for name in ("old", "removed", "cut", "times", "attributes", "mapped", "replaced"):
        write(name, b"before " * 1000)
    os.mkdir("empty")
    _synced(".")
    for name in ("old", "removed", "cut", "times", "attributes", "mapped", "replaced"):
        _synced(name)

    write("created", b"c" * 10_000)
    _synced("created")
    os.makedirs("a/b")
    write("a/b/small", b"s")
    _synced("a/b/small")
    os.rename("old", "a/renamed")
    _synced("a")
    os.unlink("removed")
    os.rmdir("empty")
    os.symlink("target", "link")
    os.link("created", "hard")
    _synced(".")
    fd = os.open("cut", os.O_RDWR)
    os.ftruncate(fd, 10)
    os.fsync(fd)
    os.utime("times", ns=(7, 8))
    os.chmod("times", 0o4711)
    _synced("times")
    os.setxattr("attributes", "user.a", b"value")
    _synced("attributes")
    with mmap.mmap(os.open("mapped", os.O_RDWR), 0) as shared:
        shared[0:6] = b"stored"
        shared.flush()
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(20):
        os.write(log, b"line %d\n" % number)
        os.fdatasync(log)
    direct = os.open("sync", os.O_WRONLY | os.O_CREAT | os.O_SYNC)
    os.write(direct, b"y" * 5000)
    write("new", b"after " * 1000)
    _synced("new")
    os.rename("new", "replaced")
    _synced(".")
    yield "acknowledged"


def _after_the_crash() -> Iterator[object]:
    os.chdir("..")
    assert read("created") == read("hard") == b"c" * 10_000
    assert os.stat("hard").st_nlink == 2
    assert read("a/b/small") == b"s"
    assert read("a/renamed") == b"before " * 1000
    assert {fails(os.lstat, name) for name in ("old", "removed", "empty", "new")} == {"ENOENT"}
    assert os.readlink("link") == "target"
    assert read("cut") == b"before bef"
    assert (os.stat("times").st_mtime_ns, os.stat("times").st_mode) == (8, 0o104711)
    assert os.getxattr("attributes", "user.a") == b"value"
    assert read("mapped") == b"stored" + (b"before " * 1000)[6:]
    assert read("log") == b"".join(b"line %d\n" % number for number in range(20))
    assert read("sync") == b"y" * 5000
    assert read("replaced") == b"after " * 1000
    # All of it can still be used.
    for name in os.listdir("."):
        if os.path.isfile(name):
            write(name, b"again")
    yield "right"


def test_what_was_synced_survives_a_crash(volume: Volume) -> None:
    with volume.mounted() as mount:
        Ground(volume.point, None).run(_durable_steps)
        mount.kill()
    with volume.mounted():
        Ground(volume.point, None).run(_after_the_crash)
    volume.encfsd("verify", *volume.unlock, volume.source)


# ---- random operations ----


def _visible(top: str) -> dict[str, object]:
    """Return what must be the same in two trees."""
    found: dict[str, object] = {}
    for where, folders, files in os.walk(top):
        for name in folders + files:
            path = f"{where}/{name}"
            info = os.lstat(path)
            links = 0 if stat.S_ISDIR(info.st_mode) else info.st_nlink
            what: object = None
            if stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                what = hashlib.sha256(read(path)).hexdigest(), info.st_size
            found[os.path.relpath(path, top)] = oct(info.st_mode), links, what
    return found


def _some_path(random_: random.Random) -> str:
    """Return a path of up to three parts that often exists."""
    return "/".join(random_.choice("abcde") for _ in range(random_.choice((1, 1, 2, 2, 3))))


def _write_at(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def _operation(random_: random.Random) -> Callable[[str], object]:
    """Return one operation, to be done in any folder."""
    first, second = (_some_path(random_) for _ in range(2))
    offset = random_.choice((0, 0, 1, 100, 2040, 2048, 4096, 10_000, 300_000))
    data = random_.randbytes(random_.choice((1, 10, 2048, 2100, 4096, 9000, 200_000)))
    flags = random_.choice((0, 0, 0, 1, 2))
    mode = random_.choice((0o700, 0o744, 0o751))  # directories stay open to their owner
    choices: list[Callable[[str], object]] = [
        lambda top: _write_at(f"{top}/{first}", offset, data),
        lambda top: _write_at(f"{top}/{first}", offset, data),
        lambda top: os.truncate(f"{top}/{first}", offset),
        lambda top: rename2(f"{top}/{first}", f"{top}/{second}", flags),
        lambda top: os.unlink(f"{top}/{first}"),
        lambda top: os.mkdir(f"{top}/{first}", mode),
        lambda top: os.mkdir(f"{top}/{first}", mode),
        lambda top: os.rmdir(f"{top}/{first}"),
        lambda top: os.link(f"{top}/{first}", f"{top}/{second}", follow_symlinks=False),
        lambda top: os.symlink(second, f"{top}/{first}"),
        lambda top: os.chmod(f"{top}/{first}", mode),
        lambda top: _synced(f"{top}/{first}"),
        lambda top: os.listdir(f"{top}/{first}") and None,
    ]
    return random_.choice(choices)


def _random_operations(model: str, seed: str, count: str) -> Iterator[object]:
    os.chdir("..")
    os.makedirs("tree", exist_ok=True)
    assert _visible("tree") == _visible(model), "after the remount"
    random_ = random.Random(int(seed))
    for number in range(int(count)):
        operation = _operation(random_)
        here, there = outcome(operation, "tree"), outcome(operation, model)
        assert here == there, (number, here, there)
        if number % 60 == 0:
            assert _visible("tree") == _visible(model), number
    assert _visible("tree") == _visible(model)
    yield len(_visible(model))


def test_random_operations_with_remounts(volume: Volume, tmp_path: Path) -> None:
    """A local folder is the model: whatever it is on does these operations right."""
    model = tmp_path / "model"
    model.mkdir()
    for seed in range(3):
        options = ("--free-list=0",) if seed == 1 else ()
        with volume.mounted(*options):
            ground = Ground(volume.point, None)
            ground.run(_random_operations, str(model), str(seed), "500")
    assert any(model.rglob("*"))
    volume.encfsd("verify", *volume.unlock, volume.source)
