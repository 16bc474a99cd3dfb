"""A whole volume, read by the models of the formats alone: header, object 0, files.

Reads a volume that was unmounted in order, with a key file. Numbers in comments are sections of
docs/format-keys.md; the database is what encfsd/_schema.c makes.
"""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.model.object_model import (
    Keys,
    Record,
    Version,
    f,
    hmac256,
    open_exactly,
    recover_meta,
    volume_prk,
)

ROOT_INO = 1
_SLOTS, _SLOT_SIZE, _FIRST_SLOT = 16, 128, 64
_KEY_FILE = 2


def unlock(header: bytes, key_file: bytes) -> tuple[bytes, bytes]:
    """Return volume id and P (2)."""
    assert header[:8] == b"ENCVOL\x01\x00"
    volume_id = header[16:32]
    for index in range(_SLOTS):
        at = _FIRST_SLOT + index * _SLOT_SIZE
        kind, memory, passes, _, salt, commitment, wrapped = struct.unpack(
            "<IIII32s32s48s", header[at : at + _SLOT_SIZE]
        )
        if kind != _KEY_FILE:
            continue
        bound = hashlib.sha256(
            struct.pack("<I16sIIII", 1, volume_id, index, kind, memory, passes) + salt
        ).digest()
        secret = hmac256(salt, key_file)
        if f(secret, "slot-commit", bound) != commitment:
            continue
        volume_key = AESGCM(f(secret, "slot-wrap", bound)).decrypt(bytes(12), wrapped, bound)
        p = volume_prk(volume_id, volume_key)
        mac = hmac256(f(p, "header", b""), header[:-32])
        assert hmac.compare_digest(mac, header[-32:])
        return volume_id, p
    raise ValueError("no slot opens")


@dataclass(frozen=True)
class File:
    """One inode. `object_` is None if its contents lie in the row."""

    ino: int
    mode: int
    size: int
    row: bytes
    object_: Version | None

    def read(self, offset: int, size: int) -> bytes:
        if self.object_:
            return self.object_.read(offset, size)
        return self.row[offset : offset + size]


class VolumeReader:
    """What lies in one source directory."""

    def __init__(self, source: Path, key_file: bytes) -> None:
        """Read and check object 0; it must hold a sound database."""
        self._source = source
        header = (source / "volume.header").read_bytes()
        self.volume_id, self._p = unlock(header, key_file)
        keys = Keys(self.volume_id, self._p, bytes(16))
        self.meta = recover_meta((source / "meta").read_bytes(), keys, Record(0, 0, bytes(32)))
        self.meta.check()
        self._database = sqlite3.connect(":memory:")
        self._database.deserialize(self.meta.read(0, self.meta.root.size))
        assert self._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        accepted = self._database.execute("SELECT value FROM volume WHERE key='headers'").fetchone()
        generation = header[8:16]
        assert generation + hashlib.sha256(header).digest() in accepted[0], "header not accepted"

    def close(self) -> None:
        self._database.close()

    def walk(self, parent: int = ROOT_INO, path: bytes = b"") -> Iterator[tuple[bytes, File]]:
        """Yield path and inode of all that lies below a directory."""
        entries = self._database.execute("SELECT name, ino FROM dirent WHERE parent=?", (parent,))
        for name, ino in entries.fetchall():
            below = path + b"/" + name if path else name
            found = self.file(ino)
            yield below, found
            if stat.S_ISDIR(found.mode):
                yield from self.walk(ino, below)

    def file(self, ino: int) -> File:
        """Return an inode; an object is opened at exactly the recorded root, and checked."""
        mode, size = self._database.execute(
            "SELECT mode, size FROM inode WHERE ino=?", (ino,)
        ).fetchone()
        row = self._database.execute("SELECT data FROM content WHERE ino=?", (ino,)).fetchone()
        record = self._database.execute(
            "SELECT id, epoch, counter, salt, active_epoch FROM object WHERE ino=?", (ino,)
        ).fetchone()
        if record is None:
            return File(ino, mode, size, row[0] if row else b"", None)
        object_id, epoch, counter, salt, active_epoch = record
        assert active_epoch == 0, "not unmounted in order"
        path = self._source / "objects" / object_id.hex()[:2] / object_id.hex()[2:]
        keys = Keys(self.volume_id, self._p, object_id)
        version = open_exactly(path.read_bytes(), keys, Record(epoch, counter, salt))
        version.check()
        assert version.root.size == size
        return File(ino, mode, size, b"", version)

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        return dict(
            self._database.execute("SELECT name, value FROM xattr WHERE ino=?", (ino,)).fetchall()
        )
