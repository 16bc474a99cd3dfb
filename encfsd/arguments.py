"""The command line as argparse wants it: every command, option and example. Does nothing itself."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from encfsd import __version__, options
from encfsd.errors import CommandLineRefused

Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line like any other error."""

    def error(self, message: str) -> None:  # type: ignore[override]
        for pattern, words in _WORDS:
            message = re.sub(pattern, words, message)
        raise CommandLineRefused(self.prog, message)

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is unknown here, where the options are known that could have been meant."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(next((each for each in unknown if each.startswith("-")), unknown[0]))
        return found, unknown

    def long_names(self) -> set[str]:
        """Return the names of the options that have a long one, without the dashes."""
        return {name[2:] for name in self._option_string_actions if name.startswith("--")}

    def _refuse(self, unknown: str) -> None:
        if not unknown.startswith("-"):
            raise CommandLineRefused(self.prog, f"{unknown} is one argument too many")
        name = unknown.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, 1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise CommandLineRefused(self.prog, f"{name} is no option of it{hint}")


# What argparse says, and how we say it.
_WORDS = (
    (r"^the following arguments are required: ([^,]*)$", r"\1 is missing"),
    (r"^the following arguments are required: (.*)$", r"\1 are missing"),
    (r"^argument (.*): expected one argument$", r"\1: its value is missing"),
    (r"^argument (.*): not allowed with argument (.*)$", r"\1 cannot be used with \2"),
    (r"^argument (.*): invalid choice: ('.*') \(choose from (.*)\)$", r"\1: \2 is none of \3"),
    (r"^argument ", ""),
)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return seconds


def _slot(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number that 'encfsd key list' shows")
    return int(text)


def _add_secret_options(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    which = "new " if prefix else ""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        f"--{prefix}passphrase-file",
        metavar="FILE",
        help=f"read the {which}passphrase from FILE instead of the terminal",
    )
    group.add_argument(f"--{prefix}key-file", metavar="FILE", help=f"use the {which}key file FILE")


def _add_volume_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="the directory that holds the volume")
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where this machine remembers volumes (root: /var/lib/encfsd, others: "
        "~/.local/state/encfsd)",
    )
    parser.add_argument(
        "--crypto",
        choices=options.CRYPTO_BACKENDS,
        default="auto",
        help="what to seal with (default: the fastest that passes its tests)",
    )


def _add_trust_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--volume-id", metavar="ID", help="refuse any other volume")
    parser.add_argument(
        "--trust-first",
        action="store_true",
        help="believe what is found if this machine knows nothing of the volume yet",
    )
    parser.add_argument(
        "--accept-root", metavar="ID", help="believe exactly this root, whatever is remembered"
    )


def _add_mount_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mount_point", metavar="MNT", help="an empty directory")
    parser.add_argument(
        "--free-list",
        metavar="SIZE",
        help="memory preallocated for nodes: 8G, 512M, 25%%; 0 leaves only the reserve that "
        "commits need (default: what the configuration says, else 5%%)",
    )
    parser.add_argument(
        "--pool-strategy",
        choices=options.POOL_STRATEGIES,
        default=options.DEFAULT_STRATEGY,
        help=f"how this memory comes and goes (default: {options.DEFAULT_STRATEGY})",
    )
    parser.add_argument(
        "--free-list-overflow",
        choices=options.OVERFLOW_POLICIES,
        default=options.DEFAULT_OVERFLOW,
        help="when it is used up: ask malloc, wait for a node, or do without one "
        f"(default: {options.DEFAULT_OVERFLOW})",
    )
    parser.add_argument(
        "--free-list-prefault",
        action="store_true",
        help="have all of it in memory before the mount can be used",
    )
    parser.add_argument(
        "--free-list-hugepages", action="store_true", help="ask the kernel for huge pages for it"
    )
    parser.add_argument("--free-list-lock", action="store_true", help="keep it out of swap")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="where limits are configured (default: /etc/encfsd/NAME.toml if there is one, NAME "
        "being what 'systemd-escape --path SRC' prints)",
    )
    parser.add_argument(
        "-o",
        dest="options",
        action="append",
        default=[],
        metavar="OPTION[,...]",
        help="ro, noatime, relatime, allow_other, noexec, no_fast_path; for root also suid, dev",
    )
    parser.add_argument(
        "--no-fast-path",
        dest="options",
        action="append_const",
        const="no_fast_path",
        help="answer every request through pyfuse3: slower, and without fallocate, O_TMPFILE and "
        "the like; for comparison, and should the fast path misbehave",
    )
    parser.add_argument(
        "-f", "--foreground", action="store_true", help="stay in the foreground, log to stderr"
    )
    parser.add_argument("--log-file", metavar="FILE", help="append the log to FILE")


def mount_options() -> set[str]:
    """Return the names of the options of `encfsd mount` that /etc/fstab may have too."""
    parser = _Parser(add_help=False)
    for add in (_add_volume_options, _add_mount_options, _add_secret_options, _add_trust_options):
        add(parser)
    return parser.long_names() - {"foreground"}


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    run: Command,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


def make_parser(run: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `run` has the function of each command."""
    parser = _Parser(
        prog="encfsd",
        description="An encrypted, authenticated file system in a directory.",
        epilog="examples:\n"
        "  encfsd init /srv/vault\n"
        "  encfsd mount --free-list=2G /srv/vault /mnt\n"
        "  encfsd umount /mnt\n\n"
        "'encfsd COMMAND --help' tells more; encfsd(1) lists the exit codes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"encfsd {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    init = _command(
        commands,
        "init",
        run["init"],
        "create a volume in an empty or new directory",
        "encfsd init /srv/vault\nencfsd init --key-file=/root/vault.key /srv/vault",
    )
    _add_volume_options(init)
    _add_secret_options(init)

    mount = _command(
        commands,
        "mount",
        run["mount"],
        "mount a volume; returns when it can be used",
        "encfsd mount /srv/vault /mnt\n"
        "encfsd mount --free-list=8G -o noatime,allow_other /srv/vault /mnt\n"
        "encfsd mount -f -o ro --passphrase-file=pass /backup/vault /mnt",
    )
    _add_volume_options(mount)
    _add_mount_options(mount)
    _add_secret_options(mount)
    _add_trust_options(mount)

    umount = _command(
        commands,
        "umount",
        run["umount"],
        "unmount; returns when all is durable and the daemon gone",
        "encfsd umount /mnt\nencfsd umount --timeout=600 /mnt",
    )
    umount.add_argument("mount_point", metavar="MNT")
    umount.add_argument(
        "--timeout",
        type=_seconds,
        default=90.0,
        metavar="SECONDS",
        help="how long to wait for the daemon (default: 90)",
    )

    stats = _command(
        commands,
        "stats",
        run["stats"],
        "print the counters of a mount",
        "encfsd stats /mnt\nencfsd stats --json /mnt | jq .pool.tree.misses",
    )
    stats.add_argument("mount_point", metavar="MNT")
    stats.add_argument("--json", action="store_true", help="print JSON")
    stats.set_defaults(timeout=10.0)

    _add_live_commands(commands, run)

    info = _command(
        commands,
        "info",
        run["info"],
        "print what can be known without a secret, and limits with their origins",
        "encfsd info /srv/vault",
    )
    info.add_argument("source", metavar="SRC")
    info.add_argument(
        "--config", metavar="FILE", help="of a volume that is not mounted: where to look for limits"
    )

    verify = _command(
        commands,
        "verify",
        run["verify"],
        "read and authenticate everything; exit code 0 means sound, 60 damaged",
        "encfsd verify /srv/vault\nencfsd verify --passphrase-file=pass /backup/vault",
    )
    _add_volume_options(verify)
    _add_secret_options(verify)
    _add_trust_options(verify)

    _add_key_commands(commands, run)

    passwd = _command(
        commands,
        "passwd",
        run["passwd"],
        "change the passphrase",
        "encfsd passwd /srv/vault",
    )
    _add_volume_options(passwd)
    _add_secret_options(passwd)
    _add_secret_options(passwd, "new-")
    return parser


def _add_live_commands(
    commands: argparse._SubParsersAction[_Parser], run: Mapping[str, Command]
) -> None:
    top = _command(
        commands,
        "top",
        run["top"],
        "watch what a mount is doing; q or Ctrl-C ends it",
        "encfsd top /mnt\nencfsd top --interval=5 /mnt >>log",
    )
    top.add_argument("mount_point", metavar="MNT")
    top.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="how often to look (default: 1)",
    )
    top.set_defaults(timeout=10.0)
    tune = _command(
        commands,
        "tune",
        run["tune"],
        "change a setting of a mount while it is used",
        "encfsd tune /mnt free-list=4G\nencfsd tune /mnt free-list=10%",
    )
    tune.add_argument("mount_point", metavar="MNT")
    tune.add_argument(
        "setting", metavar="free-list=SIZE", help="grows at once; shrinks as nodes are given back"
    )
    tune.set_defaults(timeout=None)


def _add_key_commands(
    commands: argparse._SubParsersAction[_Parser], run: Mapping[str, Command]
) -> None:
    key = commands.add_parser("key", help="list, add and remove what opens a volume")
    verbs = key.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)
    listing = _command(
        verbs, "list", run["key list"], "list the key slots", "encfsd key list /srv/vault"
    )
    listing.add_argument("source", metavar="SRC")
    add = _command(
        verbs,
        "add",
        run["key add"],
        "let another passphrase or key file open the volume",
        "encfsd key add /srv/vault\nencfsd key add --new-key-file=vault.key /srv/vault",
    )
    _add_volume_options(add)
    _add_secret_options(add)
    _add_secret_options(add, "new-")
    remove = _command(
        verbs,
        "remove",
        run["key remove"],
        "remove a key slot",
        "encfsd key list /srv/vault\nencfsd key remove /srv/vault 1",
    )
    _add_volume_options(remove)
    remove.add_argument("slot", metavar="SLOT", type=_slot)
    _add_secret_options(remove)
