"""A synchronous client of an open volume: paths in, requests to the C core, answers out."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from encfsd.native import ffi, lib
from encfsd.volume import Volume

ROOT_INO = 1
OWNER = 1000  # of all that is made
_XATTR_MAX = 64 << 10
_BATCH = 16


class Attr(NamedTuple):
    """A copy of a struct attr."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    blocks: int
    mtime: int

    @classmethod
    def of(cls, attr: Any) -> Attr:
        """Copy; what cffi returns for a member does not keep the struct around it alive."""
        return cls(*(getattr(attr, name) for name in cls._fields))


class Client:
    """Carries out one request at a time and waits for it."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume.handle

    def run(self, op: int, ino: int, **members: Any) -> Any:
        """Return the answered struct request; OSError if it failed."""
        request = ffi.new("struct request *")
        request.op, request.ino = op, ino
        request.caller.uid = request.caller.gid = OWNER
        buffers = []
        for name, value in members.items():
            if isinstance(value, bytes):
                buffers.append(ffi.new("char[]", value))
                setattr(request, name, buffers[-1])
                if name.endswith("name"):
                    setattr(request, f"{name}_len", len(value))
            else:
                setattr(request, name, value)
        if lib.request_start(self._volume, request) == lib.REQUEST_PARKED:
            select.select([lib.request_completion_fd(self._volume)], [], [])
            assert lib.request_next_completed(self._volume) == request
        if request.result < 0:
            raise OSError(-request.result, os.strerror(-request.result))
        return request

    def lookup(self, path: bytes) -> Attr:
        """Return the attributes of what lies at `path`."""
        request = self.run(lib.REQ_GETATTR, ROOT_INO)
        for name in filter(None, path.split(b"/")):
            request = self.run(lib.REQ_LOOKUP, request.attr.ino, name=name)
        return Attr.of(request.attr)

    def _place(self, path: bytes) -> tuple[int, bytes]:
        parent, name = os.path.split(path)
        return self.lookup(parent).ino, name

    # What reads

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Attr]]:
        """Yield the path and the attributes of all that lies below a directory."""
        directory = self.lookup(path)
        cookie = 0
        while True:
            entries = ffi.new("struct ns_dirent[]", _BATCH)
            count = self.run(
                lib.REQ_READDIR, directory.ino, offset=cookie, buffer=entries, size=_BATCH
            ).result
            if count == 0:
                return
            for entry in entries[0:count]:
                cookie = entry.cookie
                name = bytes(ffi.buffer(entry.name, entry.name_len))
                if name in {b".", b".."}:
                    continue
                below = path + b"/" + name if path else name
                yield below, Attr.of(entry.attr)
                if stat.S_ISDIR(entry.attr.mode):
                    yield from self.walk(below)

    def read(self, ino: int, size: int, offset: int = 0) -> bytes:
        """Return bytes of a file."""
        buffer = ffi.new("char[]", size or 1)
        count = self.run(lib.REQ_READ, ino, buffer=buffer, size=size, offset=offset).result
        return bytes(ffi.buffer(buffer, count))

    def readlink(self, ino: int) -> bytes:
        """Return what a symbolic link points to."""
        buffer = ffi.new("char[]", 4096)
        count = self.run(lib.REQ_READLINK, ino, buffer=buffer, size=4096).result
        return bytes(ffi.buffer(buffer, count))

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """Return all extended attributes."""
        buffer = ffi.new("char[]", _XATTR_MAX)
        try:
            count = self.run(lib.REQ_LISTXATTR, ino, buffer=buffer, size=_XATTR_MAX).result
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.EOPNOTSUPP}:
                return {}
            raise
        found = {}
        for name in bytes(ffi.buffer(buffer, count)).split(b"\0")[:-1]:
            value = ffi.new("char[]", _XATTR_MAX)
            size = self.run(lib.REQ_GETXATTR, ino, name=name, buffer=value, size=_XATTR_MAX).result
            found[name] = bytes(ffi.buffer(value, size))
        return found

    # What changes

    def mknod(self, path: bytes, mode: int) -> int:
        """Make a file, fifo or socket; return its inode number."""
        parent, name = self._place(path)
        return int(self.run(lib.REQ_MKNOD, parent, name=name, mode=mode).attr.ino)

    def mkdir(self, path: bytes, mode: int) -> None:
        """Make a directory."""
        parent, name = self._place(path)
        self.run(lib.REQ_MKDIR, parent, name=name, mode=stat.S_IFDIR | mode)

    def symlink(self, path: bytes, target: bytes) -> None:
        """Make a symbolic link."""
        parent, name = self._place(path)
        self.run(lib.REQ_SYMLINK, parent, name=name, new_name=target)

    def link(self, path: bytes, new_path: bytes) -> None:
        """Make a hard link."""
        parent, name = self._place(new_path)
        self.run(lib.REQ_LINK, self.lookup(path).ino, new_parent=parent, new_name=name)

    def write(self, ino: int, data: bytes, offset: int = 0) -> None:
        """Write to a file."""
        self.run(lib.REQ_WRITE, ino, buffer=data, size=len(data), offset=offset)

    def punch(self, ino: int, offset: int, size: int) -> None:
        """Make a range of a file a hole."""
        self.run(lib.REQ_PUNCH, ino, offset=offset, size=size)

    def truncate(self, ino: int, size: int) -> None:
        """Set the size of a file."""
        self.run(lib.REQ_SETATTR, ino, valid=lib.SET_SIZE, attr={"size": size})

    def set_mtime(self, ino: int, mtime: int) -> None:
        """Set the modification time, in nanoseconds."""
        self.run(lib.REQ_SETATTR, ino, valid=lib.SET_MTIME, attr={"mtime": mtime})

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        self.run(lib.REQ_SETXATTR, ino, name=name, buffer=value, size=len(value))

    def sync(self) -> None:
        """Return when everything is durable."""
        self.run(lib.REQ_SYNC_ALL, ROOT_INO)
