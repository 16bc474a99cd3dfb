"""The configuration file of a volume: limits of its daemon, and where each one came from.

It lies outside of the volume, because who holds that must not configure the daemon: at the path
given with --config, else in /etc/encfsd, under the name that systemd gives the path of the volume
(`systemd-escape --path`), if there is such a file. For each limit the command line counts before
the file, and the file before what encfsd does by itself.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encfsd import options
from encfsd.errors import ConfigRefused, UsageError, printable

Limit = tuple[int, int]  # soft and hard, as setrlimit(2) takes them

DIRECTORY = Path("/etc/encfsd")
TABLE = "rlimit"
RLIMITS = ("NOFILE", "MEMLOCK", "CORE", "AS", "NPROC")
FREE_LIST = "ENCRYPTED_FILES_FREE_LIST"
COMMAND_LINE, ENVIRONMENT, DEFAULT = "command line", "environment", "default"
INHERITED = "inherited"  # a limit of the process that mounted
_SIZES = ("MEMLOCK", "AS")  # limits that count bytes

_NAMES = (*RLIMITS, FREE_LIST)
_UNLIMITED = "unlimited"
_FEWEST_FILES = 64  # for what the daemon itself has open
# For Argon2id (256 MiB), threads, and the half that `options.largest_free_list` leaves.
_LEAST_SPACE = 1 << 30
_SPACE_BESIDE_FREE_LIST = 512 << 20
_MAX_SIZE = 1 << 16
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Entry:
    """What the file says about one limit. `value` None: pass through what the daemon inherits."""

    value: str | None


@dataclass(frozen=True)
class Config:
    """A configuration file that was read, or none."""

    file: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The limits of a mount. `rlimits`: those to set; the others stay what they are."""

    free_list: int
    rlimits: Mapping[str, Limit]
    origins: Mapping[str, str]
    asked: str = ""  # how messages call the free list; empty if nobody asked for its size

    def soft(self, name: str) -> int:
        """Return the soft limit that will be in effect."""
        return (self.rlimits.get(name) or resource.getrlimit(number_of(name)))[0]


# ---- which file ----


def default_file(source: str) -> Path:
    """Return the path of the configuration of the volume in `source`."""
    return DIRECTORY / f"{_escaped(source)}.toml"


def _escaped(path: str) -> str:
    """Do as `systemd-escape --path`, so that %i of the unit names the same file."""
    name = os.fsencode(os.path.abspath(path).strip("/"))
    if not name:
        return "-"
    text = "".join(
        "-"
        if byte == 0x2F
        else chr(byte)
        if re.match(rb"[A-Za-z0-9:_.]", bytes([byte]))
        else f"\\x{byte:02x}"
        for byte in name
    )
    return "\\x2e" + text[1:] if text.startswith(".") else text


def read(given: str | None, source: str) -> Config:
    """Return the configuration for the volume in `source`: `given`, else the default file.

    Raises ConfigRefused. Without `given` there need not be one.
    """
    if given is not None:
        return _parse(given, _contents(given, source))
    file = str(default_file(source))
    try:
        os.stat(file)
    except OSError:  # also where this user may not look
        return Config()
    return _parse(file, _contents(file, source))


def _contents(file: str, source: str) -> bytes:
    """Return what is in the file, if nobody but this user and root can decide what that is."""
    real, inside = os.path.realpath(file), os.path.realpath(source)
    if os.path.commonpath([real, inside]) == inside:
        raise ConfigRefused(
            file,
            "it lies in the volume",
            "keep it outside: who holds the volume must not configure it",
        )
    for directory in (*Path(os.path.abspath(file)).parents, *Path(real).parents):
        _refuse_unsafe_directory(file, directory)
    try:
        # Not to wait for whoever writes to a FIFO.
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        remedy = "check the path, and that this user may read it"
        raise ConfigRefused(file, error.strerror or str(error), remedy) from None
    try:
        _refuse_unsafe(file, os.fstat(fd))
        data = os.read(fd, _MAX_SIZE + 1)
    finally:
        os.close(fd)
    if len(data) > _MAX_SIZE:
        raise ConfigRefused(file, "larger than 64 KiB", "give a file in TOML")
    return data


def _refuse_unsafe_directory(file: str, directory: Path) -> None:
    """Raise ConfigRefused if others could put another file in the place of this one.

    In a directory like /tmp they cannot: what is there can be replaced by its owner alone.
    """
    try:
        found = directory.stat()
    except OSError:
        return  # opening the file says more
    where = printable(directory)
    if found.st_uid not in (0, os.geteuid()):
        owner = f"it lies below {where}, which belongs to user {found.st_uid}"
        raise ConfigRefused(file, owner, "keep it in a directory of yours or root's")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        others = f"it lies below {where}, where others can write"
        raise ConfigRefused(file, others, f"'chmod go-w {where}', or keep it elsewhere")


def _refuse_unsafe(file: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigRefused(file, "not a regular file", "give a file in TOML")
    if found.st_nlink != 1:
        links = "has several hard links, by which it may lie in the volume"
        raise ConfigRefused(file, links, "remove the others, or copy it")
    if found.st_uid not in (0, os.geteuid()):
        owner = f"it belongs to user {found.st_uid}"
        raise ConfigRefused(file, owner, "it must be yours or root's: 'chown' it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigRefused(file, "others can write to it", "'chmod go-w {thing}'")


# ---- what it says ----


def _parse(file: str, data: bytes) -> Config:
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ConfigRefused(file, "not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused(file, str(error), "correct it: it must be TOML") from None
    for name in tables:
        if name != TABLE:
            raise ConfigRefused(file, f"{name}: unknown; there is only the table [{TABLE}]")
    table = tables.get(TABLE, {})
    if not isinstance(table, dict):
        raise ConfigRefused(file, f"{TABLE}: must be a table, [{TABLE}]")
    entries = {}
    for name, said in table.items():
        try:
            entries[name] = _entry(name, said)
        except UsageError as error:
            raise ConfigRefused(file, f"[{TABLE}] {name}: {error.detail}") from None
    return Config(file, entries)


def _entry(name: str, said: Any) -> Entry:
    """Return what stands behind a name; UsageError, whose detail says what is wrong with it."""
    if name not in _NAMES:
        raise UsageError(name, f"unknown; known are {', '.join(_NAMES)}")
    if isinstance(said, dict):
        if said == {"passthrough": True} and said["passthrough"] is True:
            return Entry(None)
        if set(said) != {"value"}:
            raise UsageError(name, 'must be { value = "…" } or { passthrough = true }')
        said = said["value"]
    if not isinstance(said, str):
        raise UsageError(name, f'must be text: "{said}"' if _is_number(said) else "must be text")
    try:
        _check(name, said)
    except UsageError as error:
        raise UsageError(name, f'"{said}" is {error.detail}') from None
    return Entry(said)


def _check(name: str, said: str) -> None:
    """Raise UsageError if this is no value for `name`."""
    if name == FREE_LIST:
        options.parse_size(said, 0)
        return
    soft, _ = parse_limit(said)
    if name == "NOFILE" and _is_more(_FEWEST_FILES, soft):
        raise UsageError(said, f"too low: the daemon itself needs {_FEWEST_FILES}")
    if name == "AS" and _is_more(_LEAST_SPACE, soft):
        raise UsageError(said, f"too low: the daemon itself needs {_LEAST_SPACE >> 20}M")


def _is_number(said: Any) -> bool:
    return isinstance(said, (int, float)) and not isinstance(said, bool)


def parse_limit(text: str) -> Limit:
    """Return soft and hard limit of ``N``, ``SOFT:HARD`` with K, M, G, T, or ``unlimited``."""
    soft, colon, hard = text.partition(":")
    limits = _number(soft), _number(hard if colon else soft)
    if _is_more(limits[0], limits[1]):
        raise UsageError(text, "not valid: the soft limit exceeds the hard one")
    return limits


def _number(text: str) -> int:
    if text.strip() == _UNLIMITED:
        return resource.RLIM_INFINITY
    wrong = f"not a limit: write it like 65536, 64M, SOFT:HARD or {_UNLIMITED}"
    if "%" in text:
        raise UsageError(text, wrong)
    try:
        number = options.parse_size(text, 0)
    except UsageError:
        raise UsageError(text, wrong) from None
    if number > _LARGEST:
        raise UsageError(text, f"too large: write {_UNLIMITED}")
    return number


def _is_more(one: int, other: int) -> bool:
    if other == resource.RLIM_INFINITY:
        return False
    return one == resource.RLIM_INFINITY or one > other


def format_limit(limit: Limit) -> str:
    """Return a limit as `parse_limit` reads it."""
    soft, hard = (_UNLIMITED if each == resource.RLIM_INFINITY else str(each) for each in limit)
    return soft if soft == hard else f"{soft}:{hard}"


# ---- which of all counts ----


def number_of(name: str) -> int:
    """Return the RLIMIT_* of a limit."""
    number: int = getattr(resource, f"RLIMIT_{name}")
    return number


def resolve(config: Config, free_list: str | None, environment: Mapping[str, str]) -> Limits:
    """Return the limits of a mount; `free_list` is what the command line says, if anything.

    Raises FreeListTooLarge, UsageError if the environment holds no size, or ConfigRefused if AS
    leaves no room for the free list.
    """
    rlimits: dict[str, Limit] = {}
    origins = {}
    for name in RLIMITS:
        entry = config.entries.get(name)
        hard = resource.getrlimit(number_of(name))[1]
        # Each file in use needs a descriptor in `src`; core dumps would hold secrets.
        by_itself = {"NOFILE": (hard, hard), "CORE": (0, 0)}.get(name)
        if entry is not None and entry.value is not None:
            rlimits[name], origins[name] = parse_limit(entry.value), config.file
        elif entry is None and by_itself is not None:
            rlimits[name], origins[name] = by_itself, DEFAULT
        else:
            origins[name] = INHERITED
    text, origins[FREE_LIST], thing = _free_list(config, free_list, environment)
    asked = "" if origins[FREE_LIST] == DEFAULT else f"{thing}={text}"
    size = options.free_list_size(text, thing)
    _refuse_little_space(config, rlimits, size)
    return Limits(size, rlimits, origins, asked)


def _refuse_little_space(config: Config, rlimits: Mapping[str, Limit], free_list: int) -> None:
    """Raise ConfigRefused if the daemon and its free list do not fit in the AS of the file."""
    least = free_list + _SPACE_BESIDE_FREE_LIST
    if "AS" in rlimits and _is_more(least, rlimits["AS"][0]):
        list_size = options.format_size(free_list)
        raise ConfigRefused(
            config.file,
            f"[{TABLE}] AS: too low for a free list of {list_size}",
            f"{-(-least >> 20)}M is the least, or choose a smaller free list",
        )


def _free_list(
    config: Config, option: str | None, environment: Mapping[str, str]
) -> tuple[str, str, str]:
    """Return the size of the free list, its origin, and how messages call it."""
    entry = config.entries.get(FREE_LIST)
    if option is not None:
        return option, COMMAND_LINE, "--free-list"
    if entry is not None and entry.value is not None:
        return entry.value, config.file, f"{config.file}: {FREE_LIST}"
    if entry is not None and FREE_LIST in environment:
        return environment[FREE_LIST], ENVIRONMENT, FREE_LIST
    return options.DEFAULT_FREE_LIST, DEFAULT, "--free-list"


def in_effect(origins: Mapping[str, str], free_list: int) -> dict[str, dict[str, str]]:
    """Return each limit of this process, with its origin, and that of the free list in bytes."""
    values = {name: format_limit(resource.getrlimit(number_of(name))) for name in RLIMITS}
    values[FREE_LIST] = str(free_list)
    return {name: {"value": values[name], "origin": origins[name]} for name in _NAMES}


def planned(limits: Limits) -> dict[str, dict[str, str]]:
    """Return the same for a mount that is not there."""
    shown = in_effect(limits.origins, limits.free_list)
    for name, limit in limits.rlimits.items():
        shown[name]["value"] = format_limit(limit)
    return shown


def table(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the limits for people: name, value, origin."""
    rows = []
    for name, setting in settings.items():
        shown = setting["value"]
        if name in (FREE_LIST, *_SIZES):
            shown = ":".join(
                options.format_size(int(each)) if each.isdecimal() else each
                for each in shown.split(":")
            )
        rows.append(f"  {name:<26} {shown:<22} {setting['origin']}")
    return rows
