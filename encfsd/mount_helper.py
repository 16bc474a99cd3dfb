"""What mount(8) and umount(8) run for this type of file system, so that /etc/fstab can name it.

Both hand over their arguments as their manuals describe under "External helpers". They are
translated into a command line of encfsd, and its exit code into one of theirs. mount(8) looks for
the type in fstab, ``mount.encfsd``; umount(8) for the one that the kernel shows,
``umount.fuse.encfsd``, without which it would not wait for the last commit.
"""

from __future__ import annotations

import getopt
import os
import re
import sys
from collections.abc import Callable, Sequence

from encfsd import arguments, cli, options
from encfsd.errors import Exit, UsageError

# Exit codes of mount(8) and umount(8); whatever is not in the table is a failure.
_FAILURE = 32
_STATUS = {
    0: 0,
    Exit.USAGE: 1,
    Exit.NO_PERMISSION: 1,
    Exit.NOT_ENOUGH_MEMORY: 2,
    Exit.INTERNAL: 4,
    cli.INTERRUPTED: 8,
}

# Options that mount(8), its callers or people act upon.
_FOR_OTHERS = {
    *("auto", "noauto", "nofail", "_netdev", "comment", "async"),
    *("user", "nouser", "users", "owner", "noowner", "group", "nogroup"),
}


def mount() -> int:
    """Be mount.encfsd. Returns when MNT can be used."""
    return _run(_mount, "mount.encfsd", "SRC MNT [-sfnv] [-o OPTION[,...]] [-t TYPE]")


def umount() -> int:
    """Be umount.fuse.encfsd. Returns when all is durable."""
    return _run(_umount, "umount.fuse.encfsd", "MNT [-flnrv] [-t TYPE]")


def _run(helper: Callable[[list[str]], int], name: str, words: str) -> int:
    usage = f"usage: {name} {words}\n"
    given = sys.argv[1:]
    if not given:
        sys.stderr.write(usage)
        return _STATUS[Exit.USAGE]
    if given[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0

    def run() -> int:
        with cli.help_of(name):
            return helper(given)

    code = cli.outcome(run)
    return _STATUS.get(code, _FAILURE)


def _mount(given: list[str]) -> int:
    words, (source, point) = _parse(given, "sfnvo:t:", ("SRC", "MNT"))
    texts = [value for name, value in words if name == "-o"]
    names = {name for name, _ in words}
    command = command_line(source, point, texts, sloppy="-s" in names)
    if "-f" in names:
        cli.make_parser().parse_args(command)
        return 0
    return cli.main(command)


def _umount(given: list[str]) -> int:
    words, (point,) = _parse(given, "flnrvt:", ("MNT",))
    names = [name for name, _ in words if name in ("-f", "-l", "-r")]
    if names:  # not to wait, or for something else: what umount does without a helper
        os.execvp("umount", ["umount", "-i", *names, "--", point])  # noqa: S606
    return cli.main(["umount", "--", point])


def _parse(
    given: list[str], letters: str, wanted: Sequence[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        words, paths = getopt.gnu_getopt(given, letters)
    except getopt.GetoptError as error:
        raise UsageError(f"-{error.opt}", error.msg) from None
    if len(paths) != len(wanted):
        raise UsageError(" ".join(paths) or "arguments", f"expected {' '.join(wanted)}")
    return words, paths


def command_line(source: str, point: str, texts: Sequence[str], *, sloppy: bool) -> list[str]:
    """Return the command line of encfsd for a mount with the options in `texts`.

    Raises UsageError for an option that encfsd does not have, unless `sloppy`. It names the option
    without its value, which might be a secret that belongs in no log.
    """
    flags, others = [], []
    ours = arguments.mount_options()
    for name, value in (option for text in texts for option in _split(text)):
        if name in _FOR_OTHERS or name.startswith(("x-", "X-")):
            continue
        if name == "remount":
            remedy = "unmount it and mount it with the other options"
            raise UsageError(point, "a mount cannot be changed by remounting", remedy)
        if name in options.FLAG_WORDS and value is None:
            flags.append(name)
        elif name in ours:
            others.append(f"--{name}" if value is None else f"--{name}={value}")
        elif not sloppy:
            remedy = (
                "there are the options of 'encfsd mount', without '--', and the words behind "
                "its -o; a secret is never an option: give passphrase-file=FILE or key-file=FILE"
            )
            raise UsageError(f"-o {name}", "unknown mount option", remedy)
    words = ["-o", ",".join(flags)] if flags else []
    return ["mount", *words, *others, "--", source, point]


def _split(text: str) -> list[tuple[str, str | None]]:
    """Return name and value of each option; a comma within double quotes separates nothing."""
    found: list[tuple[str, str | None]] = []
    for option in re.findall(r'(?:"[^"]*"|[^,])+', text):
        name, equals, value = option.partition("=")
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        found.append((name, value if equals else None))
    return found
