"""Reading directories: while they change, from any place, large ones."""

import ctypes
import os
import random
import stat
from collections.abc import Iterator
from functools import partial

import pytest

from tests.mount.harness import Volume
from tests.mount.posix_checks import Ground, check, in_child, start, write

_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long


class Entry(ctypes.Structure):
    """struct dirent of Linux on 64-bit machines."""

    _fields_ = [
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    ]


_libc.readdir.restype = ctypes.POINTER(Entry)


class Stream:
    """A DIR of libc."""

    def __init__(self, path: str) -> None:
        self._dir = ctypes.c_void_p(_libc.opendir(os.fsencode(path)))
        assert self._dir.value

    def next(self) -> tuple[bytes, int, int] | None:
        """Return name, inode number and type of the next entry, or None."""
        entry = _libc.readdir(self._dir)
        return (entry[0].name, entry[0].ino, entry[0].type) if entry else None

    def rest(self) -> list[bytes]:
        """Return the names that remain."""
        names = []
        while (entry := self.next()) is not None:
            names.append(entry[0])
        return names

    def tell(self) -> int:
        """Return the present place."""
        return int(_libc.telldir(self._dir))

    def seek(self, place: int) -> None:
        """Go to a place that `tell` returned."""
        _libc.seekdir(self._dir, ctypes.c_long(place))

    def rewind(self) -> None:
        """Go to the start and see the directory as it is now."""
        _libc.rewinddir(self._dir)

    def close(self) -> None:
        """Free it."""
        _libc.closedir(self._dir)


def fill(folder: str, count: int, prefix: str = "f") -> list[str]:
    """Make many files; return their names."""
    os.mkdir(folder)
    names = [f"{prefix}{number}-{'x' * (number % 100)}" for number in range(count)]
    for name in names:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY))
    return names


@check()
def test_entries_say_what_they_are() -> Iterator[object]:
    write("file")
    os.mkdir("dir")
    os.symlink("x", "link")
    os.mkfifo("fifo")
    stream = Stream(".")
    found = {}
    while (entry := stream.next()) is not None:
        name, inode, kind = entry
        assert name not in found
        found[name] = kind
        info = os.lstat(name)
        assert inode == info.st_ino, name
        assert kind == stat.S_IFMT(info.st_mode) >> 12
    yield sorted(found.items())
    os.mkdir("dir/sub")
    stream = Stream("dir/sub")
    numbers = {entry[0]: entry[1] for entry in iter(stream.next, None)}
    assert numbers == {b".": os.stat("dir/sub").st_ino, b"..": os.stat("dir").st_ino}


@check(timeout=120)
def test_entries_come_and_go_while_reading() -> Iterator[object]:
    stay = fill("d", 800, "stay")
    for number in range(200):
        os.mkdir(f"d/go{number}")
    random_ = random.Random(5)
    for _ in range(2):
        stream = Stream("d")
        seen: list[bytes] = []
        going = [name for name in os.listdir("d") if name.startswith("go")]
        random_.shuffle(going)
        made = 0
        while (entry := stream.next()) is not None:
            seen.append(entry[0])
            if len(seen) % 5 == 0:
                if going:
                    os.rmdir(f"d/{going.pop()}")
                os.mkdir(f"d/new{made}")
                made += 1
                os.rename(f"d/new{made - 1}", f"d/go-new{made}")
        stream.close()
        assert len(seen) == len(set(seen)), "an entry came twice"
        assert {os.fsencode(name) for name in stay} <= set(seen), "an entry was left out"
    yield "right"


@check(timeout=120)
def test_all_is_removed_while_reading() -> Iterator[object]:
    names = fill("d", 1000)
    seen = []
    with os.scandir("d") as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.path)
    assert sorted(seen) == sorted(names)
    yield os.listdir("d")
    os.rmdir("d")


@check()
def test_places_last() -> Iterator[object]:
    fill("d", 1000)
    stream = Stream("d")
    places, names = [], []
    while True:
        place = stream.tell()
        entry = stream.next()
        if entry is None:
            break
        places.append(place)
        names.append(entry[0])
    assert len(names) == 1002
    random_ = random.Random(6)
    for index in [0, 1, 2, 3, 1001, *random_.sample(range(1002), 40)]:
        stream.seek(places[index])
        entry = stream.next()
        assert entry is not None and entry[0] == names[index], index
    index = 700
    stream.seek(places[index])
    assert stream.rest() == names[index:]
    # The entry at a place is gone: reading goes on with the one that followed.
    os.unlink(b"d/" + names[index])
    stream.seek(places[index])
    assert stream.rest() == names[index + 1 :]
    # In another stream too, of another process.
    other = Stream("d")
    other.seek(places[900])
    assert other.rest() == names[900:]
    stream.rewind()
    write("d/appeared")
    stream.rewind()
    assert set(stream.rest()) == {*names, b"appeared"} - {names[index]}
    yield "right"


@check()
def test_what_others_do_is_seen() -> Iterator[object]:
    os.mkdir("d")
    for number in range(20):
        in_child(partial(write, f"d/{number}"))
        assert len(os.listdir("d")) == number + 1
    for number in range(20):
        in_child(partial(os.unlink, f"d/{number}"))
        assert len(os.listdir("d")) == 19 - number
    yield "right"


@check(timeout=120)
def test_many_read_one_directory() -> Iterator[object]:
    names = sorted(fill("d", 600))
    waits = [start(lambda: [sorted(os.listdir("d")) == names for _ in range(5)]) for _ in range(4)]
    for wait in waits:
        assert wait() == [True] * 5
    yield "right"


def _large(count: int) -> None:
    os.mkdir("d")
    for number in range(count):
        os.close(os.open(f"d/{number}", os.O_CREAT | os.O_WRONLY))
    assert {int(name) for name in os.listdir("d")} == set(range(count))
    random_ = random.Random(7)
    for number in random_.sample(range(count), 500):
        assert os.path.exists(f"d/{number}")
        assert not os.path.exists(f"d/{number}.")
    fd = os.open("d", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    for number in range(count):
        os.unlink(f"d/{number}")
    assert os.listdir("d") == []
    os.rmdir("d")


@check(same=False, timeout=120)
def test_5000_entries() -> Iterator[object]:
    _large(5000)
    yield "right"


def _large_for_long() -> Iterator[object]:
    _large(200_000)
    yield "right"


@pytest.mark.long
def test_200000_entries(volume: Volume) -> None:
    with volume.mounted(lifetime=3600):
        Ground(volume.point, None).run(_large_for_long, timeout=3000)
