"""The golden volumes, opened by the C core; run by `test_golden_volumes.py`."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encfsd import volume
from encfsd.errors import OlderThanRecord
from encfsd.keys import Secret
from encfsd.options import VolumeSettings
from encfsd.secrets_input import from_key_file, from_passphrase_file
from encfsd.source import Source
from encfsd.volume import Unlocked
from tests.model.format_backends import choose
from tests.volumes.client import Client
from tests.volumes.make_v1 import describe

choose()

VOLUMES = sorted(path for path in Path(__file__).parent.glob("v[0-9]*") if path.is_dir())


@dataclass(frozen=True)
class Golden:
    """A copy of a golden volume that a test may change."""

    settings: VolumeSettings
    passphrase: Path
    key_file: Path
    manifest: dict[str, Any]

    @contextmanager
    def opened(self, secret: Secret, *, read_only: bool) -> Iterator[Unlocked]:
        with Source(self.settings.source) as source:
            source.lock(read_only=read_only)
            with volume.unlocked(source, self.settings, secret, read_only=read_only) as it:
                yield it


@pytest.fixture(params=VOLUMES, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    folder: Path = request.param
    with tarfile.open(folder / "volume.tar.xz") as tar:
        tar.extractall(tmp_path, filter="tar")
    for name in ("passphrase", "key-file"):
        shutil.copyfile(folder / name, tmp_path / name)
        (tmp_path / name).chmod(0o600)
    return Golden(
        VolumeSettings(source=str(tmp_path / "source"), state_dir=tmp_path / "state"),
        tmp_path / "passphrase",
        tmp_path / "key-file",
        json.loads((folder / "manifest.json").read_text()),
    )


def snapshot(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_passphrase_opens_it_read_only(golden: Golden) -> None:
    source = Path(golden.settings.source)
    before = snapshot(source)
    secret = from_passphrase_file(str(golden.passphrase))
    with golden.opened(secret, read_only=True) as it:
        assert describe(Client(it.volume)) == golden.manifest
        damages: list[volume.Damage] = []
        assert volume.verify(it.volume, lambda *_: None, damages.append)
        assert damages == []
    assert snapshot(source) == before


def test_key_file_opens_it_for_writing(golden: Golden) -> None:
    secret = from_key_file(str(golden.key_file))
    with golden.opened(secret, read_only=False) as it:
        client = Client(it.volume)
        client.write(client.lookup(b"folded").ino, b"changed", 70 * 4096)
        client.write(client.mknod(b"new", 0o100644), b"new contents")
    with golden.opened(secret, read_only=True) as it:
        client = Client(it.volume)
        assert client.read(client.lookup(b"folded").ino, 7, 70 * 4096) == b"changed"
        assert client.read(client.lookup(b"new").ino, 100) == b"new contents"
        now, untouched = describe(client), set(golden.manifest) - {"folded"}
        assert set(now) == set(golden.manifest) | {"new"}
        assert {path: now[path] for path in untouched} == {
            path: golden.manifest[path] for path in untouched
        }
        assert volume.verify(it.volume, lambda *_: None, lambda _: None)


def test_older_copy_is_refused(golden: Golden) -> None:
    secret = from_key_file(str(golden.key_file))
    source = Path(golden.settings.source)
    shutil.copytree(source, source.with_name("old"))
    with golden.opened(secret, read_only=False) as it:
        Client(it.volume).mknod(b"new", 0o100644)
    shutil.rmtree(source)
    source.with_name("old").rename(source)
    with pytest.raises(OlderThanRecord), golden.opened(secret, read_only=True):
        pass
