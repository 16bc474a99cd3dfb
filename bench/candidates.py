"""Who is measured by `make bench`, and how each makes a volume and serves it in the foreground."""

from __future__ import annotations

import dataclasses
import enum
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from machine import output_of

HERE = Path(__file__).parent
BUILD = HERE.parent / "build-bench"
PASSTHROUGH_SOURCE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")
ENCFSD = (sys.executable, "-m", "encfsd.cli")
SPINNING = (sys.executable, str(HERE / "spinning_daemon.py"))
NO_FAST_PATH = "--no-fast-path"


class Role(enum.Enum):
    """What a candidate is to the comparison."""

    RAW = "raw"  # the backing directory itself
    LIMIT = "limit"  # a FUSE file system that does not encrypt
    OURS = "ours"
    PEER = "peer"


def _nothing(folder: Path) -> None:
    (folder / "src").mkdir()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A file system. Its folder holds src (the backing directory), mnt, home and secret.

    `initialise` makes the volume in a folder that has but a secret; `command` is the daemon, in
    the foreground. Folders are copied between the two, so no path may be kept.
    """

    name: str
    role: Role
    remark: str  # what to know when its figures are read
    initialise: Callable[[Path], None] = _nothing
    command: Callable[[Path], list[str]] | None = None  # None: no daemon
    program: str | None = None
    package: str | None = None
    keeps_mount: bool = False  # mounting takes so long that it is done once

    @property
    def version(self) -> str:
        """The version of the Debian package, if it is one."""
        if self.package is None:
            return ""
        return output_of("dpkg-query", "-W", "-f", "${Version}", self.package)

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return self.program is None or shutil.which(self.program) is not None


def call(command: list[str], folder: Path) -> None:
    """Run a command that makes a volume; a daemon that it leaves behind may keep its output."""
    with (folder / "log").open("ab") as log:
        done = subprocess.run(
            command,
            check=False,
            timeout=120,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} made no volume:\n{(folder / 'log').read_text()}")


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder / "home"),
        "CRYFS_FRONTEND": "noninteractive",
        "CRYFS_NO_UPDATE_CHECK": "true",
    }


def _with_password(folder: Path, *command: str) -> list[str]:
    """Return the command with the secret as its standard input."""
    settings = [f"{name}={value}" for name, value in _environment(folder).items()]
    secret = str(folder / "secret")
    return ["env", *settings, "sh", "-c", 'exec "$@" <"$0"', secret, *command]


# ---- encfsd ----


def _unlock(folder: Path) -> list[str]:
    return [f"--key-file={folder / 'secret'}", f"--state-dir={folder / 'home'}"]


def _encfsd_init(folder: Path) -> None:
    call([*ENCFSD, "init", *_unlock(folder), str(folder / "src")], folder)


def encfsd_command(*options: str, program: tuple[str, ...] = ENCFSD) -> Callable[[Path], list[str]]:
    """Return the `command` of encfsd with some more options."""

    def command(folder: Path) -> list[str]:
        fixed = ["mount", "-f", "--free-list=256M", *options, *_unlock(folder)]
        return [*program, *fixed, str(folder / "src"), str(folder / "mnt")]

    return command


def has_fast_path() -> bool:
    """Whether this revision has one that can be turned off."""
    return NO_FAST_PATH in output_of(*ENCFSD, "mount", "--help")


def encfsd(name: str, *options: str, program: tuple[str, ...] = ENCFSD) -> Candidate:
    """Return encfsd as a candidate."""
    return Candidate(
        name,
        Role.OURS,
        "write-back cache; sets read-ahead and dirty limits of its mount itself; free list of "
        "256 MiB; fsync makes data, metadata and the trusted record durable",
        _encfsd_init,
        encfsd_command(*options, program=program),
    )


# ---- libfuse's passthrough_ll ----


def build_passthrough() -> Path:
    """Compile the distribution's example, optimised."""
    program = BUILD / "passthrough_ll"
    if not PASSTHROUGH_SOURCE.exists():
        raise SystemExit(f"{PASSTHROUGH_SOURCE} is missing: apt-get install libfuse3-dev")
    flags = output_of("pkg-config", "fuse3", "--cflags", "--libs").split()
    subprocess.run(
        ["cc", "-O2", str(PASSTHROUGH_SOURCE), *flags, "-o", str(program)],
        check=True,
        timeout=120,
        stderr=subprocess.DEVNULL,
    )
    return program


def _passthrough_command(folder: Path) -> list[str]:
    options = f"writeback,cache=always,source={folder / 'src'}"
    return [str(BUILD / "passthrough_ll"), "-f", "-o", options, str(folder / "mnt")]


# ---- peers ----


def _gocryptfs_init(folder: Path) -> None:
    _nothing(folder)
    secret = f"-passfile={folder / 'secret'}"
    call(["gocryptfs", "-q", "-init", "-scryptn=10", secret, str(folder / "src")], folder)


def _gocryptfs_command(folder: Path) -> list[str]:
    secret = f"-passfile={folder / 'secret'}"
    return ["gocryptfs", "-q", "-fg", secret, str(folder / "src"), str(folder / "mnt")]


def _securefs_init(folder: Path) -> None:
    _nothing(folder)
    secret = str(folder / "secret")
    call(["securefs", "create", "--keyfile", secret, "-r", "1", str(folder / "src")], folder)


def _securefs_command(folder: Path) -> list[str]:
    secret = str(folder / "secret")
    return ["securefs", "mount", "--keyfile", secret, str(folder / "src"), str(folder / "mnt")]


def _make_by_mounting(command: Callable[[Path], list[str]]) -> Callable[[Path], None]:
    """Some make a volume only when they mount it for the first time."""

    def initialise(folder: Path) -> None:
        _nothing(folder)
        background = [word for word in command(folder) if word != "-f"]
        call(background, folder)
        subprocess.run(["fusermount3", "-u", folder / "mnt"], check=True, timeout=60)

    return initialise


def _encfs_command(folder: Path) -> list[str]:
    places = str(folder / "src"), str(folder / "mnt")
    return _with_password(folder, "encfs", "-f", "-S", "--standard", *places)


def _cryfs_command(folder: Path) -> list[str]:
    return _with_password(folder, "cryfs", "-f", str(folder / "src"), str(folder / "mnt"))


PEERS = (
    Candidate(
        "gocryptfs",
        Role.PEER,
        "no write-back cache: each write is a request; contents authenticated block by block, "
        "files and the tree are not",
        _gocryptfs_init,
        _gocryptfs_command,
        "gocryptfs",
        "gocryptfs",
    ),
    Candidate(
        "securefs",
        Role.PEER,
        "no write-back cache; format 4: contents authenticated block by block, files and the tree "
        "are not",
        _securefs_init,
        _securefs_command,
        "securefs",
        "securefs",
    ),
    Candidate(
        "encfs",
        Role.PEER,
        "standard settings: AES-192-CBC, not authenticated at all; no write-back cache",
        _make_by_mounting(_encfs_command),
        _encfs_command,
        "encfs",
        "encfs",
    ),
    Candidate(
        "cryfs",
        Role.PEER,
        "blocks of 16 KiB, each a file; keeps changes in its own cache; mounting takes 14 s of key "
        "derivation, so where others are mounted anew to make them cold, it is left alone for the "
        "seconds after which its cache lets blocks go",
        _make_by_mounting(_cryfs_command),
        _cryfs_command,
        "cryfs",
        "cryfs",
        keeps_mount=True,
    ),
)


def everybody() -> tuple[list[Candidate], list[Candidate]]:
    """Return who can be measured here, and which peers are missing."""
    ours = [encfsd("encfsd")]
    if has_fast_path():
        ours.append(encfsd(f"encfsd {NO_FAST_PATH}", NO_FAST_PATH))
    build_passthrough()
    limit = Candidate(
        "passthrough_ll",
        Role.LIMIT,
        "write-back cache, cache=always; opens files with the application's flags, so O_DIRECT "
        "reaches the disk; finds inodes in a linked list, so it is slow with many files",
        command=_passthrough_command,
        package="libfuse3-dev",
    )
    raw = Candidate("raw", Role.RAW, "the backing directory itself")
    present = [peer for peer in PEERS if peer.is_installed]
    return [raw, *ours, limit, *present], [peer for peer in PEERS if not peer.is_installed]
