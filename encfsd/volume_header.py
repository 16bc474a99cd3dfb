"""The volume header: who can open the volume, in two copies in the backing directory.

Fixed binary, authenticated over its raw bytes; docs/format-keys.md is the specification. The first
half of this file is pure (parse, build, unlock, change), the second half reads and replaces the two
copies. A header is never edited: each change makes a new one of the next generation.

The volume's metadata (object 0) says which headers it accepts, by generation and digest, so that an
old copy with a removed passphrase cannot be put back. `replace` keeps the two in step: it is safe
against a crash between any two steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from encfsd import keys
from encfsd.errors import (
    BackingInsecure,
    DamagedContents,
    DamagedHeader,
    EncfsdError,
    HeaderNotAccepted,
    KeySlotRefused,
    NewerFormat,
    NotAVolume,
    UnlockFailed,
    from_oserror,
)
from encfsd.keys import KdfParameters, Secret, SecretBytes, Slot, SlotType, VolumeKey
from encfsd.private_files import UnsafeFileError, read_private, replace_private

HEADER_SIZE = 4096
SLOTS = 16
MAGIC = b"ENCVOL"
VERSION = 1
COPIES = ("volume.header", "volume.header.bak")

_HEAD = struct.Struct("<6sHQ16s32s")
_SLOT = struct.Struct("<III4s32s32s48s")
_MAC_OFFSET = HEADER_SIZE - keys.MAC_SIZE
_UNUSED = bytes(_MAC_OFFSET - _HEAD.size - SLOTS * _SLOT.size)
_FREE_SLOT = bytes(_SLOT.size)

_log = logging.getLogger(__name__)


class HeaderId(NamedTuple):
    """Names exactly one header: its generation, and SHA-256 of all its 4096 bytes."""

    generation: int
    digest: bytes


_ID = struct.Struct("<Q32s")


def pack_ids(names: Collection[HeaderId]) -> bytes:
    """Return the value under which object 0 keeps the headers that it accepts."""
    return b"".join(_ID.pack(*name) for name in sorted(names))


def unpack_ids(value: bytes) -> set[HeaderId]:
    """Return the headers that object 0 accepts; DamagedContents if it is no such value."""
    if len(value) not in (_ID.size, 2 * _ID.size):
        raise DamagedContents("metadata", "the list of accepted headers is malformed")
    return {HeaderId(*fields) for fields in _ID.iter_unpack(value)}


@dataclass(frozen=True)
class Header:
    """A parsed header. Nothing in it is authenticated before `unlock`."""

    raw: bytes = field(repr=False)
    volume_id: bytes
    generation: int
    slots: Mapping[int, Slot]  # used ones by index, at least one

    @property
    def id(self) -> HeaderId:
        """The name under which metadata and state record know this header."""
        return HeaderId(self.generation, hashlib.sha256(self.raw).digest())

    def is_authentic(self, key: VolumeKey) -> bool:
        """Check the MAC over the raw bytes."""
        return hmac.compare_digest(key.header_mac(self.raw[:_MAC_OFFSET]), self.raw[_MAC_OFFSET:])


# Parse and build


def parse(raw: bytes, where: str = COPIES[0]) -> Header:
    """Parse a header without using any secret. `where` names it in errors.

    Raises NotAVolume, NewerFormat or DamagedHeader.
    """
    if raw[:6] != MAGIC:
        raise NotAVolume(where)
    version = int.from_bytes(raw[6:8], "little")
    if len(raw) >= 8 and version > VERSION:
        raise NewerFormat(where, f"format {version}, this program knows {VERSION}")
    if len(raw) != HEADER_SIZE:
        raise DamagedHeader(where, f"{len(raw)} bytes instead of {HEADER_SIZE}")
    if version != VERSION:
        raise DamagedHeader(where, f"format {version} does not exist")
    _, _, generation, volume_id, reserved = _HEAD.unpack_from(raw)
    if generation == 0:
        raise DamagedHeader(where, "generation 0")
    end = _HEAD.size + SLOTS * _SLOT.size
    if any(reserved) or raw[end:_MAC_OFFSET] != _UNUSED:
        raise DamagedHeader(where, "a reserved byte is not zero")
    slots = {}
    for index in range(SLOTS):
        slot = _parse_slot(raw, index, where)
        if slot is not None:
            slots[index] = slot
    if not slots:
        raise DamagedHeader(where, "no key slot in use")
    return Header(raw, volume_id, generation, slots)


def _parse_slot(raw: bytes, index: int, where: str) -> Slot | None:
    offset = _HEAD.size + index * _SLOT.size
    number, memory_kib, passes, reserved, salt, commitment, wrapped = _SLOT.unpack_from(raw, offset)
    if number == 0:
        if raw[offset : offset + _SLOT.size] != _FREE_SLOT:
            raise DamagedHeader(where, f"free key slot {index} is not zero")
        return None
    try:
        kind = SlotType(number)
    except ValueError:
        raise DamagedHeader(where, f"key slot {index} has unknown type {number}") from None
    if any(reserved):
        raise DamagedHeader(where, f"a reserved byte of key slot {index} is not zero")
    kdf = KdfParameters(memory_kib, passes)
    if not (kdf.within_bounds() if kind is SlotType.PASSPHRASE else kdf == keys.NO_KDF):
        raise DamagedHeader(where, f"key slot {index} has a KDF cost out of bounds")
    return Slot(kind, kdf, salt, commitment, wrapped)


def build(key: VolumeKey, generation: int, slots: Mapping[int, Slot]) -> Header:
    """Serialise and authenticate a header."""
    body = bytearray(_HEAD.pack(MAGIC, VERSION, generation, key.volume_id, bytes(32)))
    for index in range(SLOTS):
        slot = slots.get(index)
        body += _FREE_SLOT if slot is None else _serialise_slot(slot)
    body += _UNUSED
    return parse(bytes(body) + key.header_mac(bytes(body)))


def _serialise_slot(slot: Slot) -> bytes:
    return _SLOT.pack(
        slot.type,
        slot.kdf.memory_kib,
        slot.kdf.passes,
        bytes(4),
        slot.salt,
        slot.commitment,
        slot.wrapped,
    )


# Unlock and change


def create(secret: Secret, kind: SlotType) -> tuple[Header, VolumeKey]:
    """Make a new volume's first header, with one key slot. The caller wipes the key."""
    volume_id = os.urandom(keys.VOLUME_ID_SIZE)
    key = VolumeKey(volume_id, SecretBytes(os.urandom(keys.KEY_SIZE)), 0)
    slot = _wrap(key, secret, 0, kind)
    return build(key, 1, {0: slot}), key


def unlock(header: Header, secret: Secret, where: str = COPIES[0]) -> VolumeKey:
    """Return the volume key, once the MAC of the whole header has been checked with it.

    The caller wipes the key. Raises UnlockFailed for whatever goes wrong after the first use of the
    secret, NotEnoughMemory before.
    """
    opened = keys.open_slots(header.volume_id, header.slots, secret)
    with contextlib.closing(opened):
        for index, volume_key in opened:
            key = VolumeKey(header.volume_id, volume_key, index)
            if header.is_authentic(key):
                return key
            key.wipe()
    raise UnlockFailed(where)


def add_slot(
    header: Header, key: VolumeKey, secret: Secret, kind: SlotType, generation: int
) -> Header:
    """Return a header in which `secret` opens the volume too, by the first free slot.

    For this and the next two, `generation` comes from `Copies.next_generation`.
    """
    free = [index for index in range(SLOTS) if index not in header.slots]
    if not free:
        raise KeySlotRefused("key add", f"all {SLOTS} slots are in use")
    _refuse_known(header, key, secret)
    slots = {**header.slots, free[0]: _wrap(key, secret, free[0], kind)}
    return build(key, generation, slots)


def remove_slot(header: Header, key: VolumeKey, index: int, generation: int) -> Header:
    """Return a header without slot `index`; KeySlotRefused if it is free or the last one."""
    if index not in header.slots:
        raise KeySlotRefused(f"key slot {index}", "it is not in use")
    if len(header.slots) == 1:
        raise KeySlotRefused(f"key slot {index}", "nothing else opens the volume")
    slots = {i: slot for i, slot in header.slots.items() if i != index}
    return build(key, generation, slots)


def change_passphrase(
    header: Header, key: VolumeKey, index: int, secret: Secret, generation: int
) -> Header:
    """Return a header in which `secret` opens slot `index` in place of the old passphrase."""
    slot = header.slots.get(index)
    if slot is None or slot.type is not SlotType.PASSPHRASE:
        raise KeySlotRefused(f"key slot {index}", "it holds no passphrase")
    _refuse_known(header, key, secret)
    slots = {**header.slots, index: _wrap(key, secret, index, SlotType.PASSPHRASE)}
    return build(key, generation, slots)


def _refuse_known(header: Header, key: VolumeKey, secret: Secret) -> None:
    """Raise KeySlotRefused if `secret` opens a slot: removing one of the two would revoke nothing.

    Only for who has opened the volume: the answer says what a secret is worth.
    """
    for index, opened in keys.open_slots(key.volume_id, header.slots, secret):
        opened.wipe()
        raise KeySlotRefused(
            f"key slot {index}", "the new secret opens it already", "choose another secret"
        )


def _wrap(key: VolumeKey, secret: Secret, index: int, kind: SlotType) -> Slot:
    kdf = keys.choose_kdf_parameters() if kind is SlotType.PASSPHRASE else keys.NO_KDF
    return keys.wrap(key.key, secret, volume_id=key.volume_id, index=index, kind=kind, kdf=kdf)


# The two copies


@dataclass(frozen=True)
class Copies:
    """What the two files hold. Damaged or missing ones stand in `problems`, by file name."""

    directory: int  # descriptor of the backing directory, not owned
    where: str  # its path, for messages
    headers: Mapping[str, Header]  # by file name, at least one
    problems: Mapping[str, EncfsdError]

    def newest_first(self) -> list[Header]:
        """Different headers, the highest generation first."""
        unique = {header.raw: header for header in self.headers.values()}
        return sorted(unique.values(), key=lambda header: header.generation, reverse=True)

    def next_generation(self, key: VolumeKey) -> int:
        """A generation that no authentic copy has had."""
        return 1 + max(h.generation for h in self.headers.values() if h.is_authentic(key))

    def need_repair(self, header: Header) -> bool:
        """Say whether `replace` with `header` unchanged would mend anything."""
        return [self.headers[n].raw for n in COPIES if n in self.headers] != [header.raw] * 2


def read_copies(directory: int, where: str, *, tell: bool = True) -> Copies:
    """Read both copies; no secret is needed. `tell`: log what is wrong with one if one will do.

    Raises NotAVolume if there is none, NewerFormat or DamagedHeader if none can be used, and
    BackingInsecure if one is not a plain private file.
    """
    headers: dict[str, Header] = {}
    problems: dict[str, EncfsdError] = {}
    missing = 0
    for name in COPIES:
        path = os.path.join(where, name)
        try:
            raw = read_private(directory, name, HEADER_SIZE + 1)
        except FileNotFoundError:
            missing += 1
            problems[name] = DamagedHeader(path, "missing")
            continue
        except OSError as error:
            raise from_oserror(path, error) from error
        except UnsafeFileError as error:
            raise BackingInsecure(path, str(error)) from None
        try:
            headers[name] = parse(raw, path)
        except NotAVolume:
            problems[name] = DamagedHeader(path, "it does not start like a header")
        except EncfsdError as error:
            problems[name] = error
    if missing == len(COPIES):
        raise NotAVolume(where)
    if not headers:
        newer = [error for error in problems.values() if isinstance(error, NewerFormat)]
        raise (
            newer[0]
            if newer
            else next(error for error in problems.values() if error.detail != "missing")
        )
    if tell:
        for problem in problems.values():
            _log.warning("%s", problem)
    return Copies(directory, where, headers, problems)


def open_copies(
    copies: Copies,
    secret: Secret,
    accepted: Callable[[VolumeKey], Collection[HeaderId]],
) -> tuple[Header, VolumeKey]:
    """Unlock the volume and return its current header and its key, which the caller wipes.

    `accepted` is called once, with the key, and returns what object 0 accepts. The current header
    is the highest copy that is accepted and authentic; but the secret must open an accepted copy,
    so that one which was removed is of no use. Raises UnlockFailed, HeaderNotAccepted, and what
    `accepted` raises.
    """
    headers = copies.newest_first()
    opened, key = _unlock_any(headers, secret, copies.where)
    try:
        names = accepted(key)
        current = [h for h in headers if h.id in names and h.is_authentic(key)]
        if opened not in current:
            # It is an old copy. Perhaps the secret opens the right one as well.
            try:
                _unlock_any(current, secret, copies.where)[1].wipe()
            except UnlockFailed:
                raise HeaderNotAccepted(copies.where) from None
    except BaseException:
        key.wipe()
        raise
    return current[0], key


def _unlock_any(headers: Iterable[Header], secret: Secret, where: str) -> tuple[Header, VolumeKey]:
    for header in headers:
        with contextlib.suppress(UnlockFailed):
            return header, unlock(header, secret, where)
    raise UnlockFailed(where)


def write_first(directory: int, where: str, header: Header) -> None:
    """Write both copies of a new volume's header."""
    for name in COPIES:
        _write_copy(directory, where, name, header)


def replace(
    copies: Copies,
    current: Header,
    new: Header,
    accept: Callable[[Collection[HeaderId]], None],
    remember: Callable[[HeaderId], None],
) -> None:
    """Replace both copies by `new`; a crash between any two steps leaves a volume that opens.

    `accept` makes durable in object 0 that exactly these headers are accepted; `remember` writes
    the trusted state record. With `new` equal to `current` it mends copies, and finishes a change
    that was interrupted. A copy other than `current` goes first, so that one of the two always
    is an accepted one.
    """
    accept({current.id, new.id})
    for name in sorted(COPIES, key=lambda n: copies.headers.get(n) == current):
        _write_copy(copies.directory, copies.where, name, new)
    accept({new.id})
    remember(new.id)


def _write_copy(directory: int, where: str, name: str, header: Header) -> None:
    try:
        replace_private(directory, name, header.raw)
    except OSError as error:
        raise from_oserror(os.path.join(where, name), error) from error
