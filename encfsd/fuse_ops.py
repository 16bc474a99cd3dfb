"""FUSE call <-> request to the volume, errno <-> FUSEError; nothing else.

Each handler fills in one request, runs it and hands back what pyfuse3 wants. Who may do what is
decided by the kernel (default_permissions), everything else by the volume.

File and directory handles are inode numbers: an open file is kept by the kernel's reference to its
inode. Only that there are writers is told to the volume; a handle of one has the top bit set.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from encfsd.native import ffi, lib
from encfsd.requests import Requests, new_buffer

TIMEOUT: int = lib.TRANSPORT_CACHE_SECONDS

_WRITER = 1 << 63  # in a file handle; inode numbers are smaller
_INODE = _WRITER - 1
_ACCESS_ACL = b"system.posix_acl_access"

_TARGET_MAX = 4096
_XATTR_MAX = 65536
_MIN_BATCH, _FIRST_BATCH, _MAX_BATCH = 4, 24, 128  # entries that READDIR fetches at a time

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _handler(
    function: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]:
    """Turn whatever a handler does not expect into EIO: an escaping exception ends the mount.

    The log gets the kind of exception and the place, never its text: that may hold a name.
    """

    @functools.wraps(function)
    async def wrapper(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return await function(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:  # noqa: BLE001
            _log.error(
                "%s of inode %s failed: %s at %s",
                function.__name__,
                args[0] if isinstance(args[0], int) else "?",
                type(error).__name__,
                _place(error),
            )
            raise FUSEError(errno.EIO) from None

    return wrapper


def _place(error: BaseException) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "?"
    return f"{traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno}"


def _fail(result: int) -> NoReturn:
    raise FUSEError(-result)


def _time(nanoseconds: int) -> int:
    """Return the nearest time that can be stored: 64 bits of nanoseconds end in 1677 and 2262."""
    return max(-(1 << 63), min(nanoseconds, (1 << 63) - 1))


def _entry(attr: Any) -> EntryAttributes:
    """Return a struct attr as pyfuse3 wants it."""
    entry = EntryAttributes()
    entry.entry_timeout = entry.attr_timeout = TIMEOUT
    entry.st_ino = attr.ino
    entry.st_mode = attr.mode
    entry.st_nlink = attr.nlink
    entry.st_uid = attr.uid
    entry.st_gid = attr.gid
    entry.st_rdev = attr.rdev
    entry.st_size = attr.size
    entry.st_blocks = lib.request_st_blocks(ffi.addressof(attr))
    entry.st_atime_ns = attr.atime
    entry.st_mtime_ns = attr.mtime
    entry.st_ctime_ns = attr.ctime
    return entry


def _no_such_entry() -> EntryAttributes:
    """Return the entry that lets the kernel remember that a name does not exist."""
    entry = EntryAttributes()
    entry.st_ino = InodeT(0)
    entry.entry_timeout = TIMEOUT
    return entry


def _set_caller(request: Any, ctx: RequestContext) -> None:
    request.caller.uid = ctx.uid
    request.caller.gid = ctx.gid
    request.caller.umask = ctx.umask


class Operations(pyfuse3.Operations):
    """The handlers that pyfuse3 calls."""

    supports_dot_lookup = False
    enable_writeback_cache = True
    enable_acl = True

    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self._requests = requests
        self._absent = _no_such_entry()
        self._batch = _FIRST_BATCH

    async def _do(self, request: Any) -> int:
        """Run a request of which only the result matters; raise FUSEError if it failed."""
        result = await self._requests.run(request)
        self._requests.recycle(request)
        return result if result >= 0 else _fail(result)

    async def _attributes(self, request: Any) -> EntryAttributes:
        """Run a request that returns attributes."""
        result = await self._requests.run(request)
        entry = _entry(request.attr) if result >= 0 else None
        self._requests.recycle(request)
        return entry or _fail(result)

    # ---- inodes ----

    @_handler
    async def lookup(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        ctx: RequestContext,  # noqa: ARG002
    ) -> EntryAttributes:
        """Find a name in a directory."""
        request = self._requests.new(lib.REQ_LOOKUP, parent_inode)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        try:
            return await self._attributes(request)
        except FUSEError as error:
            if error.errno == errno.ENOENT:
                return self._absent
            raise

    @_handler
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Drop the kernel's references."""
        for inode, lookups in inode_list:
            self._requests.forget(inode, lookups)

    @_handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:  # noqa: ARG002
        """Return attributes."""
        return await self._attributes(self._requests.new(lib.REQ_GETATTR, inode))

    @_handler
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,  # noqa: ARG002
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Change any of size, mode, owner, group and times, as one request."""
        request = self._requests.new(lib.REQ_SETATTR, inode)
        _set_caller(request, ctx)
        values = request.attr
        valid = 0
        if fields.update_size:
            values.size = attr.st_size
            valid |= lib.SET_SIZE
        if fields.update_mode:
            values.mode = attr.st_mode
            valid |= lib.SET_MODE
        if fields.update_uid:
            values.uid = attr.st_uid
            valid |= lib.SET_UID
        if fields.update_gid:
            values.gid = attr.st_gid
            valid |= lib.SET_GID
        if fields.update_atime:
            values.atime = _time(attr.st_atime_ns)
            valid |= lib.SET_ATIME
        if fields.update_mtime:
            values.mtime = _time(attr.st_mtime_ns)
            valid |= lib.SET_MTIME
        if fields.update_ctime:
            values.ctime = _time(attr.st_ctime_ns)
            valid |= lib.SET_CTIME
        request.valid = valid
        if not valid:
            request.op = lib.REQ_GETATTR
        return await self._attributes(request)

    @_handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:  # noqa: ARG002
        """Return the target of a symbolic link."""
        return FileNameT(await self._bytes(lib.REQ_READLINK, inode, _TARGET_MAX))

    async def _bytes(
        self, op: int, inode: int, room: int, *, name: bytes = b"", uid: int = 0
    ) -> bytes:
        """Run a request that fills a buffer of `room` bytes, for user `uid` if that matters."""
        buffer = new_buffer("char[]", room)
        request = self._requests.new(op, inode)
        request.caller.uid = uid
        request.buffer = buffer
        request.size = room
        if name:
            request.name = ffi.from_buffer(name)
            request.name_len = len(name)
        size = await self._do(request)
        return bytes(ffi.buffer(buffer, size))

    # ---- names ----

    @_handler
    async def mknod(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        rdev: int,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Create a file, FIFO, socket or device."""
        return await self._create(lib.REQ_MKNOD, parent_inode, name, mode, ctx, rdev=rdev)

    @_handler
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a directory."""
        return await self._create(lib.REQ_MKDIR, parent_inode, name, mode, ctx)

    @_handler
    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        """Create a regular file and open it. The kernel holds the directory, so it cannot exist."""
        regular = ModeT(stat.S_IFREG | stat.S_IMODE(mode))
        entry = await self._create(lib.REQ_MKNOD, parent_inode, name, regular, ctx)
        return self._opened(entry.st_ino, flags), entry

    async def _create(
        self,
        op: int,
        parent: InodeT,
        name: FileNameT,
        mode: ModeT,
        ctx: RequestContext,
        *,
        rdev: int = 0,
    ) -> EntryAttributes:
        request = self._requests.new(op, parent)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        request.mode = mode
        request.rdev = rdev
        _set_caller(request, ctx)
        return await self._attributes(request)

    @_handler
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a symbolic link."""
        request = self._requests.new(lib.REQ_SYMLINK, parent_inode)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        request.new_name = ffi.from_buffer(target)
        request.new_name_len = len(target)
        _set_caller(request, ctx)
        return await self._attributes(request)

    @_handler
    async def link(
        self,
        inode: InodeT,
        new_parent_inode: InodeT,
        new_name: FileNameT,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Give an inode another name."""
        request = self._requests.new(lib.REQ_LINK, inode)
        request.new_parent = new_parent_inode
        request.new_name = ffi.from_buffer(new_name)
        request.new_name_len = len(new_name)
        _set_caller(request, ctx)
        return await self._attributes(request)

    @_handler
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a name that is no directory."""
        await self._remove(lib.REQ_UNLINK, parent_inode, name, ctx)

    @_handler
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove an empty directory."""
        await self._remove(lib.REQ_RMDIR, parent_inode, name, ctx)

    async def _remove(self, op: int, parent: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        request = self._requests.new(op, parent)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        _set_caller(request, ctx)
        await self._do(request)

    @_handler
    async def rename(  # noqa: PLR0917
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Rename, replacing or not or exchanging."""
        request = self._requests.new(lib.REQ_RENAME, parent_inode_old)
        request.name = ffi.from_buffer(name_old)
        request.name_len = len(name_old)
        request.new_parent = parent_inode_new
        request.new_name = ffi.from_buffer(name_new)
        request.new_name_len = len(name_new)
        request.flags = flags
        _set_caller(request, ctx)
        await self._do(request)

    # ---- contents ----

    @_handler
    async def open(
        self,
        inode: InodeT,
        flags: FlagT,
        ctx: RequestContext,  # noqa: ARG002
    ) -> FileInfo:
        """Open a file. O_TRUNC arrives as `setattr`, the cache stays valid: nobody else writes."""
        return self._opened(inode, flags)

    def _opened(self, inode: int, flags: int) -> FileInfo:
        handle = inode
        if flags & os.O_ACCMODE != os.O_RDONLY:
            handle |= _WRITER
            self._requests.note_writer(inode, 1)
        return FileInfo(fh=FileHandleT(handle), keep_cache=True)

    @_handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        buffer = new_buffer("char[]", size)
        request = self._requests.new(lib.REQ_READ, fh & _INODE)
        request.offset = off
        request.buffer = buffer
        request.size = size
        count = await self._do(request)
        # pyfuse3 takes any buffer; bytes would cost a copy. The view keeps `buffer` alive.
        view: bytes = ffi.buffer(buffer, count)
        return view

    @_handler
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write all of `buf`."""
        request = self._requests.new(lib.REQ_WRITE, fh & _INODE)
        request.offset = off
        request.buffer = ffi.cast("void *", ffi.from_buffer(buf))
        request.size = len(buf)
        await self._do(request)
        return len(buf)

    @_handler
    async def flush(self, fh: FileHandleT) -> None:  # noqa: ARG002
        """Do nothing at close(): the kernel has written back, and need not ask again."""
        raise FUSEError(errno.ENOSYS)

    @_handler
    async def release(self, fh: FileHandleT) -> None:
        """Close a file."""
        if fh & _WRITER:
            self._requests.note_writer(fh & _INODE, -1)

    @_handler
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Return when a file is durable."""
        request = self._requests.new(lib.REQ_FSYNC, fh & _INODE)
        request.flags = int(datasync)
        await self._do(request)

    # ---- directories ----

    @_handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:  # noqa: ARG002
        """Open a directory: cookies carry all the state there is."""
        return FileHandleT(inode)

    @_handler
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""

    @_handler
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Return when all entries of a directory are durable."""
        request = self._requests.new(lib.REQ_FSYNCDIR, fh)
        request.flags = int(datasync)
        await self._do(request)

    @_handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Report entries, with attributes, until the kernel's buffer is full.

        How many fit is only known by trying. Each entry that is fetched counts as looked up, so
        those that do not fit are forgotten; the size of the batches follows what fitted last.
        """
        cookie = start_id
        total = 0
        while True:
            want = self._batch
            entries = new_buffer("struct ns_dirent[]", want)
            try:
                count = await self._read_entries(fh, cookie, entries, want)
            except FUSEError:
                if total:
                    return  # what was reported counts; the error comes with the next call
                raise
            fitted = self._report(token, entries, count)
            total += fitted
            if fitted < count:
                self._batch = max(_MIN_BATCH, min(total + 1, _MAX_BATCH))
                return
            if count < want:
                return
            cookie = entries[count - 1].cookie

    async def _read_entries(self, inode: int, cookie: int, entries: Any, room: int) -> int:
        request = self._requests.new(lib.REQ_READDIR, inode)
        request.offset = cookie
        request.buffer = entries
        request.size = room
        return await self._do(request)

    def _report(self, token: ReaddirToken, entries: Any, count: int) -> int:
        """Pass on entries; forget those from the first that does not fit; say how many did."""
        fitted = 0
        try:
            while fitted < count:
                entry = entries[fitted]
                name = ffi.buffer(entry.name, entry.name_len)[:]
                if not pyfuse3.readdir_reply(token, name, _entry(entry.attr), entry.cookie):
                    break
                fitted += 1
        finally:
            for entry in entries[fitted:count]:
                if ffi.buffer(entry.name, entry.name_len)[:] not in (b".", b".."):
                    self._requests.forget(entry.attr.ino, 1)
        return fitted

    @_handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:  # noqa: ARG002
        """Return the space there is."""
        request = self._requests.new(lib.REQ_STATFS, pyfuse3.ROOT_INODE)
        result = await self._requests.run(request)
        data = StatvfsData()
        data.f_bsize = data.f_frsize = lib.NODE_SIZE
        data.f_blocks = request.statfs_blocks
        data.f_bfree = data.f_bavail = request.statfs_free
        data.f_files = request.statfs_inodes
        data.f_ffree = data.f_favail = request.statfs_free
        data.f_namemax = lib.NAME_MAX_BYTES
        self._requests.recycle(request)
        return data if result >= 0 else _fail(result)

    # ---- extended attributes ----

    @_handler
    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext
    ) -> None:
        """Create or replace an attribute. pyfuse3 has checked XATTR_CREATE and XATTR_REPLACE."""
        keeps_setgid = name == _ACCESS_ACL and await self._may_keep_setgid(inode, ctx)
        request = self._requests.new(lib.REQ_SETXATTR, inode)
        request.valid = int(keeps_setgid)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        request.buffer = ffi.cast("void *", ffi.from_buffer(value))
        request.size = len(value)
        _set_caller(request, ctx)
        await self._do(request)

    async def _may_keep_setgid(self, inode: InodeT, ctx: RequestContext) -> bool:
        """Say whether the caller is root or in the group of a file; no, if it cannot be known."""
        if ctx.uid == 0:
            return True
        entry = await self._attributes(self._requests.new(lib.REQ_GETATTR, inode))
        if entry.st_gid == ctx.gid:
            return True
        try:
            return entry.st_gid in pyfuse3.get_sup_groups(ctx.pid)
        except (OSError, RuntimeError):
            return False

    @_handler
    async def getxattr(
        self,
        inode: InodeT,
        name: XAttrNameT,
        ctx: RequestContext,  # noqa: ARG002
    ) -> bytes:
        """Return the value of an attribute."""
        return await self._bytes(lib.REQ_GETXATTR, inode, _XATTR_MAX, name=name)

    @_handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """Return the names of all attributes that the caller may see."""
        names = await self._bytes(lib.REQ_LISTXATTR, inode, _XATTR_MAX, uid=ctx.uid)
        return [XAttrNameT(name) for name in names.split(b"\0")[:-1]]

    @_handler
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """Remove an attribute."""
        request = self._requests.new(lib.REQ_REMOVEXATTR, inode)
        request.name = ffi.from_buffer(name)
        request.name_len = len(name)
        _set_caller(request, ctx)
        await self._do(request)
