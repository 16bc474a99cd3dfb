"""A full backing store: ENOSPC where programs look for it, nothing damaged, space comes back."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Volume, run
from tests.mount.posix_checks import ROOT, Ground, fails, read, write

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not ROOT, reason="mounts a small tmpfs")


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Volume]:
    """Return a volume whose backing directory has 40 MiB."""
    volume = Volume(tmp_path, key_file=True)
    run(["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", volume.source])
    try:
        volume.init()
        yield volume
    finally:
        run(["umount", "-l", volume.source])


def _contents(number: int, size: int = MIB) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(size)


def _durable(path: str, data: bytes) -> str | None:
    """Write a file and sync it; return the error of whichever call had one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        return fails(os.write, fd, data) or fails(os.fsync, fd)
    finally:
        os.close(fd)


def wait_for_space(wanted: int) -> None:
    """Return when so many bytes are free: what is deleted comes free with a later commit."""
    for _ in range(600):
        space = os.statvfs(".")
        if space.f_bavail * space.f_frsize >= wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"only {space.f_bavail * space.f_frsize} of {wanted} bytes came free")


def _fill() -> Iterator[object]:
    os.chdir("..")
    os.mkdir(_free_and_fill_again.__name__)  # where that check will start
    write("kept", b"k" * 100_000)
    assert _durable("first", _contents(-1)) is None
    stored = 0
    while (error := _durable(f"f{stored}", _contents(stored))) is None:
        stored += 1
        assert stored < 60, "more was stored than there is room for"
    assert error == "ENOSPC"
    assert stored >= 25, f"only {stored} MiB of 40 could be used"
    os.unlink(f"f{stored}")
    space = os.statvfs(".")
    assert space.f_bavail * space.f_frsize < 8 * MIB
    # The kernel writes back later, so that it may be left to fsync or close to tell.
    for sync in (True, False):
        fd = os.open("late", os.O_WRONLY | os.O_CREAT)
        errors = [fails(os.write, fd, _contents(0)) for _ in range(20)]
        errors += [fails(os.fsync, fd)] if sync else []
        errors += [fails(os.close, fd)]
        assert set(errors) <= {None, "ENOSPC"} and "ENOSPC" in errors, errors
        os.unlink("late")
    for number in range(stored):
        assert read(f"f{number}") == _contents(number), number
    assert read("first") == _contents(-1) and read("kept") == b"k" * 100_000
    # What needs no room goes on.
    os.rename("first", "renamed")
    os.chmod("renamed", 0o600)
    write("count", b"%d" % stored)
    fd = os.open("count", os.O_RDWR)
    os.fsync(fd)
    yield "full"


def _free_and_fill_again() -> Iterator[object]:
    os.chdir("..")
    stored = int(read("count"))
    assert read("renamed") == _contents(-1) and read("kept") == b"k" * 100_000
    for number in range(stored):
        assert read(f"f{number}") == _contents(number), number
    before = os.statvfs(".")
    for number in range(0, stored, 2):
        os.unlink(f"f{number}")
    wait_for_space(before.f_bavail * before.f_frsize + (stored // 2 - 3) * MIB)
    for number in range(0, stored - 20, 2):
        assert _durable(f"g{number}", _contents(number + 1000)) is None, number
    for number in range(1, stored, 2):
        assert read(f"f{number}") == _contents(number)
    # Overwriting needs room, of which a file keeps a part: nothing is written in place.
    for number in range(1, stored, 4):
        assert _durable(f"f{number}", _contents(number + 2000)) is None, number
    for number in range(1, stored, 4):
        assert read(f"f{number}") == _contents(number + 2000)
    yield "again"


def test_a_full_store_damages_nothing(small_volume: Volume) -> None:
    with small_volume.mounted() as mount:
        Ground(small_volume.point, None).run(_fill, timeout=120)
        mount.kill()
    small_volume.encfsd("verify", *small_volume.unlock, small_volume.source)
    with small_volume.mounted():
        Ground(small_volume.point, None).run(_free_and_fill_again, timeout=120)
    small_volume.encfsd("verify", *small_volume.unlock, small_volume.source)


def _fill_by_files() -> Iterator[object]:
    os.chdir("..")
    os.mkdir(_delete_files.__name__)  # where that check will start
    assert _durable("ballast", bytes(range(256)) * (28 * MIB // 256)) is None
    made = 0
    while (error := fails(write, f"{made:0200}", b"x" * 2000)) is None:
        made += 1
        if made % 500 == 0:
            fd = os.open(".", os.O_RDONLY)
            error = fails(os.fsync, fd)
            os.close(fd)
            if error is not None:
                break
        assert made < 30_000
    assert error == "ENOSPC" and made > 200, (error, made)
    yield "full"


def _delete_files() -> Iterator[object]:
    os.chdir("..")
    names = [name for name in os.listdir(".") if name.startswith("0")]
    assert len(names) > 200
    assert read(min(names)) == b"x" * 2000
    for name in names:
        os.unlink(name)
    os.unlink("ballast")
    fd = os.open(".", os.O_RDONLY)
    os.fsync(fd)
    assert _durable("after", _contents(1)) is None
    assert read("after") == _contents(1)
    assert not [name for name in os.listdir(".") if name.startswith("0")]
    yield "right"


def test_a_store_that_names_fill(small_volume: Volume) -> None:
    with small_volume.mounted():
        Ground(small_volume.point, None).run(_fill_by_files, timeout=120)
    with small_volume.mounted():
        Ground(small_volume.point, None).run(_delete_files, timeout=120)
    small_volume.encfsd("verify", *small_volume.unlock, small_volume.source)


def _hold_unlinked() -> Iterator[object]:
    os.chdir("..")
    free = os.statvfs(".").f_bavail
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    for number in range(20):
        os.write(fd, _contents(number))
    os.fsync(fd)
    os.unlink("f")
    directory = os.open(".", os.O_RDONLY)
    os.fsync(directory)
    taken = os.statvfs(".")
    assert (free - taken.f_bavail) * taken.f_frsize > 18 * MIB
    assert os.pread(fd, MIB, 7 * MIB) == _contents(7)
    os.close(fd)
    wait_for_space(free * taken.f_frsize - MIB)
    yield "right"


def test_an_unlinked_file_keeps_its_space_until_closed(small_volume: Volume) -> None:
    with small_volume.mounted():
        Ground(small_volume.point, None).run(_hold_unlinked)
