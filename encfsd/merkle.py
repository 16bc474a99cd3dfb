"""One Merkle object, for tools and tests: open, read, change, commit, root id, verify.

A thin face of `_object.h`, which has the contracts. All of it blocks, reads included, and the GIL
is free meanwhile; a mounted volume goes through `requests.py` instead. Errors of the data plane are
OSErrors with its errno: EBADMSG for an object that has no root to open it at, EIO for a node that
is not authentic.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from encfsd.closing import Closing
from encfsd.errors import InternalError
from encfsd.native import check, ffi, lib
from encfsd.state import RootId

META_ID = bytes(16)
"""The id of object 0."""

_RESERVE_NODES = 64


class Attributes(NamedTuple):
    """Size in bytes, data nodes that are not holes, times in nanoseconds since 1970."""

    size: int
    nodes: int
    atime: int
    mtime: int
    ctime: int


@dataclass(frozen=True)
class Damage:
    """Data nodes `first` to `first + count - 1` cannot be read."""

    first: int
    count: int


class Environment(Closing):
    """What the objects of one source directory share. A context manager; closes its objects too."""

    def __init__(
        self,
        source: int,
        *,
        volume_id: bytes,
        p: bytes | bytearray,
        epoch: int,
        read_only: bool = False,
        free_list_bytes: int = 0,
        dirty_limit: int = 1024,
        cache_data: bool = True,
        threads: int = 0,
    ) -> None:
        """`source`: descriptor of the directory, which stays the caller's. `p`: the volume's P.

        `epoch` is the mount epoch that new roots carry. `dirty_limit` is the number of nodes from
        which on a writer writes some back itself. Without `threads` everything is done on the
        calling thread.
        """
        self.objects: set[Object] = set()
        self._struct = ffi.new("struct object_env *")
        self._struct.instance = os.urandom(16)
        self._struct.epoch = epoch
        self._struct.read_only = read_only
        self._struct.cache_data = cache_data
        self._struct.dirty_limit = dirty_limit
        try:
            self._struct.ring = _made(
                "struct keyring *", lib.keyring_create, volume_id, ffi.from_buffer("uint8_t[]", p)
            )
            self._struct.dir = _made("struct blockdir *", lib.blockdir_open, source, read_only)
            self._struct.pool = _made(
                "struct pool *",
                lib.pool_create,
                ffi.new(
                    "struct pool_options *",
                    {
                        "bytes": free_list_bytes,
                        "reserve_nodes": _RESERVE_NODES,
                        "evict": ffi.addressof(lib, "object_evict"),
                    },
                ),
                ffi.NULL,
                0,
            )
            if threads:
                self._struct.workers = _made("struct workers *", lib.workers_create, threads)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all objects and free everything. InternalError if a node of the pool was lost."""
        for object_ in tuple(self.objects):
            object_.close()
        s = self._struct
        if s.workers:
            lib.workers_destroy(s.workers)
        leaked = lib.pool_destroy(s.pool)
        if s.dir:
            lib.blockdir_close(s.dir)
        lib.keyring_destroy(ffi.cast("struct keyring *", s.ring))
        s.workers = s.pool = s.dir = s.ring = ffi.NULL
        if leaked:
            raise InternalError("node pool", f"{leaked} nodes were not given back")

    def create(self, object_id: bytes) -> Object:
        """Create the backing file of a new object. Nothing is durable before its first commit."""
        made = _made("struct object *", lib.object_create, self._struct, _id(object_id))
        return Object(self, made)

    def open(self, object_id: bytes, root: RootId) -> Object:
        """Open an object at exactly `root`."""
        made = _made(
            "struct object *", lib.object_open, self._struct, _id(object_id), _record(root)
        )
        return Object(self, made)

    def recover(self, object_id: bytes, root: RootId | None, active_epoch: int) -> Object:
        """Open an active object after a crash, at `root` or a later one of its active epoch.

        Without `root` any later one counts whose epoch is not below `active_epoch` (object 0).
        What was adopted is durable on return; `Object.root` names it.
        """
        adopted = ffi.new("struct object_record *")
        record = ffi.NULL if root is None else _record(root)
        made = _made(
            "struct object *",
            lambda out: lib.object_recover(
                out, self._struct, _id(object_id), record, active_epoch, adopted
            ),
        )
        return Object(self, made)


class Object(Closing):
    """One open object, made by an `Environment`. A context manager. Thread-safe but for `close`."""

    def __init__(self, environment: Environment, handle: Any) -> None:
        """Take over `handle`, a struct object *."""
        self._environment = environment
        self._handle = handle
        environment.objects.add(self)

    def close(self) -> None:
        """Free the object. What was not committed is lost."""
        handle, self._handle = self._handle, ffi.NULL
        lib.object_close(handle)
        self._environment.objects.discard(self)

    @property
    def attributes(self) -> Attributes:
        """Size, nodes and times as they are now, committed or not; `nodes` may be an estimate."""
        attr = ffi.new("struct object_attr *")
        lib.object_attr(self._handle, attr)
        return Attributes(attr.size, attr.nodes, attr.atime, attr.mtime, attr.ctime)

    @property
    def root(self) -> RootId:
        """The last durable root: its R names this version of the object."""
        record = ffi.new("struct object_record *")
        lib.object_record(self._handle, record)
        return _root_id(record)

    @property
    def is_dirty(self) -> bool:
        """Whether a commit would write anything."""
        return bool(lib.object_is_dirty(self._handle))

    def set_times(self, atime: int, mtime: int, ctime: int) -> None:
        """Set the times, in nanoseconds since 1970."""
        lib.object_set_times(self._handle, atime, mtime, ctime)

    def read(self, offset: int, size: int) -> bytes:
        """Read up to `size` bytes, fewer only at the end."""
        buffer = bytearray(size)
        count = check(lib.object_read(self._handle, ffi.from_buffer(buffer), size, offset, 0))
        return bytes(buffer[:count])

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Write all of `data` or, on error, nothing."""
        check(lib.object_write(self._handle, ffi.from_buffer(data), len(data), offset, 0))

    def truncate(self, size: int) -> None:
        """Cut off what lies past `size`, or grow by a hole."""
        check(lib.object_truncate(self._handle, size, 0))

    def punch(self, offset: int, size: int) -> None:
        """Make a range zero; nodes that lie in it as a whole become holes."""
        check(lib.object_punch(self._handle, offset, size, 0))

    def seek_data(self, offset: int) -> int | None:
        """Return the offset of the first data at or past `offset`, or None if there is none."""
        return self._seek(offset, os.SEEK_DATA)

    def seek_hole(self, offset: int) -> int | None:
        """Return where data that holds `offset` ends; None past the end of the object."""
        return self._seek(offset, os.SEEK_HOLE)

    def _seek(self, offset: int, whence: int) -> int | None:
        found = int(lib.object_seek(self._handle, offset, whence))
        return None if found == -errno.ENXIO else check(found)

    def commit(self, *, solo: bool = True) -> RootId:
        """Make all of it durable; return the root that names it.

        Not `solo`: only the record of the returned root can find it, as in a group.
        """
        record = ffi.new("struct object_record *")
        check(lib.object_commit(self._handle, solo, record))
        return _root_id(record)

    def release(self, root: RootId) -> None:
        """Promise that no root older than `root` will be opened: their slots may be reused."""
        lib.object_release(self._handle, _record(root))

    def scan(self) -> None:
        """Learn from the whole tree which slots are free."""
        check(lib.object_scan(self._handle))

    def verify(self) -> list[Damage]:
        """Read and authenticate every node of the last durable root; return what is damaged."""
        damages: list[Damage] = []
        handle = ffi.new_handle(damages)
        result = lib.object_verify(self._handle, ffi.NULL, lib.merkle_damaged, handle)
        if result != -errno.EBADMSG:
            check(result)
        return damages


@ffi.def_extern()  # type: ignore[untyped-decorator]
def merkle_damaged(handle: Any, first: int, count: int) -> None:
    """Be told of damage by object_verify."""
    ffi.from_handle(handle).append(Damage(first, count))


def _made(kind: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `make` puts behind its first argument."""
    out = ffi.new(f"{kind} *")
    check(make(out, *arguments))
    return out[0]


def _id(object_id: bytes) -> bytes:
    if len(object_id) != len(META_ID):
        raise ValueError("an object id has 16 bytes")
    return object_id


def _record(root: RootId) -> Any:
    return ffi.new("struct object_record *", root._asdict())


def _root_id(record: Any) -> RootId:
    return RootId(record.epoch, record.counter, bytes(ffi.buffer(record.salt)))
