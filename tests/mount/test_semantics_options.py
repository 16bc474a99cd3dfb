"""Mount options: ro, noatime, nosuid, nodev, noexec."""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Volume
from tests.mount.posix_checks import (
    ROOT,
    USER,
    Ground,
    as_user,
    fails,
    opens,
    read,
    tick,
    write,
)


def everything(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return all that a folder outside the mount holds: size, times, contents."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        info = path.lstat()
        contents = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (
            info.st_size,
            info.st_mtime_ns,
            info.st_ctime_ns,
            contents,
        )
    return found


def _make() -> Iterator[object]:
    os.chdir("..")
    write("small", b"s" * 100)
    write("large", b"l" * 100_000)
    os.mkdir("d")
    os.mkdir(_only_read.__name__)  # where that check will start
    os.symlink("large", "d/l")
    os.setxattr("small", "user.a", b"1")
    for name in ("small", "large", "d"):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    yield "made"


def _only_read() -> Iterator[object]:
    os.chdir("..")
    assert read("small") == b"s" * 100 and read("large") == b"l" * 100_000
    assert sorted(os.listdir("d")) == ["l"] and os.readlink("d/l") == "large"
    assert os.getxattr("small", "user.a") == b"1"
    refused = [
        opens("small", os.O_WRONLY),
        opens("new", os.O_CREAT | os.O_WRONLY),
        fails(os.truncate, "large", 0),
        fails(os.chmod, "small", 0o600),
        fails(os.utime, "small"),
        fails(os.unlink, "small"),
        fails(os.mkdir, "new"),
        fails(os.rmdir, "d"),
        fails(os.rename, "small", "large"),
        fails(os.link, "small", "new"),
        fails(os.symlink, "x", "new"),
        fails(os.setxattr, "small", "user.b", b""),
        fails(os.removexattr, "small", "user.a"),
        fails(os.mkfifo, "new"),
    ]
    assert set(refused) == {"EROFS"}, refused
    fd = os.open("large", os.O_RDONLY)
    yield fails(os.fsync, fd), os.statvfs(".").f_flag & os.ST_RDONLY


@pytest.mark.parametrize("crashed", [False, True], ids=["after unmount", "after a crash"])
def test_ro_writes_nothing_at_all(volume: Volume, crashed: bool) -> None:
    with volume.mounted() as mount:
        Ground(volume.point, None).run(_make)
        if crashed:
            mount.kill()
    before = everything(volume.source), everything(volume.state_dir)
    with volume.mounted("-o", "ro"):
        Ground(volume.point, None).run(_only_read)
    assert (everything(volume.source), everything(volume.state_dir)) == before
    with volume.mounted():
        Ground(volume.point, None).run(_still_works)


def _still_works() -> Iterator[object]:
    write("../new", b"x")
    yield read("../new")


def _reading_keeps_atime() -> Iterator[object]:
    write("f", b"x" * 5000)
    os.mkdir("d")
    os.symlink("f", "l")
    for path in ("f", "d", "l"):
        os.utime(path, ns=(5, 10), follow_symlinks=False)
    fd = os.open("f", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    tick()
    read("f"), os.listdir("d"), os.readlink("l")
    assert [os.lstat(path).st_atime_ns for path in ("f", "d", "l")] == [5, 5, 5]
    os.utime("f", ns=(6, 7))
    assert os.stat("f").st_atime_ns == 6
    yield "right"


def _no_programs() -> Iterator[object]:
    shutil.copy("/bin/true", "program")
    os.chmod("program", 0o755)
    assert fails(subprocess.run, ["./program"]) == "EACCES"
    yield "right"


def _powerless() -> Iterator[object]:
    os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert opens("null", os.O_RDONLY) == "EACCES"
    shutil.copy("/usr/bin/id", "id")
    os.chmod("id", 0o4755)
    assert as_user(USER, _effective) == f"{USER}\n"
    yield "right"


def _powerful() -> Iterator[object]:
    os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert opens("null", os.O_RDONLY) is None
    shutil.copy("/usr/bin/id", "id")
    os.chmod("id", 0o4755)
    assert as_user(USER, _effective) == "0\n"
    yield "right"


def _effective() -> str:
    return subprocess.run(["./id", "-u"], capture_output=True, text=True, check=True).stdout


def test_restrictions(volume: Volume) -> None:
    with volume.mounted("-o", "noatime,noexec"):
        ground = Ground(volume.point, None)
        ground.run(_reading_keeps_atime)
        ground.run(_no_programs)


@pytest.mark.skipif(not ROOT, reason="makes devices and becomes other users")
def test_suid_and_dev_only_if_asked_for(volume: Volume, ground: Ground) -> None:
    with volume.mounted("-o", "allow_other"):
        Ground(volume.point, None).run(_powerless)
    ground.run(_powerful)  # that mount has both
