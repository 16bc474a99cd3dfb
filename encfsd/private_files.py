"""Small private files in a directory that somebody else may be able to write to.

Everything is relative to a directory descriptor and one plain name, so that no path is walked
twice. A planted symbolic link, FIFO, device, hard link or bind mount is refused, never followed.
"""

from __future__ import annotations

import contextlib
import os
import stat

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class UnsafeFileError(Exception):
    """The name does not lead to a plain file that only its owner can change; says why."""


def open_private(directory: int, name: str, flags: int) -> int:
    """Open `name` in `directory` and return a descriptor that the caller closes.

    Raises OSError, or UnsafeFileError if it is not a regular file with one link, on the file system
    of the directory, that nobody but its owner can write. `flags` are those of os.open.
    """
    fd = os.open(name, flags | _OPEN_FLAGS, dir_fd=directory)
    try:
        _refuse_unsafe(os.fstat(fd), os.fstat(directory).st_dev)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_unsafe(found: os.stat_result, device: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFileError("not a regular file")
    if found.st_nlink != 1:
        raise UnsafeFileError("has several hard links")
    if found.st_dev != device:
        raise UnsafeFileError("another file system is mounted over it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFileError("others can write to it")


def read_private(directory: int, name: str, limit: int) -> bytes:
    """Return the contents of `name`, at most `limit` bytes. Errors as of `open_private`."""
    fd = open_private(directory, name, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)


def replace_private(directory: int, name: str, data: bytes) -> None:
    """Replace `name` by a new file of mode 0600 that holds `data`; durable on return.

    A crash leaves the old contents or the new ones, and perhaps a file ``name.new``, which the next
    call removes. Raises OSError. Two callers at a time must be kept apart by the volume's lock.
    """
    temporary = name + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(temporary, flags | _OPEN_FLAGS, 0o600, dir_fd=directory)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)
