"""A whole volume, read by the models of the formats alone: header, object 0, files.

Reads a volume that was unmounted in order, with a key file. Numbers in comments are sections of
docs/format-keys.md; docs/format-metadata.md describes the database.
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
from typing import Any

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


def siphash(key: bytes, data: bytes) -> int:
    """Return SipHash-2-4, 64 bits."""
    mask = 2**64 - 1
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v0, v1 = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    v2, v3 = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & mask

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0, v2 = (v0 + v1) & mask, (v2 + v3) & mask
            v1, v3 = rotate(v1, 13) ^ v0, rotate(v3, 16) ^ v2
            v0 = rotate(v0, 32)
            v2, v0 = (v2 + v1) & mask, (v0 + v3) & mask
            v1, v3 = rotate(v1, 17) ^ v2, rotate(v3, 21) ^ v0
            v2 = rotate(v2, 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v3 ^= word
        rounds(2)
        v0 ^= word
    v2 ^= 0xFF
    rounds(4)
    return v0 ^ v1 ^ v2 ^ v3


@dataclass(frozen=True)
class File:
    """One inode. `object_` is None if its contents lie in the row."""

    row: bytes
    object_: Version | None
    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    blocks: int
    mtime: int

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
        for pragma, value in (
            ("integrity_check", "ok"),
            ("application_id", int.from_bytes(b"ENCF", "big")),
            ("user_version", 1),
            ("page_size", 4096),
            ("auto_vacuum", 2),
            ("encoding", "UTF-8"),
        ):
            assert self._one(f"PRAGMA {pragma}") == (value,), pragma
        (accepted,) = self._one("SELECT value FROM volume WHERE key='headers'")
        generation = header[8:16]
        assert generation + hashlib.sha256(header).digest() in accepted, "header not accepted"

    def close(self) -> None:
        self._database.close()

    def _one(self, query: str, *values: Any) -> Any:
        return self._database.execute(query, values).fetchone()

    def walk(self, parent: int = ROOT_INO, path: bytes = b"") -> Iterator[tuple[bytes, File]]:
        """Yield path and inode of all that lies below a directory."""
        (hash_key,) = self._one("SELECT value FROM volume WHERE key='hash_key'")
        entries = self._database.execute(
            "SELECT name, ino, type, cookie FROM dirent WHERE parent=?", (parent,)
        )
        for name, ino, kind, cookie in entries.fetchall():
            base = 3 + siphash(hash_key, name) % (2**63 - 1 - 3 - 8)
            assert base <= cookie <= base + 7
            below = path + b"/" + name if path else name
            found = self.file(ino)
            assert kind == stat.S_IFMT(found.mode)
            yield below, found
            if stat.S_ISDIR(found.mode):
                yield from self.walk(ino, below)

    def file(self, ino: int) -> File:
        """Return an inode; an object is opened at exactly the recorded root, and checked."""
        attributes = self._one(
            "SELECT ino, mode, nlink, uid, gid, size, blocks, mtime FROM inode WHERE ino=?", ino
        )
        row = self._one("SELECT data FROM content WHERE ino=?", ino)
        record = self._one(
            "SELECT id, epoch, counter, salt, active_epoch FROM object WHERE ino=?", ino
        )
        if record is None:
            return File(row[0] if row else b"", None, *attributes)
        assert row is None, "contents in two places"
        object_id, epoch, counter, salt, active_epoch = record
        assert active_epoch == 0, "not unmounted in order"
        path = self._source / "objects" / object_id.hex()[:2] / object_id.hex()[2:]
        keys = Keys(self.volume_id, self._p, object_id)
        version = open_exactly(path.read_bytes(), keys, Record(epoch, counter, salt))
        version.check()
        found = File(b"", version, *attributes)
        assert (found.size, found.mtime) == (version.root.size, version.root.mtime)
        return found

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        return dict(
            self._database.execute("SELECT name, value FROM xattr WHERE ino=?", (ino,)).fetchall()
        )
