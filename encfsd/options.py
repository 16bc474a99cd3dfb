"""What a command was told, parsed and frozen: sizes, mount options, settings of a mount.

Everything here is pure but for `memory_limit` and `largest_free_list`, which ask the kernel how
much memory there is.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

from encfsd.errors import FreeListTooLarge, UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?|%)", re.IGNORECASE)
_CGROUPS = Path("/sys/fs/cgroup")


def parse_size(text: str, whole: int) -> int:
    """Return the bytes that `text` means: ``8G``, ``512M``, ``1.5T``, or ``25%`` of `whole`.

    Raises UsageError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(text, "not a size: write it like 512M, 8G or 25%")
    number, unit = Fraction(match[1]), match[2].upper()
    if unit != "%":
        return int(number * _UNITS[unit])
    if number > 100:
        raise UsageError(text, "more than 100 %")
    return int(number * whole / 100)


def format_size(size: int) -> str:
    """Return a size for people: three digits and a binary unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1
    return f"{value:.{digits}f} {unit}"


def memory_limit() -> int:
    """Return how much memory this process may use at most: the machine's or its control group's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, *_control_group_limits(), total)


def _control_group_limits() -> Iterator[int]:
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        if number != "0":
            continue  # version 1 hierarchies
        group = Path(rest.partition(":")[2].lstrip("/"))
        for folder in (group, *group.parents):
            try:
                text = (_CGROUPS / folder / "memory.max").read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)


def free_list_size(text: str, name: str = "--free-list") -> int:
    """Return the bytes of ``NAME=TEXT``; FreeListTooLarge if they cannot all be had."""
    limit = memory_limit()
    try:
        size = parse_size(text, limit)
    except UsageError as error:
        raise UsageError(f"{name}={text}", error.detail) from None
    if size > limit:
        raise FreeListTooLarge(
            f"{name}={text}", f"{format_size(limit)} is all this process may use"
        )
    return size


def largest_free_list(address_space: int) -> int:
    """Return for how much a mount should reserve address space, so that its list can grow.

    Reserving costs nothing but that: as much as the machine has, though a control group may allow
    less now; half of `address_space` (a soft limit as setrlimit(2) takes it) if there is one.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unlimited = address_space == resource.RLIM_INFINITY
    return machine if unlimited else min(machine, address_space // 2)


@dataclass(frozen=True)
class MountFlags:
    """The options behind ``-o``."""

    read_only: bool = False
    noatime: bool = False
    allow_other: bool = False
    noexec: bool = False
    suid: bool = False  # these two only for root, else nosuid and nodev
    dev: bool = False
    fast_path: bool = True  # hot requests are answered by the native transport


# Word -> what it sets. Words that state the default, so that it can be said.
FLAG_WORDS: dict[str, dict[str, bool]] = {
    "ro": {"read_only": True},
    "rw": {"read_only": False},
    "noatime": {"noatime": True},
    "relatime": {"noatime": False},
    "allow_other": {"allow_other": True},
    "noexec": {"noexec": True},
    "exec": {"noexec": False},
    "suid": {"suid": True},
    "nosuid": {"suid": False},
    "dev": {"dev": True},
    "nodev": {"dev": False},
    "fast_path": {"fast_path": True},
    "no_fast_path": {"fast_path": False},
    "defaults": {},
}


def parse_mount_flags(texts: list[str], *, root: bool) -> MountFlags:
    """Return the flags of all ``-o a,b`` on a command line; the last word on a thing counts.

    Raises UsageError for an unknown word, or for suid and dev unless `root`.
    """
    flags = MountFlags()
    for word in (word for text in texts for word in text.split(",") if word):
        if word not in FLAG_WORDS:
            known = ", ".join(FLAG_WORDS)
            raise UsageError(f"-o {word}", f"unknown mount option; known are {known}")
        flags = replace(flags, **FLAG_WORDS[word])
    if (flags.suid or flags.dev) and not root:
        raise UsageError("-o suid,dev", "only root may ask for this")
    return flags


def parse_hex(text: str, size: int, what: str) -> bytes:
    """Return the `size` bytes that `text` spells; UsageError says which option was wrong."""
    try:
        value = bytes.fromhex(text.replace("-", ""))
    except ValueError:
        value = b""
    if len(value) != size:
        raise UsageError(f"{what}={text}", f"expected {2 * size} hexadecimal digits")
    return value


@dataclass(frozen=True)
class VolumeSettings:
    """Which volume, and what to believe about it."""

    source: str
    state_dir: Path
    volume_id: bytes | None = None  # the one it must have
    trust_first: bool = False
    accept_root: bytes | None = None
    crypto: str = "auto"


# As --pool-strategy and --free-list-overflow name them, in the order of the enums of _pool.h.
POOL_STRATEGIES = ("pooling", "pooling-cow", "malloc")
OVERFLOW_POLICIES = ("malloc", "wait", "evict-only")
DEFAULT_STRATEGY = "pooling"  # docs/decisions/0003-node-pool.md
DEFAULT_OVERFLOW = "malloc"


@dataclass(frozen=True)
class FreeListSettings:
    """Memory for nodes: struct pool_options."""

    size: int = 0  # bytes; 0: only the reserve
    max_size: int = 0  # for which address space is reserved
    strategy: str = DEFAULT_STRATEGY
    overflow: str = DEFAULT_OVERFLOW
    prefault: bool = False
    hugepages: bool = False
    lock: bool = False

    def __post_init__(self) -> None:
        if self.lock and self.strategy == "malloc":
            raise UsageError("--free-list-lock", "not with --pool-strategy=malloc")


ONLY_RESERVE = FreeListSettings()


@dataclass(frozen=True)
class MountSettings:
    """Everything the daemon needs beside the secret."""

    volume: VolumeSettings
    mount_point: str
    free_list: FreeListSettings = ONLY_RESERVE
    flags: MountFlags = MountFlags()
    log_file: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)  # of each limit, see config.py


CRYPTO_BACKENDS = ("auto", "openssl", "ipsec-mb")
DEFAULT_FREE_LIST = "5%"

assert {name for words in FLAG_WORDS.values() for name in words} == {  # noqa: S101
    flag.name for flag in fields(MountFlags)
}
