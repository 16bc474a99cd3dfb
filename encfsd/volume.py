"""One volume from the control plane's side: create, unlock and open, verify, change its keys.

Order of an opening: the header is read without a secret; the secret unlocks it; the trusted record
says which root is the newest this machine knows; object 0 is opened and says which headers count.
All functions block.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import logging
import os
import resource
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from encfsd import source as backing
from encfsd import state, volume_header
from encfsd.errors import (
    BackingFailed,
    BackingGone,
    DamagedContents,
    EncfsdError,
    ForkedFromRecord,
    FreeListTooLarge,
    InternalError,
    MemoryNotLocked,
    NewerFormat,
    NoPermission,
    NoRecord,
    OlderThanRecord,
    RootNotFound,
    StateUnusable,
    UsageError,
    VolumeInUse,
    WrongVolume,
    from_oserror,
)
from encfsd.keys import Secret, SlotType, VolumeKey
from encfsd.native import ffi, lib
from encfsd.options import (
    ONLY_RESERVE,
    OVERFLOW_POLICIES,
    POOL_STRATEGIES,
    FreeListSettings,
    VolumeSettings,
    format_size,
)
from encfsd.private_files import UnsafeFileError
from encfsd.source import Source
from encfsd.state import Found, Record, RootId
from encfsd.volume_header import Copies, Header, HeaderId

IO_THREADS = 8  # cold random reads need this many
BARRIER_THREADS = 4
GROUP_INTERVAL_MS = 5000
DIRTY_LIMIT = 256 << 20
CLOSING_SECONDS = 10.0  # how long a mount waits for another one that is ending

_ACCEPTED = "headers"
_HEADER_ID = struct.Struct("<Q32s")
_MESSAGE_SIZE = 512
_WHOLE = 2**64 - 1  # bytes, as volume_verify reports a file that cannot be opened at all
_LEVELS = {
    lib.VOLUME_INFO: logging.INFO,
    lib.VOLUME_WARNING: logging.WARNING,
    lib.VOLUME_ERROR: logging.ERROR,
}
_log = logging.getLogger(__name__)


def setup_crypto(backend: str) -> str:
    """Choose and test the sealing backend of this process; return a line for the log.

    Call once, before any thread. Raises UsageError if the wanted one cannot be used here.
    """
    wanted = {
        "auto": lib.SEAL_AUTO,
        "openssl": lib.SEAL_OPENSSL,
        "ipsec-mb": lib.SEAL_IPSEC_MB,
    }[backend]
    reason = ffi.new("char[]", _MESSAGE_SIZE)
    result = lib.seal_setup(wanted, reason, _MESSAGE_SIZE)
    line: str = ffi.string(reason).decode(errors="replace")
    if result == -errno.ENOTSUP:
        raise UsageError(f"--crypto={backend}", line)
    if result < 0:
        raise InternalError(f"--crypto={backend}", line)
    return line


def pack_headers(headers: Collection[HeaderId]) -> bytes:
    """Return the value in object 0 that says which headers count."""
    return b"".join(_HEADER_ID.pack(*header) for header in sorted(headers))


def unpack_headers(value: bytes) -> list[HeaderId]:
    """Undo `pack_headers`; InternalError if it is not such a value."""
    if not value or len(value) % _HEADER_ID.size:
        raise InternalError("metadata", "the list of accepted headers is malformed")
    return [HeaderId(*fields) for fields in _HEADER_ID.iter_unpack(value)]


def refuse_small_free_list(size: int, thing: str) -> None:
    """Raise UsageError about `thing` if so many bytes do not hold the reserve; 0 asks for that."""
    least = lib.pool_footprint(lib.POOL_RESERVE_NODES)
    if 0 < size < least:
        detail = "less than the reserve that commits need"
        remedy = f"{least >> 10}K is the least that can be given, or 0 for the reserve"
        raise UsageError(thing, detail, remedy)


class Volume:
    """An open volume: a struct volume *, and what was found when it was opened."""

    def __init__(self, handle: Any, found: Any, source: str, progress: Any = ffi.NULL) -> None:
        """`source` is what the user called the backing directory, for messages."""
        self.handle = handle
        self._source = source
        self._progress = progress  # the pool calls it when it is resized
        self.recovered = int(found.recovered_objects)
        self.orphans = int(found.orphans)
        self.root = _root_id(found.root)

    def accepted_headers(self) -> list[HeaderId]:
        """Return which headers the metadata accepts."""
        size = 16 * _HEADER_ID.size
        value, used = ffi.new("uint8_t[]", size), ffi.new("size_t *")
        _check("metadata", lib.volume_get_value(self.handle, _ACCEPTED.encode(), value, size, used))
        return unpack_headers(bytes(ffi.buffer(value, used[0])))

    def accept_headers(self, headers: Collection[HeaderId]) -> None:
        """Make durable which headers the metadata accepts."""
        value = pack_headers(headers)
        result = lib.volume_set_value(self.handle, _ACCEPTED.encode(), value, len(value))
        _check("metadata", result)

    def log_lines(self) -> Iterator[tuple[int, str]]:
        """Take the waiting log lines of the data plane, each with its level."""
        severity, line = ffi.new("enum volume_severity *"), ffi.new("char[]", _MESSAGE_SIZE)
        while lib.volume_next_log_line(self.handle, severity, line, _MESSAGE_SIZE):
            yield _LEVELS[severity[0]], ffi.string(line).decode(errors="replace")

    def resize_free_list(self, size: int, thing: str) -> None:
        """Grow the free list to `size` bytes, or begin to shrink it; 0 leaves only the reserve.

        Raises UsageError, FreeListTooLarge or MemoryNotLocked, about `thing`.
        """
        refuse_small_free_list(size, thing)
        size = size or lib.pool_footprint(lib.POOL_RESERVE_NODES)
        result = lib.volume_resize_free_list(self.handle, size)
        if result == 0:
            return
        if result == -errno.EPERM:
            raise _list_not_locked(size)
        if result == -errno.ERANGE:
            most = format_size(self.stats().pool.max_bytes)
            raise FreeListTooLarge(
                thing,
                f"address space was reserved at mount for {most}",
                "choose a smaller size, or mount again with a larger --free-list",
            )
        raise FreeListTooLarge(thing, os.strerror(-result), "choose a smaller size")

    def stats(self) -> Any:
        """Return the struct volume_stats *, which must be kept as long as a part of it is used."""
        found = ffi.new("struct volume_stats *")
        lib.volume_stats(self.handle, found)
        return found

    def detach(self) -> Volume:
        """Return another owner of this volume; `close` of this one does nothing then."""
        other = copy.copy(self)
        self.handle = ffi.NULL
        return other

    def close(self) -> None:
        """Make everything durable and free the volume; raise what the last commit met."""
        handle, self.handle = self.handle, ffi.NULL
        if handle == ffi.NULL:
            return
        result = lib.volume_close(handle)
        if result < 0:
            raise _last_commit_failed(self._source, OSError(-result, os.strerror(-result)))


def _check(thing: str, result: int) -> None:
    if result < 0:
        raise from_oserror(thing, OSError(-result, os.strerror(-result)))


def _last_commit_failed(source: str, error: OSError) -> EncfsdError:
    met = from_oserror(source, error)
    detail = f"last commit: {met.detail}" if met.detail else "last commit"
    lost = "what was written since the last successful fsync may be missing"
    return type(met)(source, detail, f"{lost}: {met.remedy}")


def _list_not_locked(size: int) -> MemoryNotLocked:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MemoryNotLocked(
        "--free-list-lock",
        f"RLIMIT_MEMLOCK allows {format_size(limit)}, the free list takes {format_size(size)}",
        "raise the limit with 'ulimit -l', with LimitMEMLOCK= in the unit or with MEMLOCK in the "
        "configuration, or grant CAP_IPC_LOCK",
    )


def _root_id(record: Any) -> RootId:
    return RootId(int(record.epoch), int(record.counter), bytes(ffi.buffer(record.salt)))


def _set_record(record: Any, root: RootId) -> None:
    record.epoch, record.counter = root.epoch, root.counter
    ffi.buffer(record.salt)[:] = root.salt


# Create


def create(settings: VolumeSettings, secret: Secret, kind: SlotType) -> Header:
    """Create a volume in an empty or missing directory, and this machine's first record of it.

    The header comes last: it makes the directory a volume. On failure the directory is empty again.
    """
    with backing.create(settings.source) as source:
        try:
            source.create_lock()
            source.lock(read_only=False)
            return _create_in(source, settings, secret, kind)
        except BaseException:
            source.remove_contents()
            raise


def _create_in(source: Source, settings: VolumeSettings, secret: Secret, kind: SlotType) -> Header:
    with state.Directory(settings.state_dir) as remembered:
        header, key = volume_header.create(secret, kind)
        with key:
            _fill(source, key, header, remembered)
        if state.on_same_device(remembered, source.fd):
            _log_same_device(settings, logging.WARNING)
        return header


def _fill(source: Source, key: VolumeKey, header: Header, remembered: state.Directory) -> None:
    root = _create_object_0(source, key)
    record = Record(1, root, header.id, clean=True)
    state.create(remembered, key, record)
    volume = _Opening(source, key, remembered, read_only=False).open(record)
    try:
        volume.accept_headers({header.id})
    finally:
        volume.close()
    volume_header.write_first(source.fd, source.path, header)


def _log_same_device(settings: VolumeSettings, level: int) -> None:
    _log.log(
        level,
        "%s lies on the same device as the volume: whoever rolls back that device is not noticed; "
        "choose another with --state-dir",
        settings.state_dir,
    )


def _create_object_0(source: Source, key: VolumeKey) -> RootId:
    options = _options(source, key, read_only=False)
    record = ffi.new("struct object_record *")
    result = lib.volume_create(options, os.geteuid(), os.getegid(), record)
    _wipe_options(options)
    _refuse_unlocked_memory(result)
    _check(source.path, result)
    return _root_id(record)


# Open


def _options(source: Source, key: VolumeKey, *, read_only: bool) -> Any:
    options = ffi.new("struct volume_options *")
    options.src_fd = source.fd
    options.state_fd = -1
    ffi.buffer(options.volume_id)[:] = key.volume_id
    ffi.buffer(options.p)[:] = key.prk
    options.read_only = read_only
    options.io_threads = IO_THREADS
    options.barrier_threads = BARRIER_THREADS
    options.group_interval_ms = GROUP_INTERVAL_MS
    options.dirty_limit_bytes = DIRTY_LIMIT
    return options


def _set_free_list(options: Any, free_list: FreeListSettings) -> None:
    options.free_list_bytes = free_list.size
    options.free_list_max_bytes = free_list.max_size
    options.free_list_strategy = POOL_STRATEGIES.index(free_list.strategy)
    options.free_list_overflow = OVERFLOW_POLICIES.index(free_list.overflow)
    options.free_list_prefault = free_list.prefault
    options.free_list_hugepages = free_list.hugepages
    options.free_list_lock = free_list.lock


def _wipe_options(options: Any) -> None:
    ffi.buffer(options.p)[:] = bytes(len(options.p))


def _refuse_unlocked_memory(result: int) -> None:
    if result == -errno.EPERM:
        raise MemoryNotLocked("keys")


@dataclass
class _Opening:
    """The steps from an unlocked key to an open volume."""

    source: Source
    key: VolumeKey
    remembered: state.Directory
    read_only: bool
    free_list: FreeListSettings = ONLY_RESERVE
    progress: Any = ffi.NULL  # pool_progress_fn *

    def open(self, record: Record | None, accept_root: bytes | None = None) -> Volume:
        """Open the volume, against `record` if there is one."""
        options = _options(self.source, self.key, read_only=self.read_only)
        _set_free_list(options, self.free_list)
        options.free_list_progress = self.progress
        if record is not None:
            options.have_state = True
            options.state_clean = record.clean
            _set_record(options.state, record.root)
        if accept_root is not None:
            options.accept_root = True
            ffi.buffer(options.accept_salt)[:] = accept_root
        with self._state_file(options):
            handle, found = ffi.new("struct volume **"), ffi.new("struct volume_found *")
            message = ffi.new("char[]", _MESSAGE_SIZE)
            result = lib.volume_open(handle, options, found, message, _MESSAGE_SIZE)
        _wipe_options(options)
        if result < 0:
            text = ffi.string(message).decode(errors="replace")
            raise self._refusal(result, found, record, text)
        return Volume(handle[0], found, self.source.path, self.progress)

    @contextlib.contextmanager
    def _state_file(self, options: Any) -> Iterator[None]:
        if self.read_only:
            yield
            return
        try:
            fd = self.remembered.open_file(self.key.volume_id, os.O_RDWR)
        except (OSError, UnsafeFileError) as error:
            name = state.file_name(self.key.volume_id)
            raise StateUnusable(name, str(error)) from None
        try:
            options.state_fd = fd
            yield
        finally:
            os.close(fd)

    def _refusal(self, result: int, found: Any, record: Record | None, text: str) -> EncfsdError:
        where = self.source.path
        if result == -errno.ESTALE and record is not None:
            root = _root_id(found.root)
            kind = OlderThanRecord if found.older else ForkedFromRecord
            return kind(where, str(record.root), str(root), root.salt)
        named: dict[int, Callable[[object, str], EncfsdError]] = {
            errno.ENOENT: BackingGone,
            errno.EBADMSG: DamagedContents,
            errno.EUCLEAN: DamagedContents,
            errno.EPROTONOSUPPORT: NewerFormat,
            errno.EUSERS: VolumeInUse,
        }
        if -result in named:
            return named[-result](where, text)
        error = self._limit_met(result, text)
        if error is None:
            error = from_oserror(where, OSError(-result, os.strerror(-result)))
        return BackingFailed(where, text) if isinstance(error, BackingFailed) else error

    def _limit_met(self, result: int, text: str) -> EncfsdError | None:
        """Return what to say if this process may not have as much of something as it needs."""
        if result == -errno.EPERM:
            if text.startswith("the free list"):
                return _list_not_locked(self.free_list.size)
            return MemoryNotLocked("keys")
        if result == -errno.EAGAIN:
            remedy = "allow this user more processes: NPROC, 'ulimit -u' or LimitNPROC= in the unit"
            return NoPermission("threads", text, remedy)
        if result == -errno.ENOMEM and self.free_list.size:
            return FreeListTooLarge("--free-list", text)
        return None

    def open_fresh(self, settings: VolumeSettings, record: Record | None) -> Volume:
        """Open what may be believed: by this machine's record, or by what the operator says."""
        if record is not None and settings.accept_root is None:
            return self.open(record)
        accepted = self._look(settings.accept_root, record)
        if settings.accept_root is None and not settings.trust_first:
            raise NoRecord(self.source.path, accepted.root.salt, settings.state_dir)
        if not self.read_only:
            state.create(self.remembered, self.key, accepted)
        # The old record, if any, still says which epochs have been used.
        return self.open(record or accepted, settings.accept_root)

    def _look(self, accept_root: bytes | None, record: Record | None) -> Record:
        """Open the volume without writing anything; return a record of the root found."""
        looking = _Opening(self.source, self.key, self.remembered, read_only=True)
        try:
            volume = looking.open(None, accept_root)
        except DamagedContents as error:
            raise looking.root_not_found(accept_root) or error from None
        try:
            header = max(volume.accepted_headers())
        finally:
            volume.close()
        if record is None:
            return Record(1, volume.root, header, clean=False)
        begun = record.epoch_begun
        return Record(record.sequence + 1, volume.root, header, clean=False, epoch_begun=begun)

    def root_not_found(self, accept_root: bytes | None) -> RootNotFound | None:
        """Return what to say instead if the volume is sound but for the root asked for."""
        if accept_root is None:
            return None
        try:
            volume = self.open(None)
        except EncfsdError:
            return None
        volume.close()
        return RootNotFound(self.source.path, volume.root.salt)


@dataclass(frozen=True)
class Unlocked:
    """An open volume and what opened it."""

    volume: Volume
    header: Header
    key: VolumeKey
    copies: Copies
    accepted: list[HeaderId]
    record: Record | None  # as it was before

    def header_needs_work(self) -> bool:
        """Say whether a change of the header was interrupted, or a copy is damaged."""
        return (
            self.accepted != [self.header.id]
            or self.copies.need_repair(self.header)
            or (self.record is not None and self.record.header != self.header.id)
        )


def read_headers(source: Source, settings: VolumeSettings, *, tell: bool = True) -> Copies:
    """Read the header copies, without a secret; WrongVolume if another volume was asked for.

    `tell`: log what is wrong with a copy that is not needed.
    """
    copies = volume_header.read_copies(source.fd, source.path, tell=tell)
    wanted = settings.volume_id
    for header in copies.newest_first():
        if wanted is not None and header.volume_id != wanted:
            raise WrongVolume(source.path, f"found {header.volume_id.hex()}")
    return copies


@contextlib.contextmanager
def unlocked(
    source: Source,
    settings: VolumeSettings,
    secret: Secret,
    *,
    read_only: bool,
    free_list: FreeListSettings = ONLY_RESERVE,
    progress: Any = ffi.NULL,
) -> Iterator[Unlocked]:
    """Unlock and open the volume in a locked `source`; at the end wipe the key and close it.

    A volume that was `detach`ed in the block stays open.
    """
    copies = read_headers(source, settings)
    remembered = state.Directory(settings.state_dir)
    opened: list[Volume] = []
    record: Record | None = None

    def accepted(key: VolumeKey) -> list[HeaderId]:
        nonlocal record
        record = state.read(remembered, key)
        opening = _Opening(source, key, remembered, read_only, free_list, progress)
        opened.append(opening.open_fresh(settings, record))
        return opened[0].accepted_headers()

    try:
        header, key = volume_header.open_copies(copies, secret, accepted)
        with key:
            if not read_only and state.on_same_device(remembered, source.fd):
                _log_same_device(settings, logging.INFO)
            if record is not None and settings.accept_root is None:
                # The root has been judged already; what is left is the header.
                state.check(source.path, record, Found(record.root, header.id, ()))
            names = opened[0].accepted_headers()
            yield Unlocked(opened[0], header, key, copies, names, record)
    finally:
        remembered.close()
        for volume in opened:
            volume.close()


def open_to_serve(
    source: Source,
    settings: VolumeSettings,
    secret: Secret,
    *,
    read_only: bool,
    free_list: FreeListSettings,
    progress: Callable[[int, int], None],
) -> Volume:
    """Open a volume for a mount; the caller closes it. Finishes a change of the header first.

    `progress` is told how many bytes of the free list are in memory, of how many.
    """
    report = _progress_function(progress) if free_list.prefault else ffi.NULL
    how = {"read_only": read_only, "free_list": free_list, "progress": report}
    with unlocked(source, settings, secret, **how) as it:
        if read_only or not it.header_needs_work():
            return it.volume.detach()
        _log.warning("%s: mending the volume header", source.path)
        _replace_header(settings, it, it.header)
    with unlocked(source, settings, secret, **how) as it:
        return it.volume.detach()


def _progress_function(progress: Callable[[int, int], None]) -> Any:
    """Return a pool_progress_fn *. Whoever gives it to a pool keeps it as long as that."""

    @ffi.callback("pool_progress_fn")  # type: ignore[untyped-decorator]
    def report(_: Any, done: int, total: int) -> None:
        progress(done, total)

    return report


# Verify


@dataclass(frozen=True)
class Damage:
    """A damaged part of one file. `path` as in the volume, bytes as they are stored there."""

    path: bytes
    offset: int
    size: int

    def extent(self) -> str:
        """Say which bytes are lost."""
        if self.size == _WHOLE:
            return "the whole file"
        return f"{self.size} bytes from {self.offset}"


def verify(
    volume: Volume, progress: Callable[[int, int], None], damaged: Callable[[Damage], None]
) -> bool:
    """Read and authenticate everything of a volume opened read-only; say whether it is sound."""
    done = 0
    stop = ffi.new("int *")
    raised: list[BaseException] = []

    def end(_: object, error: BaseException, __: object) -> None:
        """Keep what escapes from a callback, e.g. KeyboardInterrupt: C cannot pass it on."""
        raised.append(error)
        stop[0] = 1

    @ffi.callback("void(void *, uint64_t, uint64_t)", onerror=end)  # type: ignore[untyped-decorator]
    def on_progress(_: Any, nodes: int, total: int) -> None:
        nonlocal done
        done += nodes
        progress(done, total)

    damage = "void(void *, const char *, uint64_t, uint64_t)"

    @ffi.callback(damage, onerror=end)  # type: ignore[untyped-decorator]
    def on_damaged(_: Any, path: Any, offset: int, size: int) -> None:
        damaged(Damage(ffi.string(path), offset, size))

    result = lib.volume_verify(volume.handle, on_progress, on_damaged, ffi.NULL, stop)
    if raised:
        raise raised[0]
    if result == -errno.EBADMSG:
        return False
    _check("verify", result)
    return True


# Keys

Change = Callable[[Header, VolumeKey, int], Header]


def change_header(settings: VolumeSettings, secret: Secret, change: Change) -> Header:
    """Replace the header by what `change(header, key, next generation)` returns."""
    with Source(settings.source) as source:
        source.lock(read_only=False, wait=CLOSING_SECONDS)
        with unlocked(source, settings, secret, read_only=False) as it:
            new = change(it.header, it.key, it.copies.next_generation(it.key))
            _replace_header(settings, it, new)
    return new


def _replace_header(settings: VolumeSettings, it: Unlocked, new: Header) -> None:
    """Replace the header and close the volume, which writes the record until then."""
    accepted: list[HeaderId] = []
    accept = it.volume.accept_headers
    volume_header.replace(it.copies, it.header, new, accept, accepted.append)
    it.volume.close()
    _remember(settings, it.key, accepted[0])


def _remember(settings: VolumeSettings, key: VolumeKey, header: HeaderId) -> None:
    with state.Directory(settings.state_dir) as remembered:
        record = state.read(remembered, key)
        if record is None:
            raise StateUnusable(settings.state_dir, "the record is gone")
        newer = dataclasses.replace(record, sequence=record.sequence + 1, header=header)
        state.update(remembered, key, newer)
