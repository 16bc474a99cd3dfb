"""The Python face of one object. What the core does is tested beside the model."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from encfsd.merkle import META_ID, Attributes, Damage, Environment
from encfsd.state import RootId
from tests.model.object_model import NODE

ID = bytes(range(16))
VOLUME_ID = b"volume-id-16byte"
P = b"p" * 32


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def env(source: int) -> Iterator[Environment]:
    with Environment(source, volume_id=VOLUME_ID, p=P, epoch=1) as environment:
        yield environment


def fails(code: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=rf"^\[Errno {code}\]")


def test_life_of_an_object(env: Environment, tmp_path: Path) -> None:
    with env.create(ID) as new:
        assert new.is_dirty
        assert new.attributes == Attributes(0, 0, 0, 0, 0)
        new.write(10, b"contents")
        new.set_times(1, -2, 3)
        first = new.commit()
        assert (first.epoch, first.counter, len(first.salt)) == (1, 1, 32)
        assert new.root == first
        assert not new.is_dirty
        assert new.commit() == first
        new.write(0, bytearray(b"0123456789"))
        second = new.commit(solo=False)
        assert second.counter == 2
    assert (tmp_path / "objects" / "00" / ID.hex()[2:]).is_file()
    with env.open(ID, second) as again:
        assert again.attributes == Attributes(18, 1, 1, -2, 3)
        assert again.read(0, 100) == b"0123456789contents"
        assert again.read(8, 4) == b"89co"
        assert again.read(18, 1) == b""
    with env.open(ID, first) as older:
        assert older.read(0, 100) == bytes(10) + b"contents"


def test_what_is_not_committed_is_lost(env: Environment) -> None:
    with env.create(ID) as new:
        root = new.commit()
        new.write(0, b"x")
    with env.open(ID, root) as again:
        assert again.attributes.size == 0


def test_holes(env: Environment) -> None:
    with env.create(ID) as sparse:
        sparse.truncate(10 * NODE)
        sparse.write(4 * NODE, b"x" * 2 * NODE)
        assert sparse.seek_data(0) == 4 * NODE
        assert sparse.seek_data(4 * NODE + 5) == 4 * NODE + 5
        assert sparse.seek_data(6 * NODE) is None
        assert sparse.seek_hole(4 * NODE) == 6 * NODE
        assert sparse.seek_hole(0) == 0
        assert sparse.seek_hole(10 * NODE) is None
        sparse.punch(4 * NODE, NODE)
        assert sparse.seek_data(0) == 5 * NODE
        sparse.truncate(5 * NODE + 1)
        sparse.commit()
        assert sparse.attributes[:2] == (5 * NODE + 1, 1)
        assert sparse.read(4 * NODE, 2 * NODE) == bytes(NODE) + b"x"


def test_recover_takes_the_newest_root_of_the_active_epoch(source: int) -> None:
    with Environment(source, volume_id=VOLUME_ID, p=P, epoch=5) as env:
        new = env.create(META_ID)
        new.write(0, b"old")
        recorded = new.commit()
        new.write(0, b"new")
        newest = new.commit()
    with Environment(source, volume_id=VOLUME_ID, p=P, epoch=6) as env:
        for root, active_epoch, taken, contents in (
            (recorded, 5, newest, b"new"),
            (recorded, 6, recorded, b"old"),
            (None, 5, newest, b"new"),
        ):
            with env.recover(META_ID, root, active_epoch) as found:
                assert (found.root, found.read(0, 3)) == (taken, contents)
        with fails(errno.EBADMSG):
            env.recover(META_ID, None, 6)


def test_errors(env: Environment, source: int) -> None:
    with fails(errno.ENOENT):
        env.open(ID, RootId(1, 1, bytes(32)))
    with env.create(ID) as new:
        root = new.commit()
        with fails(errno.EEXIST):
            env.create(ID)
        with fails(errno.EFBIG):
            new.write(2**63 - 1, b"x")
    with fails(errno.EBADMSG):
        env.open(ID, root._replace(salt=bytes(32)))
    with pytest.raises(ValueError, match="16 bytes"):
        env.create(b"short")
    reading = Environment(source, volume_id=VOLUME_ID, p=P, epoch=1, read_only=True)
    with reading, reading.open(ID, root) as found, fails(errno.EROFS):
        found.write(0, b"x")


def test_verify_names_what_is_damaged(env: Environment, tmp_path: Path) -> None:
    with env.create(META_ID) as new:
        for index in range(3):
            new.write(index * NODE, bytes([index + 1]) * NODE)
            new.commit()
        root = new.commit()
    content = bytearray((tmp_path / "meta").read_bytes())
    with env.open(META_ID, root) as found:
        assert found.verify() == []
        content[4 * NODE :] = bytes(len(content) - 4 * NODE)
        (tmp_path / "meta").write_bytes(content)
        assert found.verify() == [Damage(0, 1), Damage(1, 1), Damage(2, 1)]
        with fails(errno.EIO):
            found.read(0, NODE)


def test_space_of_released_roots_is_reused(env: Environment, tmp_path: Path) -> None:
    with env.create(META_ID) as new:
        new.scan()
        for _ in range(200):
            new.write(0, b"x" * NODE)
            new.release(new.commit())
    assert (tmp_path / "meta").stat().st_size < 100 * NODE


def test_closing_twice_and_with_objects_open(source: int) -> None:
    env = Environment(source, volume_id=VOLUME_ID, p=P, epoch=1, threads=2)
    new = env.create(ID)
    new.write(0, b"x" * 100 * NODE)
    env.close()
    new.close()
    env.close()
