"""The backing directory must be safe, and is used by one writer at a time."""

import os
from pathlib import Path

import pytest

from encfsd import source as backing
from encfsd.errors import (
    BackingGone,
    BackingInsecure,
    Exit,
    NotAVolume,
    VolumeExists,
    VolumeInUse,
)
from encfsd.source import Source


def new_source(path: Path) -> str:
    with backing.create(str(path)) as source:
        source.create_lock()
    return str(path)


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    new_source(tmp_path / "src")
    assert (tmp_path / "src").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "src" / "lock").stat().st_mode & 0o7777 == 0o600


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    tmp_path.chmod(0o700)
    with pytest.raises(VolumeExists) as caught:
        backing.create(str(tmp_path))
    assert caught.value.exit_code == Exit.VOLUME_EXISTS


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_directories_that_others_can_write_are_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src").chmod(mode)
    with pytest.raises(BackingInsecure, match="chmod go-w") as caught:
        Source(str(tmp_path / "src"))
    assert caught.value.exit_code == Exit.BACKING_INSECURE


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    with pytest.raises(BackingInsecure, match="symbolic link"):
        Source(str(tmp_path / "link"))
    with pytest.raises(NotAVolume):
        Source(str(tmp_path / "file"))
    with pytest.raises(BackingGone, match="missing: does not exist; check the path, and that its"):
        Source(str(tmp_path / "missing"))
    with pytest.raises(BackingGone, match="missing: does not exist"):
        backing.create(str(tmp_path / "missing" / "src"))
    with pytest.raises(VolumeExists, match="file: not a directory; choose a new or empty"):
        backing.create(str(tmp_path / "file"))
    with pytest.raises(BackingInsecure, match="symbolic link"):
        backing.create(str(tmp_path / "link"))


def test_writers_exclude_everybody(tmp_path: Path) -> None:
    path = new_source(tmp_path / "src")
    with Source(path) as first, Source(path) as second:
        first.lock(read_only=False)
        for read_only in (False, True):
            with pytest.raises(VolumeInUse) as caught:
                second.lock(read_only=read_only)
        assert caught.value.exit_code == Exit.VOLUME_IN_USE
        first.close()
        second.lock(read_only=False)
        first.fd = os.open(path, os.O_RDONLY)  # for the end of the block


def test_readers_share(tmp_path: Path) -> None:
    path = new_source(tmp_path / "src")
    with Source(path) as first, Source(path) as second, Source(path) as third:
        first.lock(read_only=True)
        second.lock(read_only=True)
        with pytest.raises(VolumeInUse):
            third.lock(read_only=False)


def test_a_snapshot_without_a_lock_file_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir(mode=0o700)
    with Source(str(tmp_path / "src")) as source:
        source.lock(read_only=True)
        with pytest.raises(BackingGone):
            source.lock(read_only=False)


def test_a_planted_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir(mode=0o700)
    (tmp_path / "src" / "lock").symlink_to(tmp_path / "target")
    with Source(str(tmp_path / "src")) as source, pytest.raises(BackingInsecure):
        source.lock(read_only=False)
    assert not (tmp_path / "target").exists()
