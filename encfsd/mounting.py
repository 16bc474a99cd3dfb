"""Mounting and unmounting in the kernel's sense: mount(2) for root, fusermount3 for everybody else.

Whether something is mounted is read from /proc/self/mountinfo, which asks no daemon and so cannot
hang. All functions block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from encfsd.errors import (
    AlreadyMounted,
    FilesOpen,
    MountPointMissing,
    MountPointNoDirectory,
    MountPointNotEmpty,
    NoFuseDevice,
    NoPermission,
    NotMounted,
    from_oserror,
)
from encfsd.native import lib
from encfsd.options import MountFlags

TYPE = "fuse.encfsd"
_AUTOMOUNT = "autofs"  # x-systemd.automount in /etc/fstab: the mount goes above it
DEVICE = "/dev/fuse"
_HELPER = "fusermount3"
_HELPER_MISSING = "not installed; it is in the package fuse3"
_FUSE_CONF = Path("/etc/fuse.conf")
_ALLOW_OTHERS = "as root, add the line 'user_allow_other' to /etc/fuse.conf"

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_NOATIME, _MS_RELATIME = 1024, 1 << 21
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
# The kernel's own values allow one FUSE mount 1 % of the page cache and small read-ahead.
_BDI = Path("/sys/class/bdi")
_BDI_SETTINGS = {"read_ahead_kb": "1024", "strict_limit": "0", "max_ratio": "20"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MountEntry:
    """One line of /proc/self/mountinfo."""

    point: str
    device: str  # major:minor
    type: str
    source: str
    user: int  # who may use a FUSE mount; 0 for other types


def _unescape(field: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(field))
    return os.fsdecode(raw)


def _parse(lines: Iterable[str]) -> list[MountEntry]:
    entries = []
    for line in lines:
        mine, _, rest = line.rstrip("\n").partition(" - ")
        left, right = mine.split(" "), rest.split(" ")
        user = re.search(r"(?:^|,)user_id=(\d+)", right[2])
        entries.append(
            MountEntry(
                _unescape(left[4]),
                left[2],
                right[0],
                _unescape(right[1]),
                int(user[1]) if user else 0,
            )
        )
    return entries


def mounted_at(point: str) -> MountEntry | None:
    """Return what is mounted at `point` (an absolute path without links), the topmost."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mountinfo:
        found = [entry for entry in _parse(mountinfo) if entry.point == point]
    return found[-1] if found else None


def mounted_from(source: str) -> MountEntry | None:
    """Return the mount of the volume in `source`, if this process can see one."""
    wanted = os.path.realpath(source)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mountinfo:
        entries = [entry for entry in _parse(mountinfo) if entry.type == TYPE]
    found = [entry for entry in entries if os.path.realpath(entry.source) == wanted]
    return found[-1] if found else None


def resolve(path: str) -> str:
    """Return the absolute path without links. The last part is not touched: it may be dead."""
    head, tail = os.path.split(os.path.abspath(path))
    if not tail:
        return head
    parent = os.path.realpath(head)
    whole = os.path.join(parent, tail)
    if mounted_at(whole) is None and os.path.islink(whole):
        return os.path.realpath(whole)
    return whole


# Before the mount


def check_mount_point(point: str) -> None:
    """Raise an EncfsdError if this user can mount nothing at `point`; clear a dead mount of ours.

    `point` is a result of `resolve`.
    """
    entry = mounted_at(point)
    automount = entry is not None and entry.type == _AUTOMOUNT
    if entry is not None and not automount:
        _clear_if_dead(entry)
    try:
        if not stat.S_ISDIR(os.lstat(point).st_mode):
            raise MountPointNoDirectory(point)
        # Who lists an automount point waits for the mount that is being made.
        if not automount and os.listdir(point):
            raise MountPointNotEmpty(point)
    except (FileNotFoundError, NotADirectoryError):
        raise MountPointMissing(point) from None
    except PermissionError:
        raise NoPermission(point) from None
    if not os.access(point, os.W_OK):  # fusermount3 insists on it
        raise NoPermission(point, "this user cannot write to it", "use a directory of your own")
    os.close(_open_device())


def check_helper(flags: MountFlags) -> None:
    """Raise NoPermission if fusermount3, which mounts for all but root, is going to refuse."""
    if os.geteuid() == 0:
        return
    if shutil.which(_HELPER) is None:
        raise NoPermission(_HELPER, _HELPER_MISSING)
    if flags.allow_other and not _others_may_be_allowed():
        raise NoPermission("-o allow_other", "not allowed to ordinary users", _ALLOW_OTHERS)


def _others_may_be_allowed() -> bool:
    try:
        lines = _FUSE_CONF.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the helper may read it
    return "user_allow_other" in (line.partition("#")[0].strip() for line in lines)


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        remedy = "as root, let this user read and write {thing}, or pass it into the container"
        raise NoPermission(DEVICE, remedy=remedy) from None
    except FileNotFoundError:
        raise NoFuseDevice(DEVICE) from None
    except OSError as error:
        raise NoFuseDevice(DEVICE, error.strerror or str(error)) from None


def is_dead(point: str) -> bool:
    """Say whether the daemon of a mount is gone. Asks it: stat() may be answered by a cache."""
    try:
        os.statvfs(point)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _clear_if_dead(entry: MountEntry) -> None:
    """Unmount what a crashed daemon of ours left behind; AlreadyMounted if it is anything else."""
    ours = entry.type == TYPE and os.geteuid() in (0, entry.user)
    if not (ours and is_dead(entry.point)):
        raise AlreadyMounted(entry.point)
    _log.warning("%s: clearing a dead mount that a crash left", entry.point)
    unmount(entry.point, lazy=True)
    if mounted_at(entry.point) is not None:
        raise AlreadyMounted(entry.point)


# The mount


def mount(source: str, point: str, flags: MountFlags) -> int:
    """Mount an encfsd file system and return the open /dev/fuse that serves it.

    Permissions are always checked by the kernel. Nothing answers before somebody serves the
    descriptor. Raises NoFuseDevice, NoPermission or BackingFailed.
    """
    if os.geteuid() == 0:
        return _mount_as_root(source, point, flags)
    return _mount_with_helper(source, point, flags)


def _common_options(flags: MountFlags) -> list[str]:
    largest = lib.TRANSPORT_MAX_READ_NATIVE if flags.fast_path else lib.TRANSPORT_MAX_READ
    options = ["default_permissions", f"max_read={largest}"]
    if flags.allow_other:
        options.append("allow_other")
    return options


def _mount_as_root(source: str, point: str, flags: MountFlags) -> int:
    fd = _open_device()
    data = ",".join(
        [
            f"fd={fd}",
            f"rootmode={stat.S_IFDIR:o}",
            f"user_id={os.geteuid()}",
            f"group_id={os.getegid()}",
            *_common_options(flags),
        ]
    )
    bits = _MS_NOATIME if flags.noatime else _MS_RELATIME
    for wanted, bit in (
        (flags.read_only, _MS_RDONLY),
        (not flags.suid, _MS_NOSUID),
        (not flags.dev, _MS_NODEV),
        (flags.noexec, _MS_NOEXEC),
    ):
        bits |= bit if wanted else 0
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mount(
        os.fsencode(source), os.fsencode(point), TYPE.encode(), ctypes.c_ulong(bits), data.encode()
    )
    if result != 0:
        code = ctypes.get_errno()
        os.close(fd)
        if code == errno.ENODEV:
            raise NoFuseDevice(DEVICE, "the kernel does not know FUSE")
        raise from_oserror(point, OSError(code, os.strerror(code)))
    return fd


def _helper_options(source: str, flags: MountFlags) -> str:
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    words = [
        "ro" if flags.read_only else "rw",
        "nosuid",
        "nodev",
        *(["noatime"] if flags.noatime else []),  # the helper does not know "relatime", the default
        *(["noexec"] if flags.noexec else []),
        f"fsname={name}",
        "subtype=encfsd",
        *_common_options(flags),
    ]
    return ",".join(words)


def _mount_with_helper(source: str, point: str, flags: MountFlags) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            result = _run_helper(
                ["-o", _helper_options(source, flags), "--", point], theirs.fileno()
            )
        if result.returncode == 0:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            if fds:
                os.set_inheritable(fds[0], False)
                return fds[0]
    reason = result.stderr.strip().removeprefix("fusermount3: ").splitlines()
    remedy = ""
    if "user_allow_other" in result.stderr:
        remedy = _ALLOW_OTHERS
    raise NoPermission(point, reason[-1] if reason else "fusermount3 failed", remedy)


def _run_helper(arguments: list[str], fd: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run fusermount3. Without a hook before exec subprocess uses vfork: no copy of our memory."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    if fd is not None:
        environment["_FUSE_COMMFD"] = str(fd)
    try:
        return subprocess.run(
            [_HELPER, *arguments],
            env=environment,
            pass_fds=() if fd is None else (fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise NoPermission(_HELPER, _HELPER_MISSING) from None


def tune(point: str) -> str:
    """Raise limits of the mount that INIT cannot; return the command for root that does the rest.

    The command is empty if there is nothing left to do.
    """
    entry = mounted_at(point)
    if entry is None:
        return ""
    folder = _BDI / entry.device
    refused = []
    for name, value in _BDI_SETTINGS.items():
        try:
            if (folder / name).read_text().strip() != value:
                (folder / name).write_text(value)
        except FileNotFoundError:
            continue  # an older kernel, or no /sys here: no command would help
        except OSError:
            refused.append(f"echo {value} >{folder / name}")
    return "; ".join(refused)


# The end


def unmount(point: str, *, lazy: bool = False) -> None:
    """Unmount; with `lazy` even if it is in use, from the tree only.

    Dirty pages are written first, so somebody must serve the mount meanwhile, unless it is dead.
    Raises NotMounted, FilesOpen or NoPermission.
    """
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        how = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if libc.umount2(os.fsencode(point), how) == 0:
            return
        code = ctypes.get_errno()
        if code == errno.EBUSY:
            raise FilesOpen(point)
        if code == errno.EINVAL:
            raise NotMounted(point)
        raise from_oserror(point, OSError(code, os.strerror(code)))
    result = _run_helper(["-u", *(["-z"] if lazy else []), "--", point])
    if result.returncode == 0:
        return
    if "busy" in result.stderr:
        raise FilesOpen(point)
    if mounted_at(point) is None:
        raise NotMounted(point)
    raise NoPermission(point, result.stderr.strip().removeprefix("fusermount3: "))


def write_back(point: str) -> None:
    """Have the kernel hand over all dirty pages of a mount that is going to be cut off."""
    with contextlib.suppress(OSError):
        fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            ctypes.CDLL(None).syncfs(fd)
        finally:
            os.close(fd)
