"""What this machine remembers of a volume, so that nobody can roll the volume back.

The trusted state directory holds one file ``<volume id in hex>.state`` a volume. The file has two
slots of 4096 bytes, each beginning with one 192-byte record:

====== ==== ============================================================================
offset size meaning (integers little-endian)
====== ==== ============================================================================
     0    6 magic ``ENCSTA``
     6    2 version, 1
     8    8 flags; bit 0: clean, the volume was unmounted in order; all others zero
    16   16 volume id
    32    8 sequence number of this record, from 1
    40    8 mount epoch of object 0's root
    48    8 counter of object 0's root
    56    8 generation of the volume header
    64   32 R, the id of object 0's root
    96   32 digest of the volume header
   128    8 highest mount epoch that this machine has begun
   136   24 zero
   160   32 HMAC-SHA256(F(P, "freshness", volume id), the 160 bytes before)
====== ==== ============================================================================

Writer (C at each metadata commit, Python around it): record number n goes to slot n mod 2 with one
pwrite of 192 bytes and an fdatasync. So it never touches the newest record; a torn write leaves the
other slot. The slots lie in different 4096-byte blocks because a device may tear a whole block. The
rest of each slot is never read.

Reader: the valid record with the higher sequence number counts. The order is the sequence number
and not (epoch, counter), because a root that the operator accepts by hand may be an older one.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import os
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from encfsd.closing import Closing
from encfsd.errors import ForkedFromRecord, NoRecord, OlderThanRecord, StateUnusable
from encfsd.keys import VolumeKey
from encfsd.private_files import UnsafeFileError, open_private, replace_private
from encfsd.volume_header import HeaderId

MAGIC = b"ENCSTA"
VERSION = 1
RECORD_SIZE = 192
SLOT_SIZE = 4096
SLOTS = 2

_RECORD = struct.Struct("<6sHQ16sQQQQ32s32sQ24s")
_CLEAN = 1


class RootId(NamedTuple):
    """Names one root of object 0: ordered by (epoch, counter), told apart by R."""

    epoch: int
    counter: int
    salt: bytes  # R, 32 bytes

    def __str__(self) -> str:
        return f"root {self.salt.hex()} of epoch {self.epoch}, counter {self.counter}"


@dataclass(frozen=True)
class Record:
    """The remembered state of one volume."""

    sequence: int
    root: RootId
    header: HeaderId
    clean: bool
    epoch_begun: int = 0  # durable before the first root of that epoch; so no epoch is used twice


@dataclass(frozen=True)
class Found:
    """What the backing directory holds. `ancestors`: R of roots that `root` is known to follow.

    At least the previous root that `root` itself names; all that the volume can vouch for.
    """

    root: RootId
    header: HeaderId
    ancestors: Collection[bytes]


# The record as bytes


def pack(record: Record, key: VolumeKey) -> bytes:
    """Return the 192 authenticated bytes of a record."""
    body = _RECORD.pack(
        MAGIC,
        VERSION,
        _CLEAN if record.clean else 0,
        key.volume_id,
        record.sequence,
        record.root.epoch,
        record.root.counter,
        record.header.generation,
        record.root.salt,
        record.header.digest,
        record.epoch_begun,
        bytes(24),
    )
    return body + key.state_mac(body)


def unpack(raw: bytes, key: VolumeKey) -> Record | None:
    """Return the record in the first 192 bytes, or None if it is not a valid one of this volume."""
    if len(raw) < RECORD_SIZE:
        return None
    body, found_mac = raw[: _RECORD.size], raw[_RECORD.size : RECORD_SIZE]
    if not hmac.compare_digest(key.state_mac(body), found_mac):
        return None
    magic, version, flags, volume_id, sequence, *rest = _RECORD.unpack(body)
    epoch, counter, generation, salt, digest, epoch_begun, reserved = rest
    if (magic, version, volume_id) != (MAGIC, VERSION, key.volume_id):
        return None
    if flags & ~_CLEAN or any(reserved):
        return None
    return Record(
        sequence,
        RootId(epoch, counter, salt),
        HeaderId(generation, digest),
        bool(flags & _CLEAN),
        epoch_begun,
    )


# The state directory


def default_directory() -> Path:
    """Return the state directory of this user: /var/lib/encfsd, or below the XDG state home."""
    if os.geteuid() == 0:
        return Path("/var/lib/encfsd")
    # As the XDG specification says, a relative path counts as unset.
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local/state") / "encfsd"


class Directory(Closing):
    """The state directory, which need not be there yet; a context manager that closes it.

    `fd` is the directory, None as long as there is none. Nothing is made by looking: a mistyped
    path leaves nothing behind.
    """

    def __init__(self, path: Path) -> None:
        """Open it if it is there; StateUnusable if it is not one of this user's own, mode 0700."""
        self._path = path
        self.fd: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self.fd = _open(path)

    def make(self) -> int:
        """Make the directory, with mode 0700, if it is missing; return `fd`."""
        if self.fd is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.mkdir(mode=0o700, exist_ok=True)
                self.fd = _open(self._path)
            except OSError as error:
                raise StateUnusable(self._path, error.strerror or str(error)) from None
        return self.fd

    def open_file(self, volume_id: bytes, flags: int) -> int:
        """Open the state file of a volume. Errors as of `open_private`."""
        if self.fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return open_private(self.fd, file_name(volume_id), flags)

    def close(self) -> None:
        """Close it; what it has opened stays open."""
        if self.fd is not None:
            os.close(self.fd)


def _open(path: Path) -> int:
    """Open a state directory; FileNotFoundError if there is none, StateUnusable if unfit."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateUnusable(path, error.strerror or str(error)) from None
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        problem = f"it belongs to user {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
    else:
        return fd
    os.close(fd)
    raise StateUnusable(path, problem)


def on_same_device(directory: Directory, backing_directory: int) -> bool:
    """Say whether one device holds both: a thief of it could then roll back both together."""
    if directory.fd is None:
        return False
    return os.fstat(directory.fd).st_dev == os.fstat(backing_directory).st_dev


def file_name(volume_id: bytes) -> str:
    """Return the name of a volume's state file."""
    return f"{volume_id.hex()}.state"


def create(directory: Directory, key: VolumeKey, record: Record) -> None:
    """Create or replace the state file of a volume, with `record` in it; durable on return.

    The directory is made if it is missing. Replacing forgets what was remembered: only for `init`
    and for a root accepted by hand.
    """
    data = bytearray(SLOTS * SLOT_SIZE)  # written in full, so that updates never change the size
    data[_offset(record) : _offset(record) + RECORD_SIZE] = pack(record, key)
    try:
        replace_private(directory.make(), file_name(key.volume_id), bytes(data))
    except OSError as error:
        raise _unusable(key, error) from error


def read(directory: Directory, key: VolumeKey) -> Record | None:
    """Return the newest valid record of a volume, or None if there is none."""
    try:
        fd = directory.open_file(key.volume_id, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except (OSError, UnsafeFileError) as error:
        raise _unusable(key, error) from error
    try:
        return _newest(fd, key)
    except OSError as error:
        raise _unusable(key, error) from error
    finally:
        os.close(fd)


def update(directory: Directory, key: VolumeKey, record: Record) -> None:
    """Write `record` over the older slot; durable on return.

    `record.sequence` must be one more than that of the newest valid record.
    """
    try:
        fd = directory.open_file(key.volume_id, os.O_WRONLY)
        try:
            written = os.pwrite(fd, pack(record, key), _offset(record))
            if written != RECORD_SIZE:
                raise StateUnusable(file_name(key.volume_id), "short write")
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except (OSError, UnsafeFileError) as error:
        raise _unusable(key, error) from error


def _offset(record: Record) -> int:
    return record.sequence % SLOTS * SLOT_SIZE


def _newest(fd: int, key: VolumeKey) -> Record | None:
    slots = [unpack(os.pread(fd, RECORD_SIZE, i * SLOT_SIZE), key) for i in range(SLOTS)]
    valid = [record for record in slots if record is not None]
    return max(valid, key=lambda record: record.sequence, default=None)


def _unusable(key: VolumeKey, error: Exception) -> StateUnusable:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return StateUnusable(file_name(key.volume_id), reason or str(error))


# Freshness


class Freshness(enum.Enum):
    """How what was found stands to what is remembered."""

    FRESH = enum.auto()
    OLDER = enum.auto()
    FORKED = enum.auto()
    NO_RECORD = enum.auto()


def compare(record: Record | None, found: Found) -> Freshness:
    """Compare the remembered state with the one found.

    The record is written after the root is durable, so after a crash the root found may be newer
    than the record. It is fresh only if it is known to follow the remembered one.
    """
    if record is None:
        return Freshness.NO_RECORD
    if found.root != record.root:
        if found.root[:2] < record.root[:2]:
            return Freshness.OLDER
        if found.root[:2] == record.root[:2] or record.root.salt not in found.ancestors:
            return Freshness.FORKED
    if found.header.generation < record.header.generation:
        return Freshness.OLDER
    if found.header.generation == record.header.generation and found.header != record.header:
        return Freshness.FORKED
    return Freshness.FRESH


def check(
    where: str,
    record: Record | None,
    found: Found,
    *,
    trust_first: bool = False,
    accept_root: bytes | None = None,
) -> Freshness:
    """Return how fresh `found` is, if it may be mounted; raise the refusal if not.

    `accept_root` is the R that the operator accepts on the command line: exactly this root passes,
    whatever is remembered. `trust_first` passes any root, but only where nothing is remembered.
    """
    verdict = compare(record, found)
    if verdict is Freshness.FRESH or accept_root == found.root.salt:
        return verdict
    if record is None:
        if trust_first:
            return verdict
        raise NoRecord(where, found.root.salt)
    refusal = OlderThanRecord if verdict is Freshness.OLDER else ForkedFromRecord
    raise refusal(
        where, _name(record.root, record.header), _name(found.root, found.header), found.root.salt
    )


def _name(root: RootId, header: HeaderId) -> str:
    return f"{root}, header generation {header.generation}"
