"""Make the golden volume of format version 1: ``python tests/volumes/make_v1.py FOLDER``.

It was run once, and what it made is kept in `v1` for as long as version 1 is read. Keys are drawn
at random, so another run makes another volume.

* `volume.tar.xz`: `source`, the source directory, and `state`, the trusted record of it. Slots of
  backing files that the newest root does not reach are zeroed, which keeps the archive small.
* `passphrase` and `key-file` open it.
* `manifest.json`: what is in the volume; paths, targets and attributes as Latin-1.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from encfsd import volume, volume_header  # noqa: E402
from encfsd.keys import Secret, SlotType, VolumeKey  # noqa: E402
from encfsd.options import VolumeSettings  # noqa: E402
from encfsd.secrets_input import from_key_file, from_passphrase_file  # noqa: E402
from encfsd.source import Source  # noqa: E402
from encfsd.volume import Unlocked  # noqa: E402
from tests.model import object_model as om  # noqa: E402
from tests.model.format_vectors import plaintext  # noqa: E402
from tests.model.object_model import NODE  # noqa: E402
from tests.volumes.client import Attr, Client  # noqa: E402

LONG_NAME = bytes(range(1, 256)).replace(b"/", b"\xff")  # 255 bytes, all that a name may hold


@contextmanager
def opened(settings: VolumeSettings, secret: Secret, *, read_only: bool) -> Iterator[Unlocked]:
    """Open a volume as a mount does."""
    with Source(settings.source) as source:
        source.lock(read_only=read_only)
        with volume.unlocked(source, settings, secret, read_only=read_only) as it:
            yield it


def fill(client: Client) -> None:
    """Make one of everything."""

    def file(path: bytes, *parts: tuple[int, int]) -> int:
        ino = client.mknod(path, stat.S_IFREG | 0o644)
        for offset, size in parts:
            client.write(ino, plaintext(path.decode("latin-1"), size), offset)
        return ino

    file(b"empty")
    file(b"in-row", (0, 300))
    file(b"in-row-largest", (0, 2048))
    file(b"object-smallest", (0, 2049))
    in_delta = file(b"delta", (0, 3 * NODE + 7))
    folded = file(b"folded", (0, 5 * NODE), (20 * NODE, 52 * NODE + 100))
    client.sync()
    client.write(in_delta, b"changed after the first commit", NODE)
    client.punch(folded, 22 * NODE, 48 * NODE)
    client.write(folded, b"in the delta, over the tree", 3 * NODE)
    client.sync()

    client.mkdir(b"folder", 0o750)
    client.mkdir(b"folder/below", 0o700)
    file(b"folder/below/" + LONG_NAME, (0, 10))
    client.link(b"delta", b"folder/hard link")
    client.symlink(b"symlink", b"folder/below/target \xff of a link")
    client.mknod(b"fifo", stat.S_IFIFO | 0o600)
    attributed = file(b"attributes", (0, 1))
    client.set_xattr(attributed, b"user.small", b"value")
    client.set_xattr(attributed, b"user.large", plaintext("large", 3000))
    client.set_xattr(attributed, b"user.empty", b"")
    client.set_mtime(attributed, -1)
    sparse = file(b"sparse", ((1 << 40) - 1, 1))
    client.truncate(sparse, 1 << 41)


def describe(client: Client) -> dict[str, Any]:
    """Return the manifest of a volume, by path."""
    manifest = {}
    for path, attr in client.walk():
        said: dict[str, Any] = {
            member: getattr(attr, member)
            for member in ("mode", "nlink", "uid", "gid", "size", "blocks", "mtime")
        }
        if stat.S_ISREG(attr.mode):
            said["sha256"] = digest(client, attr)
        if stat.S_ISLNK(attr.mode):
            said["target"] = client.readlink(attr.ino).decode("latin-1")
        if xattrs := client.xattrs(attr.ino):
            said["xattrs"] = {
                name.decode("latin-1"): hashlib.sha256(value).hexdigest()
                for name, value in sorted(xattrs.items())
            }
        manifest[path.decode("latin-1")] = said
    return dict(sorted(manifest.items()))


def digest(client: Client, attr: Attr) -> str:
    """Return the SHA-256 of a file; of a sparse one only of the MiB in the middle."""
    if attr.size < 1 << 30:
        return hashlib.sha256(client.read(attr.ino, attr.size)).hexdigest()
    return hashlib.sha256(client.read(attr.ino, 1 << 20, attr.size // 2 - (1 << 19))).hexdigest()


def without_dead_slots(file: bytes, keys: om.Keys) -> bytes:
    """Return a backing file with zeros where neither roots nor what the newest reaches lies."""
    newest = max(om.read_roots(file, keys).values(), key=lambda stored: stored.root.order)
    version = om.Version(file, keys, newest)
    version.check()
    used = {entry.slot for entry in version.entries().values()} | set(version.tree_slots())
    out = bytearray(len(file))
    for slot in used | set(range(om.ROOT_SLOTS)):
        out[slot * NODE : (slot + 1) * NODE] = file[slot * NODE : (slot + 1) * NODE]
    return bytes(out)


def pack(folder: Path, key: VolumeKey, archive: Path) -> None:
    """Pack `folder`."""

    def add(path: Path, tar: tarfile.TarFile) -> None:
        info = tar.gettarinfo(path, str(path.relative_to(folder)))
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if not path.is_file():
            tar.addfile(info)
            return
        content = path.read_bytes()
        if path.name == "meta" or path.parent.parent.name == "objects":
            name = path.parent.name + path.name
            object_id = bytes(16) if path.name == "meta" else bytes.fromhex(name)
            keys = om.Keys(key.volume_id, bytes(key.prk), object_id)
            content = without_dead_slots(content, keys)
        tar.addfile(info, io.BytesIO(content))

    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(folder.rglob("*")):
            add(path, tar)


def main(folder: Path) -> None:
    volume.setup_crypto("openssl")
    folder.mkdir(exist_ok=False)
    for name, secret in (
        ("passphrase", b"a passphrase that everybody knows\n"),
        ("key-file", os.urandom(64)),
    ):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(secret)
    passphrase = from_passphrase_file(str(folder / "passphrase"))
    key_file = from_key_file(str(folder / "key-file"))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        settings = VolumeSettings(source=str(work / "source"), state_dir=work / "state")
        volume.create(settings, passphrase, SlotType.PASSPHRASE)
        volume.change_header(
            settings,
            passphrase,
            lambda header, key, generation: volume_header.add_slot(
                header, key, key_file, SlotType.KEY_FILE, generation
            ),
        )
        with opened(settings, key_file, read_only=False) as it:
            fill(Client(it.volume))
        with opened(settings, key_file, read_only=True) as it:
            manifest = describe(Client(it.volume))
            pack(work, it.key, folder / "volume.tar.xz")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
