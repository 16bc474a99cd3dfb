"""Every volume ever shipped opens: by each sealing backend, and by the models of the formats."""

from __future__ import annotations

import hashlib
import json
import stat
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.model.format_backends import BACKENDS, run_with
from tests.model.format_volume import VolumeReader, siphash

VOLUMES = sorted(path for path in Path(__file__).parent.glob("v[0-9]*") if path.is_dir())


def test_there_is_one_of_version_1() -> None:
    assert [path.name for path in VOLUMES] == ["v1"]


def test_siphash() -> None:
    """The example in the paper that defines it."""
    assert siphash(bytes(range(16)), bytes(range(15))) == 0xA129CA6149BE45E5


@pytest.mark.parametrize("backend", BACKENDS)
def test_core(backend: str) -> None:
    run_with(backend, Path(__file__).with_name("golden_volumes.py"))


@pytest.mark.parametrize("folder", VOLUMES, ids=lambda path: path.name)
def test_model(folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    with tarfile.open(folder / "volume.tar.xz") as tar:
        tar.extractall(tmp_path, filter="tar")
    with closing(VolumeReader(tmp_path / "source", (folder / "key-file").read_bytes())) as volume:
        found = {path.decode("latin-1"): file for path, file in volume.walk()}
        assert set(found) == set(manifest)
        for path, said in manifest.items():
            file = found[path]
            for name in ("mode", "nlink", "uid", "gid", "size", "blocks", "mtime"):
                assert getattr(file, name) == said[name], (path, name)
            assert {
                name.decode(): hashlib.sha256(value).hexdigest()
                for name, value in volume.xattrs(file.ino).items()
            } == said.get("xattrs", {}), path
            if stat.S_ISREG(file.mode) and file.size < 1 << 30:
                contents = file.read(0, file.size)
                assert hashlib.sha256(contents).hexdigest() == said["sha256"], path
            if stat.S_ISLNK(file.mode):
                assert file.row == said["target"].encode("latin-1")
    shapes = {
        path: (file.object_.root.height, len(file.object_.root.delta))
        for path, file in found.items()
        if file.object_
    }
    assert shapes["delta"] == (0, 4)
    assert shapes["folded"][0] == 1
    assert "in-row-largest" not in shapes
    assert "object-smallest" in shapes
    assert max(len(Path(path).name) for path in found) == 255
