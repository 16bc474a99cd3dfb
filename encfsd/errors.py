"""Every error that a user of encfsd can meet, with its exit code and its message.

A message always has three parts: the thing it is about, what is wrong with it, and what to do.
The command line prints ``str(error)`` and exits with ``error.exit_code``; nothing else decides
either. `Exit` is the whole table of exit codes; a code is never given a second meaning, but a
subclass may say the same thing in words that fit better.

`UnlockFailed` is special. From the first use of a secret until the header's MAC has been checked,
every failure is this one error with this one message: a distinction would tell whoever can write
to the backing directory which part of a guess was right.
"""

# ruff: noqa: N818  An error is named after what is wrong; "Error" behind each would say nothing.

from __future__ import annotations

import enum
import errno
import os
from typing import ClassVar


class Exit(enum.IntEnum):
    """Exit codes. 0 is success, 1 is what Python itself uses for an unexpected exception."""

    INTERNAL = 1
    USAGE = 2

    # The volume as it lies in the backing directory, before any secret is used.
    NOT_A_VOLUME = 10
    NEWER_FORMAT = 11
    DAMAGED_HEADER = 12
    VOLUME_EXISTS = 13
    WRONG_VOLUME = 14

    # Secrets.
    UNLOCK_FAILED = 20
    SECRET_REFUSED = 21
    KEY_SLOT_REFUSED = 22

    # The mount.
    MOUNT_POINT_MISSING = 30
    MOUNT_POINT_NOT_EMPTY = 31
    ALREADY_MOUNTED = 32
    NOT_MOUNTED = 33
    VOLUME_IN_USE = 34
    NO_FUSE_DEVICE = 35
    NO_PERMISSION = 36
    FREE_LIST_TOO_LARGE = 37
    MEMORY_NOT_LOCKED = 38
    NOT_ENOUGH_MEMORY = 39

    # Directories.
    BACKING_READ_ONLY = 40
    BACKING_GONE = 41
    BACKING_INSECURE = 42
    BACKING_FULL = 43
    BACKING_FAILED = 44
    STATE_UNUSABLE = 45

    # Freshness.
    NO_RECORD = 50
    OLDER_THAN_RECORD = 51
    FORKED_FROM_RECORD = 52
    HEADER_NOT_ACCEPTED = 53

    # Contents.
    DAMAGED_CONTENTS = 60


def printable(thing: object) -> str:
    """Return `thing` as text that is safe on a terminal and in a log: one line, no controls.

    Paths may hold any bytes, so `os.fsdecode`d ones are accepted; what cannot be shown is escaped.
    """
    text = os.fsdecode(thing) if isinstance(thing, (bytes, os.PathLike)) else str(thing)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class EncfsdError(Exception):
    """Base of all user-facing errors: ``thing: what is wrong (detail); what to do``.

    Parameters: `thing` names what the error is about (mostly a path); `detail` narrows down what is
    wrong where the class alone does not say it; `remedy` replaces the advice of the class where
    the detail calls for another. In it, ``{thing}`` stands for the thing.
    """

    exit_code: ClassVar[Exit]
    wrong: str
    remedy: str

    def __init__(self, thing: object, detail: str = "", remedy: str = "") -> None:
        super().__init__(thing, detail)
        self.thing = printable(thing)
        self.detail = printable(detail)
        if remedy:
            self.remedy = remedy

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.thing}: {self.wrong}{detail}; {self.remedy.replace('{thing}', self.thing)}"


class InternalError(EncfsdError):
    """A broken assumption inside encfsd or a broken cryptographic library."""

    exit_code = Exit.INTERNAL
    wrong = "internal error"
    remedy = "this is a defect of encfsd or of a library it uses: please report it"


class OutputFailed(InternalError):
    """What a command has to say cannot be written to standard output."""

    wrong = "cannot be written"
    remedy = "check where it is redirected to; the command itself may have done its work"


class UsageError(EncfsdError):
    """A command line or a configuration that makes no sense."""

    exit_code = Exit.USAGE
    wrong = "not valid"
    remedy = "see 'encfsd --help'"

    def point_to_help_of(self, prog: str) -> None:
        """Name the help of `prog`, like ``encfsd mount``, unless there is better advice."""
        if self.remedy == UsageError.remedy:
            self.remedy = f"see '{prog} --help'"


class CommandLineRefused(UsageError):
    """A command line that the parser of `prog`, like ``encfsd mount``, does not accept."""

    def __init__(self, prog: str, wrong: str) -> None:
        # The program's own name stands before every message.
        super().__init__(prog.partition(" ")[2] or "command line")
        self.wrong = printable(wrong)
        self.remedy = f"see '{prog} --help'"


class ConfigRefused(UsageError):
    """A configuration file that cannot be used: its contents, or who could have written them."""

    wrong = "not usable as configuration"
    remedy = "correct it; encfsd(1) shows what it may say"


# The volume as it lies in the backing directory


class NotAVolume(EncfsdError):
    """The directory holds no volume header at all."""

    exit_code = Exit.NOT_A_VOLUME
    wrong = "not an encfsd volume"
    remedy = "check the path, or create a volume with 'encfsd init'"


class NewerFormat(EncfsdError):
    """The header is of a format that this program does not know."""

    exit_code = Exit.NEWER_FORMAT
    wrong = "made by a newer version of encfsd"
    remedy = "install a version that knows this format"


class DamagedHeader(EncfsdError):
    """A copy of the header cannot be parsed (seen without any secret); fatal if neither can."""

    exit_code = Exit.DAMAGED_HEADER
    wrong = "volume header damaged"
    remedy = (
        "a read-write mount repairs it from the other copy; "
        "if both are damaged, restore one from a backup"
    )


class VolumeExists(EncfsdError):
    """`init` was pointed at a directory that is in use already."""

    exit_code = Exit.VOLUME_EXISTS
    wrong = "not empty"
    remedy = "choose a new or empty directory"


class VolumeThere(VolumeExists):
    """`init` was pointed at a volume."""

    wrong = "holds a volume already"
    remedy = "mount it with 'encfsd mount', or choose a new or empty directory for another"


class NotADirectory(VolumeExists):
    """`init` was pointed at something that cannot hold a volume."""

    wrong = "not a directory"


class WrongVolume(EncfsdError):
    """The volume id differs from the pinned one."""

    exit_code = Exit.WRONG_VOLUME
    wrong = "holds another volume than the one asked for"
    remedy = "check --volume-id and the path: somebody may have swapped two volumes"


# Secrets


class UnlockFailed(EncfsdError):
    """Every failure from the first use of a secret until the header MAC is checked.

    Takes no detail on purpose. Raise it ``from None``, so that no traceback carries the cause.
    """

    exit_code = Exit.UNLOCK_FAILED
    wrong = "cannot be unlocked"
    remedy = (
        "the passphrase or key file is not the right one, or the volume header was changed: "
        "try again, or restore volume.header from a backup"
    )

    def __init__(self, thing: object) -> None:
        super().__init__(thing)


class SecretRefused(EncfsdError):
    """A passphrase or key file that cannot be used, seen before it is tried."""

    exit_code = Exit.SECRET_REFUSED
    wrong = "not usable as a secret"
    remedy = "give a passphrase of 1 to 1024 bytes or a key file of 32 to 1024 random bytes"


class KeySlotRefused(EncfsdError):
    """A change of the key slots that would be impossible or would lock everybody out."""

    exit_code = Exit.KEY_SLOT_REFUSED
    wrong = "key slot cannot be changed"
    remedy = "see 'encfsd key list'"


# The mount


class MountPointMissing(EncfsdError):
    """The mount point does not exist or is no directory."""

    exit_code = Exit.MOUNT_POINT_MISSING
    wrong = "mount point is missing or not a directory"
    remedy = "create it with 'mkdir -p {thing}'"


class MountPointNoDirectory(MountPointMissing):
    """The mount point exists, but is no directory."""

    wrong = "mount point is not a directory"
    remedy = "choose an empty directory"


class MountPointNotEmpty(EncfsdError):
    """The mount point has entries that the mount would hide."""

    exit_code = Exit.MOUNT_POINT_NOT_EMPTY
    wrong = "mount point is not empty"
    remedy = "choose an empty directory"


class AlreadyMounted(EncfsdError):
    """Something is mounted on the mount point already."""

    exit_code = Exit.ALREADY_MOUNTED
    wrong = "already mounted"
    remedy = "unmount it with 'encfsd umount {thing}' or choose another directory"


class NotMounted(EncfsdError):
    """A command that needs a mounted volume found none."""

    exit_code = Exit.NOT_MOUNTED
    wrong = "no encfsd volume is mounted here"
    remedy = "check the path with 'findmnt'"


class DaemonGone(NotMounted):
    """The mount is still in the tree, but the daemon that served it has died."""

    wrong = "its daemon is gone"
    remedy = "'encfsd umount {thing}' clears it"


class VolumeInUse(EncfsdError):
    """Another process holds the lock of the backing directory, or writes to it without one."""

    exit_code = Exit.VOLUME_IN_USE
    wrong = "volume is in use by another process"
    remedy = "unmount it there first"


class MountedElsewhere(VolumeInUse):
    """The volume is in use by a mount that is there and lives."""

    wrong = "mounted at"

    def __init__(self, thing: object, point: object) -> None:
        super().__init__(thing)
        self.wrong = f"mounted at {printable(point)}"
        self.remedy = f"unmount it with 'encfsd umount {printable(point)}'"


class FilesOpen(VolumeInUse):
    """A mount cannot be unmounted while files on it are open."""

    wrong = "files on it are open"
    remedy = "close them ('fuser -vm {thing}' shows who)"


class NotFinished(VolumeInUse):
    """Unmounted, but nobody has said yet that all changes are durable."""

    wrong = "unmounted, but not known to be durable yet"
    remedy = "wait until its daemon has ended; its log says how"


class NoFuseDevice(EncfsdError):
    """The kernel's FUSE device is missing."""

    exit_code = Exit.NO_FUSE_DEVICE
    wrong = "FUSE device is not available"
    remedy = "load it with 'modprobe fuse', or pass /dev/fuse into the container"


class NoPermission(EncfsdError):
    """The operating system refused something that encfsd needs."""

    exit_code = Exit.NO_PERMISSION
    wrong = "permission denied"
    remedy = "change owner or mode of it, or run as another user"


class LogFileRefused(NoPermission):
    """The log file cannot be opened."""

    wrong = "log file cannot be opened"
    remedy = "choose a file in a directory that exists and that this user can write to"


class FreeListTooLarge(EncfsdError):
    """More memory asked for than the machine or the control group has."""

    exit_code = Exit.FREE_LIST_TOO_LARGE
    wrong = "free list is larger than the memory available"
    remedy = "choose a smaller --free-list"


class MemoryNotLocked(EncfsdError):
    """Memory for keys could not be locked."""

    exit_code = Exit.MEMORY_NOT_LOCKED
    wrong = "memory cannot be locked"
    remedy = "raise the limit with 'ulimit -l' or LimitMEMLOCK= in the unit"


class NotEnoughMemory(EncfsdError):
    """Key derivation needs more memory than there is; seen before a secret is used."""

    exit_code = Exit.NOT_ENOUGH_MEMORY
    wrong = "not enough memory to derive the key"
    remedy = "free some memory, or raise the limit of the control group"


# Directories


class BackingReadOnly(EncfsdError):
    """The backing directory lies on a read-only file system."""

    exit_code = Exit.BACKING_READ_ONLY
    wrong = "backing directory is read-only"
    remedy = "mount the volume with '-o ro', or make the directory writable"


class BackingGone(EncfsdError):
    """The backing directory, or a part of it that must exist, is missing."""

    exit_code = Exit.BACKING_GONE
    wrong = "backing directory or a part of it is missing"
    remedy = "check that its file system is mounted"


class SourceMissing(BackingGone):
    """There is nothing at the path that was given as the backing directory."""

    wrong = "does not exist"
    remedy = "check the path, and that its file system is mounted"


class BackingInsecure(EncfsdError):
    """Others could write to the backing directory, or an entry is not a plain private file."""

    exit_code = Exit.BACKING_INSECURE
    wrong = "not safe to use as a backing directory"
    remedy = (
        "it must be a real directory, no symbolic link, that only its owner can write: "
        "'chmod go-w {thing}'"
    )


class BackingFull(EncfsdError):
    """No space left where the volume lies."""

    exit_code = Exit.BACKING_FULL
    wrong = "no space left in the backing directory"
    remedy = "free some space there"


class BackingFailed(EncfsdError):
    """The operating system reported an error that has no class of its own."""

    exit_code = Exit.BACKING_FAILED
    wrong = "cannot be read or written"
    remedy = "see the system log for errors of the disk or of the file system"


class StateUnusable(EncfsdError):
    """The trusted state directory cannot be trusted or cannot be used."""

    exit_code = Exit.STATE_UNUSABLE
    wrong = "not usable as the trusted state directory"
    remedy = "it must be a directory of your own with mode 0700; choose one with --state-dir"


# Freshness: what this machine remembers of the volume against what it found


class NoRecord(EncfsdError):
    """This machine has no valid record of the volume; `found` is the root id (32 bytes)."""

    exit_code = Exit.NO_RECORD
    wrong = "this machine has no valid freshness record of this volume"

    def __init__(self, thing: object, found: bytes, state_dir: object = "") -> None:
        where = f"in the state directory {printable(state_dir)}" if state_dir else ""
        super().__init__(thing, where)
        self.found = found
        self.remedy = (
            "if this machine keeps it elsewhere, name that with --state-dir; only if you know that "
            "it is the newest state, accept it with --trust-first "
            f"or --accept-root={found.hex()}"
        )


class StaleRoot(EncfsdError):
    """Common part of the two refusals that compare a remembered root with the one found."""

    def __init__(self, thing: object, remembered: str, found: str, found_id: bytes) -> None:
        super().__init__(thing, f"remembered {remembered}, found {found}")
        self.found = found_id
        self.remedy = (
            "restore the newest state of the backing directory, or, if you did this yourself, "
            f"accept the found root with --accept-root={found_id.hex()}"
        )


class OlderThanRecord(StaleRoot):
    """The volume was rolled back."""

    exit_code = Exit.OLDER_THAN_RECORD
    wrong = "volume is older than this machine remembers"


class ForkedFromRecord(StaleRoot):
    """The volume was changed elsewhere, from an older state than the one remembered."""

    exit_code = Exit.FORKED_FROM_RECORD
    wrong = "volume is not a continuation of what this machine remembers"


class HeaderNotAccepted(EncfsdError):
    """The header is authentic, but not the one that the volume's metadata names."""

    exit_code = Exit.HEADER_NOT_ACCEPTED
    wrong = "volume header is an old copy"
    remedy = "restore the newest volume.header"


# Contents


class DamagedContents(EncfsdError):
    """`verify` found objects that do not authenticate."""

    exit_code = Exit.DAMAGED_CONTENTS
    wrong = "contents damaged"
    remedy = "restore the listed files from a backup"


class RootNotFound(DamagedContents):
    """--accept-root names a root that is not there; `found` is the id of the newest (32 bytes)."""

    wrong = "the root given with --accept-root is not in it, or it is damaged"

    def __init__(self, thing: object, found: bytes) -> None:
        super().__init__(thing)
        self.found = found
        self.remedy = (
            "check the ID; if the newest root found is the one you mean, "
            f"accept it with --accept-root={found.hex()}"
        )


def from_oserror(thing: object, error: OSError) -> EncfsdError:
    """Return the error that stands for `error`, met while working on `thing` of a volume."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return BackingGone(thing)
    if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
        return BackingInsecure(thing, os.strerror(error.errno))
    if error.errno == errno.EROFS:
        return BackingReadOnly(thing)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BackingFull(thing)
    if error.errno in (errno.EACCES, errno.EPERM):
        return NoPermission(thing)
    return BackingFailed(thing, error.strerror or str(error))
