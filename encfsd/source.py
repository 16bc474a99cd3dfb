"""The backing directory: found safe, and locked for as long as somebody uses the volume in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time

from encfsd import volume_header
from encfsd.closing import Closing
from encfsd.errors import (
    BackingGone,
    BackingInsecure,
    NoPermission,
    NotADirectory,
    NotAVolume,
    SourceMissing,
    VolumeExists,
    VolumeInUse,
    VolumeThere,
    from_oserror,
)
from encfsd.private_files import UnsafeFileError, open_private

LOCK = "lock"
_POLL_SECONDS = 0.1


class Source(Closing):
    """An open backing directory; a context manager that unlocks and closes it.

    `path` is what the user called it, for messages; `fd` is the directory.
    """

    def __init__(self, path: str) -> None:
        """Open `path`. Raises BackingGone, BackingInsecure or NoPermission."""
        self.path = path
        self._lock: int | None = None
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            # A symbolic link is a "not a directory" to O_DIRECTORY.
            if os.path.islink(path):
                raise BackingInsecure(path, "it is a symbolic link") from None
            if error.errno == errno.ENOTDIR:
                raise NotAVolume(path, "not a directory") from None
            if error.errno == errno.ENOENT:
                raise SourceMissing(path) from None
            raise from_oserror(path, error) from None
        try:
            self._refuse_unsafe()
        except BaseException:
            os.close(self.fd)
            raise

    def _refuse_unsafe(self) -> None:
        found = os.fstat(self.fd)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BackingInsecure(self.path, f"its mode is {stat.S_IMODE(found.st_mode):04o}")
        if os.geteuid() not in (0, found.st_uid):
            raise NoPermission(self.path, f"it belongs to user {found.st_uid}")

    def close(self) -> None:
        """Give up the lock and the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        os.close(self.fd)

    def lock(self, *, read_only: bool, wait: float = 0.0) -> None:
        """Keep other users of the volume out, or with `read_only` only those that write.

        Waits at most `wait` seconds for one that is just ending, then raises VolumeInUse. Writes
        nothing: `create_lock` has made the file. A snapshot may lack it; nobody else uses that.
        """
        try:
            fd = open_private(self.fd, LOCK, os.O_RDONLY)
        except FileNotFoundError:
            if read_only:
                return
            raise BackingGone(os.path.join(self.path, LOCK)) from None
        except UnsafeFileError as error:
            raise BackingInsecure(os.path.join(self.path, LOCK), str(error)) from None
        except OSError as error:
            raise from_oserror(os.path.join(self.path, LOCK), error) from error
        kind = fcntl.LOCK_SH if read_only else fcntl.LOCK_EX
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise VolumeInUse(self.path) from None
                time.sleep(_POLL_SECONDS)
            else:
                self._lock = fd
                return

    def create_lock(self) -> None:
        """Make the lock file of a new volume."""
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(LOCK, flags, 0o600, dir_fd=self.fd))
        except OSError as error:
            raise from_oserror(os.path.join(self.path, LOCK), error) from error

    def remove_contents(self) -> None:
        """Empty the directory again after a creation that failed. Never fails."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.fd):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, ignore_errors=True, dir_fd=self.fd)
                else:
                    os.unlink(entry.name, dir_fd=self.fd)


def check_new(path: str) -> None:
    """Check that `create` would not refuse `path`, without making anything."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path):
        _open_empty(path).close()
    elif not os.path.lexists(parent):
        raise SourceMissing(parent)
    elif not os.path.isdir(parent):
        raise NotADirectory(parent)


def create(path: str) -> Source:
    """Open an empty directory for a new volume; it is made, with mode 0700, if it is missing.

    Raises VolumeExists if anything is in it, and what `Source` raises.
    """
    check_new(path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise from_oserror(path, error) from None
    return _open_empty(path)


def _open_empty(path: str) -> Source:
    if not os.path.islink(path) and not os.path.isdir(path):
        raise NotADirectory(path)
    source = Source(path)
    found = os.listdir(source.fd)
    if found:
        source.close()
        is_volume = any(name in found for name in volume_header.COPIES)
        raise VolumeThere(path) if is_volume else VolumeExists(path)
    return source
