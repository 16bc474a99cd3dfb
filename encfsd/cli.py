"""The commands: one function each, arguments (see arguments.py) in, EncfsdError out.

`main` is the only place that turns an error into a message and an exit code. `mount` imports the
daemon late, so that the other commands start without pyfuse3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from encfsd import (
    arguments,
    config,
    control,
    keys,
    mounting,
    options,
    process,
    secrets_input,
    state,
    top,
    tune,
    volume,
    volume_header,
)
from encfsd.config import Limits
from encfsd.control import Client, Json, run_directory
from encfsd.errors import (
    DaemonGone,
    DamagedContents,
    EncfsdError,
    Exit,
    KeySlotRefused,
    MountedElsewhere,
    NoPermission,
    NotFinished,
    NotMounted,
    OutputFailed,
    UsageError,
    VolumeInUse,
    printable,
)
from encfsd.keys import Secret, SecretKind, SlotType, VolumeKey
from encfsd.options import FreeListSettings, MountSettings, VolumeSettings
from encfsd.progress import Progress
from encfsd.source import Source, check_new
from encfsd.stats import table
from encfsd.volume_header import Header

INTERRUPTED = 130  # 128 + SIGINT, as shells count

_log = logging.getLogger(__name__)


# ---- output ----


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    """Turn what standard output refuses into one line; a reader who has gone wants none."""
    try:
        yield
    except OSError as error:
        # What is left in the buffer would fail again when Python ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(Exit.INTERNAL) from None
        raise OutputFailed("standard output", error.strerror or str(error)) from None


def _print(text: str) -> None:
    with _standard_output():
        print(text)


def _print_now(text: str) -> None:
    with _standard_output():
        print(text, flush=True)


def _tell(text: str) -> None:
    """Print something that is not the result of the command."""
    print(f"encfsd: {text}", file=sys.stderr)


# ---- secrets and settings ----


def _secret(args: argparse.Namespace, prompt: str, *, twice: bool = False) -> Secret:
    """Return the secret that the options name, or ask for one."""
    if args.key_file is not None:
        return secrets_input.from_key_file(args.key_file)
    if args.passphrase_file is not None:
        return secrets_input.from_passphrase_file(args.passphrase_file)
    return secrets_input.from_terminal(prompt, twice=twice)


def _new_secret(args: argparse.Namespace) -> Secret:
    if args.new_key_file is not None:
        return secrets_input.from_key_file(args.new_key_file)
    if args.new_passphrase_file is not None:
        return secrets_input.from_passphrase_file(args.new_passphrase_file)
    return secrets_input.from_terminal(
        "New passphrase", twice=True, instead=secrets_input.NEW_OPTIONS
    )


def _tell_if_text(key_file: str | None, secret: Secret) -> None:
    """Tell the user, who wanted a key file, that a slot of the other type is made."""
    if key_file is not None and secret.kind is SecretKind.PASSPHRASE:
        _log.warning(
            "%s: the key file is text, so it is treated as a passphrase", printable(key_file)
        )


def _slot_type(secret: Secret) -> SlotType:
    return SlotType.PASSPHRASE if secret.kind is SecretKind.PASSPHRASE else SlotType.KEY_FILE


def _volume_settings(args: argparse.Namespace) -> VolumeSettings:
    """Return the settings of a command that opens a volume."""
    pinned = getattr(args, "volume_id", None)
    accepted = getattr(args, "accept_root", None)
    return VolumeSettings(
        source=args.source,
        state_dir=Path(args.state_dir) if args.state_dir else state.default_directory(),
        volume_id=options.parse_hex(pinned, 16, "--volume-id") if pinned else None,
        trust_first=getattr(args, "trust_first", False),
        accept_root=options.parse_hex(accepted, 32, "--accept-root") if accepted else None,
        crypto=args.crypto,
    )


def _prepare(args: argparse.Namespace) -> str:
    """Make this process fit for secrets; return what was chosen to seal with."""
    process.protect_secrets()
    return _set_up_crypto(args)


def _set_up_crypto(args: argparse.Namespace) -> str:
    keys.self_test()
    return volume.setup_crypto(args.crypto)


def _lock(source: Source, *, read_only: bool) -> None:
    """Lock the volume. Of a mount that may be just ending, wait for the end, and say so."""
    try:
        source.lock(read_only=read_only)
    except VolumeInUse:
        point = _live_mount_of(source.path)
        if point is not None:
            raise MountedElsewhere(source.path, point) from None
        seconds = f"{volume.CLOSING_SECONDS:g}"
        _tell(
            f"{printable(source.path)}: in use; waiting up to {seconds} s, in case a mount is just "
            "ending"
        )
        source.lock(read_only=read_only, wait=volume.CLOSING_SECONDS)


def _live_mount_of(source: str) -> str | None:
    """Return where the volume in `source` is mounted, if its daemon lives; asks it nothing."""
    entry = mounting.mounted_from(source)
    if entry is None:
        return None
    try:
        with Client(entry.point):
            return entry.point
    except NoPermission:  # another user's
        return entry.point
    except NotMounted:
        return None


def _check_source(settings: VolumeSettings, *, read_only: bool, tell: bool = False) -> Header:
    """Check of a volume what needs no secret, before the user is asked for one.

    `tell`: log what is wrong with a header copy, because who opens the volume logs elsewhere.
    """
    with Source(settings.source) as source:
        copies = volume.read_headers(source, settings, tell=tell)
        _lock(source, read_only=read_only)
    return copies.newest_first()[0]


def _check_mount_point(settings: MountSettings) -> None:
    """Check what mounting needs; of a dead mount there, remove the socket too."""
    point = settings.mount_point
    if os.path.realpath(settings.volume.source) == point:
        raise UsageError(point, "SRC and MNT are the same", "mount it on another, empty directory")
    dead = mounting.mounted_at(point)
    mounting.check_mount_point(point)
    if dead is not None:
        control.remove_stale_socket(point, dead.user)
    mounting.check_helper(settings.flags)


def _check_run_directory() -> None:
    """Make the directory of the control socket, which the daemon will need."""
    directory = run_directory(os.geteuid())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        remedy = "set XDG_RUNTIME_DIR to a directory of your own, or log in"
        raise NoPermission(directory, "no place for the control socket", remedy) from None


# ---- commands ----


def _init(args: argparse.Namespace) -> int:
    check_new(args.source)
    _prepare(args)
    with _secret(args, "New passphrase", twice=True) as secret:
        header = volume.create(_volume_settings(args), secret, _slot_type(secret))
        _tell_if_text(args.key_file, secret)
    _print(f"created volume {header.volume_id.hex()} in {printable(args.source)}")
    return 0


def _mount(args: argparse.Namespace) -> int:
    from encfsd.daemon import Daemon  # noqa: PLC0415
    from encfsd.systemd import Notifier  # noqa: PLC0415

    limits = config.resolve(config.read(args.config, args.source), args.free_list, os.environ)
    if limits.asked:  # the default may be less on a small machine
        volume.refuse_small_free_list(limits.free_list, limits.asked)
    settings = MountSettings(
        volume=_volume_settings(args),
        mount_point=mounting.resolve(args.mount_point),
        free_list=_free_list_settings(args, limits),
        flags=options.parse_mount_flags(args.options, root=os.geteuid() == 0),
        log_file=args.log_file,
        origins=limits.origins,
    )
    # What needs no secret is checked first, and where the user sees it.
    _check_mount_point(settings)
    _check_run_directory()
    if settings.log_file is not None:
        os.close(process.open_log(settings.log_file))
    _check_source(settings.volume, read_only=settings.flags.read_only, tell=True)
    process.set_limits(limits.rlimits)
    process.protect_secrets(core=None)
    secret = _secret(args, "Passphrase")
    settings = _absolute(settings)
    report: process.Report = process.report_nothing
    if not args.foreground:
        started = process.go_to_background()
        if isinstance(started, int):
            secret.data.wipe()
            return started
        report = started
    log_is_stderr = True
    try:
        with (
            help_of(args.prog),
            secret,
            Source(settings.volume.source) as source,
            Notifier() as notifier,
        ):
            log_is_stderr = process.log_to(settings.log_file, background=not args.foreground)
            _log.info("%s", _set_up_crypto(args))
            _lock(source, read_only=settings.flags.read_only)
            failure = trio.run(Daemon(settings, report, notifier).run, source, secret)
    except EncfsdError as error:
        failure = error
    if failure is None:
        return 0
    if not log_is_stderr:
        _log.error("%s", failure)
    report(failure)
    raise failure


def _free_list_settings(args: argparse.Namespace, limits: Limits) -> FreeListSettings:
    return FreeListSettings(
        size=limits.free_list,
        max_size=options.largest_free_list(limits.soft("AS")),
        strategy=args.pool_strategy,
        overflow=args.free_list_overflow,
        prefault=args.free_list_prefault,
        hugepages=args.free_list_hugepages,
        lock=args.free_list_lock,
    )


def _absolute(settings: MountSettings) -> MountSettings:
    """Make paths independent of the working directory, which a daemon leaves."""
    inner = replace(
        settings.volume,
        source=os.path.abspath(settings.volume.source),
        state_dir=settings.volume.state_dir.absolute(),
    )
    log_file = os.path.abspath(settings.log_file) if settings.log_file else None
    return replace(settings, volume=inner, log_file=log_file)


def _umount(args: argparse.Namespace) -> int:
    point = mounting.resolve(args.mount_point)
    entry = mounting.mounted_at(point)
    if entry is not None and entry.type != mounting.TYPE:
        raise NotMounted(point, f"what is mounted there is {entry.type}")
    deadline = time.monotonic() + args.timeout
    try:
        client = Client(point)
    except NotMounted:
        if entry is None:
            control.remove_stale_socket(point, os.geteuid())
            raise
        return _umount_without_daemon(entry)
    with client, _understood(point):
        client.send("wait")
        if entry is not None:
            mounting.unmount(point)
        try:
            answer = client.receive(max(0.1, deadline - time.monotonic()))
        except TimeoutError:
            raise NotFinished(point, "its daemon is still working") from None
        if not client.wait_for_exit(deadline - time.monotonic()):
            raise NotFinished(point, "its daemon has not ended")
        if answer is None:
            _tell(f"{printable(point)}: the daemon died before it was done")
            return Exit.INTERNAL
        if answer["exit_code"]:
            _tell(answer["message"])
        return int(answer["exit_code"])


def _umount_without_daemon(entry: mounting.MountEntry) -> int:
    """Clear a dead mount. One whose daemon lives, but not for us, is unmounted like any other."""
    dead = mounting.is_dead(entry.point)
    mounting.unmount(entry.point, lazy=dead)
    if not dead:
        raise NotFinished(entry.point, "its daemon cannot be asked")
    control.remove_stale_socket(entry.point, entry.user)
    return 0


@contextlib.contextmanager
def _connected(point: str) -> Iterator[Client]:
    """Connect to the daemon of what is mounted at `point`; NotMounted says why not.

    Answers are to be used within the block.
    """
    entry = mounting.mounted_at(point)
    if entry is None:
        raise NotMounted(point)
    try:
        client = Client(point)
    except NotMounted:
        if entry.type == mounting.TYPE and mounting.is_dead(point):
            raise DaemonGone(point) from None
        raise
    with client, _understood(point):
        yield client


@contextlib.contextmanager
def _understood(point: str) -> Iterator[None]:
    """Raise NotMounted if answers are not what was asked for: another user's daemon may lie."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise NotMounted(point, "its daemon does not answer as this version does") from None


def _ask(client: Client, point: str, timeout: float | None, command: str, **arguments: str) -> Json:
    """Return the answer of a daemon, or raise NotMounted if it has none to give."""
    try:
        client.send(command, **arguments)
        answer = client.receive(timeout)
    except BrokenPipeError:
        answer = None
    except TimeoutError:
        raise NotMounted(point, "its daemon does not answer") from None
    if answer is None or "error" in answer:
        if answer is None and mounting.mounted_at(point) is not None and mounting.is_dead(point):
            raise DaemonGone(point)
        raise NotMounted(point, "it is being unmounted")
    return answer


def _stats(args: argparse.Namespace) -> int:
    point = mounting.resolve(args.mount_point)
    with _connected(point) as client:
        answer = _ask(client, point, args.timeout, "stats")
        text = json.dumps(answer, indent=2) if args.json else table(answer)
    _print(text)
    return 0


def _top(args: argparse.Namespace) -> int:
    if not 0.05 <= args.interval <= 3600:
        raise UsageError(f"--interval={args.interval:g}", "not between 0.05 and 3600 seconds")
    point = mounting.resolve(args.mount_point)
    with _connected(point) as client:

        def ask() -> Json:
            return _ask(client, point, args.timeout, "stats")

        if top.is_terminal(sys.stdout):
            top.watch(ask, printable(point), args.interval)
        else:
            top.report(ask, _print_now, args.interval)
    return 0


def _tune(args: argparse.Namespace) -> int:
    size = tune.size_of(args.setting)
    point = mounting.resolve(args.mount_point)
    with _connected(point) as client:
        answer = _ask(client, point, args.timeout, "tune", **{tune.FREE_LIST: size})
        code, message = int(answer["exit_code"]), answer["message"]
    if code:
        _tell(message)
    else:
        _print(message)
    return code


def _info(args: argparse.Namespace) -> int:
    with Source(args.source) as source:
        copies = volume_header.read_copies(source.fd, source.path)
        in_use = False
        try:
            source.lock(read_only=True)
        except VolumeInUse:
            in_use = True
    header = copies.newest_first()[0]
    _print(f"volume id          {header.volume_id.hex()}")
    _print(f"format             {volume_header.VERSION}")
    _print(f"header generation  {header.generation}")
    _print(f"in use             {'yes' if in_use else 'no'}")
    _print_slots(header)
    _print_limits(args)
    return 0


def _print_limits(args: argparse.Namespace) -> None:
    """Print the limits of the mount of this volume, or those that a mount would have."""
    entry = mounting.mounted_from(args.source)
    lines = None
    if entry is not None:
        with contextlib.suppress(NotMounted, NoPermission), _connected(entry.point) as client:
            lines = config.table(_ask(client, entry.point, 10.0, "stats")["limits"])
    if lines is not None and entry is not None:
        _print(f"limits of the mount at {printable(entry.point)}:")
    else:
        found = config.read(args.config, args.source)
        lines = config.table(config.planned(config.resolve(found, None, os.environ)))
        _print("limits that a mount would have:")
    for line in lines:
        _print(line)


def _print_slots(header: Header) -> None:
    for index, slot in sorted(header.slots.items()):
        kind = slot.type.name.lower().replace("_", " ")
        cost = ""
        if slot.type is SlotType.PASSPHRASE:
            cost = f", Argon2id {slot.kdf.memory_kib >> 10} MiB, {slot.kdf.passes} passes"
        _print(f"key slot {index:<10}{kind}{cost}")


def _verify(args: argparse.Namespace) -> int:
    _prepare(args)
    settings = _volume_settings(args)
    damages = 0

    def report(damage: volume.Damage) -> None:
        nonlocal damages
        damages += 1
        progress.clear()
        _print(f"damaged: {printable(damage.path)}: {damage.extent()}")

    with Source(args.source) as source:
        _lock(source, read_only=True)
        with (
            _secret(args, "Passphrase") as secret,
            volume.unlocked(source, settings, secret, read_only=True) as it,
            Progress(sys.stderr, "verify") as progress,
        ):
            sound = volume.verify(it.volume, progress.update, report)
    if not sound:
        raise DamagedContents(args.source, f"{damages} damaged parts")
    _print(f"{printable(args.source)}: sound")
    return 0


def _key_list(args: argparse.Namespace) -> int:
    with Source(args.source) as source:
        _print_slots(volume_header.read_copies(source.fd, source.path).newest_first()[0])
    return 0


def _key_add(args: argparse.Namespace) -> int:
    _prepare(args)
    settings = _volume_settings(args)
    before = _check_source(settings, read_only=False)
    with _secret(args, "Passphrase") as old, _new_secret(args) as new:

        def change(header: Header, key: VolumeKey, generation: int) -> Header:
            return volume_header.add_slot(header, key, new, _slot_type(new), generation)

        header = volume.change_header(settings, old, change)
        _tell_if_text(args.new_key_file, new)
    added = ", ".join(str(index) for index in sorted(set(header.slots) - set(before.slots)))
    _print(f"added key slot {added}")
    return 0


def _key_remove(args: argparse.Namespace) -> int:
    _prepare(args)
    settings = _volume_settings(args)
    _check_source(settings, read_only=False)
    with _secret(args, "Passphrase") as secret:

        def change(header: Header, key: VolumeKey, generation: int) -> Header:
            return volume_header.remove_slot(header, key, args.slot, generation)

        volume.change_header(settings, secret, change)
    _print(f"removed key slot {args.slot}")
    _log.warning("an old copy of the volume still opens with what was removed")
    return 0


def _passwd(args: argparse.Namespace) -> int:
    _prepare(args)
    settings = _volume_settings(args)
    _check_source(settings, read_only=False)
    with _secret(args, "Current passphrase") as old, _new_secret(args) as new:
        if new.kind is not SecretKind.PASSPHRASE:
            raise KeySlotRefused("passwd", "the new secret is no passphrase: use 'encfsd key add'")

        def change(header: Header, key: VolumeKey, generation: int) -> Header:
            return volume_header.change_passphrase(header, key, key.slot, new, generation)

        volume.change_header(settings, old, change)
    _print("passphrase changed")
    _log.warning("an old copy of the volume still opens with the old passphrase")
    return 0


# ---- the one place for errors ----


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, with the function of each command in its results."""
    return arguments.make_parser(
        {
            "init": _init,
            "mount": _mount,
            "umount": _umount,
            "stats": _stats,
            "top": _top,
            "tune": _tune,
            "info": _info,
            "verify": _verify,
            "key list": _key_list,
            "key add": _key_add,
            "key remove": _key_remove,
            "passwd": _passwd,
        }
    )


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    process.warn_on_stderr()
    code = outcome(partial(_run, sys.argv[1:] if command_line is None else command_line))
    unwritten = outcome(_flush)
    return code or unwritten


def _run(command_line: Sequence[str]) -> int:
    parser = make_parser()
    if not command_line:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    args = parser.parse_args(command_line)
    with help_of(args.prog):
        code: int = args.run(args)
    return code


@contextlib.contextmanager
def help_of(prog: str) -> Iterator[None]:
    """Let usage errors point to the help of the command."""
    try:
        yield
    except UsageError as error:
        error.point_to_help_of(prog)
        raise


def _flush() -> int:
    with _standard_output():
        print(end="", flush=True)
    return 0


def outcome(function: Callable[[], int]) -> int:
    """Run a function that returns an exit code; print an error instead, and return its code."""
    try:
        return function()
    except EncfsdError as error:
        # A daemon in the background has reported already; its stderr is /dev/null by now.
        _tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:  # of --help, and of a closed pipe
        return int(ended.code or 0)


if __name__ == "__main__":
    sys.exit(main())
