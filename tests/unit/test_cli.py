"""Commands that need no mount: what they print, and with which code they end."""

import contextlib
import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from encfsd import __version__, cli, mounting, process, secrets_input, volume
from encfsd.errors import (
    EncfsdError,
    Exit,
    LogFileRefused,
    NoPermission,
    NotMounted,
    UnlockFailed,
    UsageError,
)
from encfsd.native import lib
from encfsd.options import VolumeSettings
from encfsd.progress import Progress
from encfsd.source import Source

COMMANDS = (
    ["init"],
    ["mount"],
    ["umount"],
    ["stats"],
    ["top"],
    ["tune"],
    ["info"],
    ["verify"],
    ["key", "list"],
    ["key", "add"],
    ["key", "remove"],
    ["passwd"],
)


def encfsd(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal and expect its exit code."""
    command = [sys.executable, "-m", "encfsd.cli", *map(str, arguments)]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


class Scratch:
    """A volume opened by a key file, which takes no time to stretch."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src"
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_bytes(b"\xff" + os.urandom(63))
        self.state = folder / "state"
        self.unlock = [f"--key-file={self.key}", f"--state-dir={self.state}"]

    def init(self) -> None:
        encfsd("init", *self.unlock, self.source)


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    made = Scratch(tmp_path)
    made.init()
    return made


# ---- arguments ----


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples(command: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    examples = text.partition("examples:\n")[2].splitlines()
    assert examples
    assert all(line.startswith("  encfsd ") for line in examples)


def test_examples_parse() -> None:
    parser = cli.make_parser()
    text = "\n".join(cli.make_parser().format_help().splitlines())
    for line in re.findall(r"^  encfsd (.*)$", text, re.MULTILINE):
        parser.parse_args(line.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["mount", "/src"],
        ["mount", "--no-such-option", "/src", "/mnt"],
        ["mount", "--free", "8G", "/src", "/mnt"],
        ["mount", "--crypto=rot13", "/src", "/mnt"],
        ["mount", "--key-file=a", "--passphrase-file=b", "/src", "/mnt"],
        ["mount", "--free-list=much", "/src", "/mnt"],
        ["mount", "--volume-id=12", "/src", "/mnt"],
        ["mount", "--accept-root=zz", "/src", "/mnt"],
        ["mount", "-o", "sync", "/src", "/mnt"],
        ["key"],
        ["key", "remove", "/src", "first"],
        ["umount", "--timeout=soon", "/mnt"],
    ],
    ids=" ".join,
)
def test_bad_usage(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("encfsd: ")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "command", "says"),
    [
        (["mount", "/src"], "mount", "MNT is missing"),
        (["mount"], "mount", "SRC, MNT are missing"),
        (["key"], "key", "VERB is missing"),
        (["info", "--config"], "info", "--config: its value is missing"),
        (["stats", "/mnt", "/other"], "stats", "/other is one argument too many"),
        (
            ["mount", "--fre-list=2G", "/src", "/mnt"],
            "mount",
            "--fre-list is no option of it, did you mean --free-list?",
        ),
        (
            ["umount", "--timeout=soon", "/mnt"],
            "umount",
            "--timeout: 'soon' is not a number of seconds",
        ),
        (
            ["key", "remove", "/src", "first"],
            "key remove",
            "SLOT: 'first' is not a number that 'encfsd key list' shows",
        ),
    ],
)
def test_bad_usage_is_said_in_plain_words(
    arguments: Sequence[str], command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == Exit.USAGE
    assert capsys.readouterr().err == (
        f"encfsd: {command}: {says}; see 'encfsd {command} --help'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "thing", "command"),
    [
        (["tune", "/mnt", "free-list=abc"], "free-list=abc", "tune"),
        (["tune", "/mnt", "nodes=4"], "nodes=4", "tune"),
        (["mount", "--free-list=abc", "/src", "/mnt"], "--free-list=abc", "mount"),
        (["mount", "-o", "sync", "/src", "/mnt"], "-o sync", "mount"),
        (["top", "--interval=0", "/mnt"], "--interval=0", "top"),
        (["verify", "--volume-id=12", "/src"], "--volume-id=12", "verify"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_bad_value_points_to_the_help_of_its_command(
    arguments: list[str], thing: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == Exit.USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"encfsd: {thing}: not valid (")
    assert told.endswith(f"); see 'encfsd {command} --help'\n")


def test_no_command_at_all_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == cli.make_parser().format_help()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"encfsd {__version__}\n"


def test_an_error_becomes_its_message_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> int:
        raise UnlockFailed("src")

    monkeypatch.setattr(cli, "_info", refuse)
    assert cli.main(["info", "src"]) == Exit.UNLOCK_FAILED
    assert capsys.readouterr().err == f"encfsd: {UnlockFailed('src')}\n"


def test_interruption_has_the_code_that_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_info", interrupt)
    assert cli.main(["info", "src"]) == 130


def test_the_manual_lists_every_exit_code() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "man" / "encfsd.1.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", manual, re.MULTILINE)}
    assert listed == {0, *Exit}


def test_the_manual_lists_every_option() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "man" / "encfsd.1.md").read_text()
    text = "".join(
        subprocess.run(
            [sys.executable, "-m", "encfsd.cli", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for command in COMMANDS
    )
    for option in set(re.findall(r"--[a-z][a-z-]+", text)):
        assert option in manual, option


def test_every_class_of_error_has_a_documented_code() -> None:
    def below(cls: type[EncfsdError]) -> set[type[EncfsdError]]:
        found = set()
        for child in cls.__subclasses__():
            found |= {child} | below(child)
        return found

    codes = {cls.exit_code for cls in below(EncfsdError) if hasattr(cls, "exit_code")}
    assert codes == set(Exit)


# ---- standard output ----


def info(source: Path, output: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-m", "encfsd.cli", "info", str(source)],
        cwd=Path(__file__).parents[2],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def test_output_that_cannot_be_written_is_one_line(scratch: Scratch) -> None:
    for options in ([], ["-u"]):  # fails at the end, or at the first line
        with open("/dev/full", "w") as full:
            result = info(scratch.source, full.fileno(), *options)
        assert result.returncode == Exit.INTERNAL
        assert len(result.stderr.splitlines()) == 1
        assert "standard output: cannot be written (No space left on device)" in result.stderr


def test_a_closed_pipe_is_no_news(scratch: Scratch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = info(scratch.source, write_end)
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (Exit.INTERNAL, "")


# ---- the mount, without mounting ----


def test_a_mount_whose_daemon_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(point: str) -> None:
        raise NotMounted(point, "no daemon answers")

    entry = mounting.MountEntry("/mnt", "0:99", mounting.TYPE, "/src", 0)
    monkeypatch.setattr(mounting, "mounted_at", lambda _: entry)
    monkeypatch.setattr(cli, "Client", nobody)
    for dead, words in ((True, "'encfsd umount /mnt' clears it"), (False, "no daemon answers")):
        monkeypatch.setattr(mounting, "is_dead", lambda _, dead=dead: dead)
        assert cli.main(["stats", "/mnt"]) == Exit.NOT_MOUNTED
        assert words in capsys.readouterr().err


class LyingClient:
    """A daemon of somebody else, who may answer anything."""

    def __init__(self, _: str) -> None:
        pass

    def __enter__(self) -> "LyingClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, _: str, **__: str) -> None:
        pass

    def receive(self, _: float | None) -> dict[str, object]:
        return {"pool": {"capacity": []}, "exit_code": "yes", "failed": 1, "read_only": 0}


@pytest.mark.parametrize(
    "command",
    [["stats", "/mnt"], ["tune", "/mnt", "free-list=1G"], ["top", "/mnt"], ["umount", "/mnt"]],
    ids=lambda words: words[0],
)
def test_a_daemon_that_does_not_answer_as_one_should(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = mounting.MountEntry("/mnt", "0:99", mounting.TYPE, "/src", 12345)
    monkeypatch.setattr(mounting, "mounted_at", lambda _: entry)
    monkeypatch.setattr(mounting, "unmount", lambda _: None)
    monkeypatch.setattr(cli, "Client", LyingClient)
    monkeypatch.setattr(LyingClient, "wait_for_exit", lambda *_: True, raising=False)
    assert cli.main(command) == Exit.NOT_MOUNTED
    assert "its daemon does not answer as this version does" in capsys.readouterr().err


def test_no_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli, "run_directory", lambda _: tmp_path / "file" / "encfsd")
    with pytest.raises(NoPermission, match="set XDG_RUNTIME_DIR"):
        cli._check_run_directory()


def test_a_log_file_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(LogFileRefused):
        process.log_to(str(fifo), background=False)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(LogFileRefused, match="a FIFO"):
            process.log_to(str(fifo), background=False)
    finally:
        os.close(reader)


def test_a_bad_log_file_is_refused_before_the_secret_is_asked_for(
    scratch: Scratch, tmp_path: Path
) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    result = encfsd(
        "mount",
        f"--log-file={tmp_path}/missing/log",
        scratch.unlock[1],
        scratch.source,
        point,
        code=Exit.NO_PERMISSION,
    )
    assert "log file cannot be opened" in result.stderr


def test_a_small_free_list_is_refused_before_the_secret_is_asked_for(
    scratch: Scratch, tmp_path: Path
) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    words = ["mount", scratch.unlock[1], "--free-list=1M"]
    result = encfsd(*words, scratch.source, point, code=Exit.USAGE)
    assert result.stderr.startswith(
        "encfsd: --free-list=1M: not valid (less than the reserve that commits need); "
    )


def test_the_smallest_free_list() -> None:
    least = lib.pool_footprint(lib.POOL_RESERVE_NODES)
    for size in (0, least, 1 << 40):
        volume.refuse_small_free_list(size, "free-list")
    with pytest.raises(UsageError, match=f"; {least >> 10}K is the least that can be given, or 0"):
        volume.refuse_small_free_list(least - 1, "free-list")


def test_a_bad_header_copy_is_told_once(scratch: Scratch) -> None:
    (scratch.source / "volume.header.bak").unlink()
    new_key = scratch.source.parent / "new"
    new_key.touch(mode=0o600)
    new_key.write_bytes(b"\xfe" * 64)
    added = encfsd("key", "add", *scratch.unlock, f"--new-key-file={new_key}", scratch.source)
    assert added.stderr.count("volume.header.bak: ") == 1
    assert encfsd("key", "list", scratch.source).stderr == ""


def test_a_log_file_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(LogFileRefused, match=r"opened \(No such file.*a directory that exists"):
        process.log_to(str(tmp_path / "missing" / "log"), background=True)


def test_a_command_tells_warnings_from_errors(tmp_path: Path) -> None:
    made = Scratch(tmp_path)
    made.key.chmod(0o644)
    told = encfsd("init", *made.unlock, made.source).stderr.splitlines()
    assert f"encfsd: warning: {made.key}: other users may read this secret" in told[0]
    made.key.write_bytes(b"\xff" * 7)
    told = encfsd("verify", *made.unlock, made.source, code=Exit.SECRET_REFUSED).stderr.splitlines()
    assert told[-1].startswith(f"encfsd: {made.key}: not usable as a secret")


def test_a_mount_in_the_background_prints_warnings_only() -> None:
    code = (
        "import logging, os; from encfsd import process; os.environ.pop('JOURNAL_STREAM', '')\n"
        "process._SYSLOG = '/nowhere'; process.log_to(None, background={})\n"
        "logging.info('internals'); logging.warning('news'); logging.error('an end')"
    )
    news = "encfsd: warning: news\nencfsd: an end\n"
    for background, expected in ((True, news), (False, "encfsd: internals\n" + news)):
        result = subprocess.run(
            [sys.executable, "-c", code.format(background)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert result.stderr == expected


# ---- volumes ----


def test_init_info_verify(scratch: Scratch) -> None:
    shown = encfsd("info", scratch.source).stdout
    assert re.search(r"^volume id +[0-9a-f]{32}$", shown, re.MULTILINE)
    assert re.search(r"^key slot 0 +key file$", shown, re.MULTILINE)
    assert re.search(r"^in use +no$", shown, re.MULTILINE)
    assert encfsd("verify", *scratch.unlock, scratch.source).stdout.endswith(": sound\n")


def test_init_refuses_what_is_a_volume_already(scratch: Scratch) -> None:
    refused = encfsd("init", *scratch.unlock, scratch.source, code=Exit.VOLUME_EXISTS)
    assert f"{scratch.source}: holds a volume already; mount it" in refused.stderr


def test_init_looks_at_the_directory_before_it_asks_for_a_secret(scratch: Scratch) -> None:
    folder = scratch.source.parent
    (folder / "used").mkdir(mode=0o700)
    (folder / "used" / "file").touch()
    for path, code in (
        (scratch.source, Exit.VOLUME_EXISTS),
        (folder / "used", Exit.VOLUME_EXISTS),
        (scratch.key, Exit.VOLUME_EXISTS),
        (scratch.key / "src", Exit.VOLUME_EXISTS),
        (folder / "missing" / "src", Exit.BACKING_GONE),
        (folder / "new", Exit.SECRET_REFUSED),
    ):
        encfsd("init", scratch.unlock[1], path, code=code)
    assert not (folder / "new").exists()


def test_a_volume_is_not_mounted_on_itself(scratch: Scratch) -> None:
    state = scratch.unlock[1]
    refused = encfsd("mount", state, scratch.source, scratch.source, code=Exit.USAGE)
    assert "SRC and MNT are the same" in refused.stderr


@pytest.mark.parametrize(
    ("number", "code", "wrong"),
    [
        (errno.ENOSPC, Exit.BACKING_FULL, "no space left in the backing directory (last commit)"),
        (
            errno.EIO,
            Exit.BACKING_FAILED,
            "cannot be read or written (last commit: Input/output error)",
        ),
    ],
)
def test_a_failed_last_commit_names_the_source_and_what_may_be_lost(
    number: int, code: Exit, wrong: str, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    class Core:
        """The data plane, whose last commit fails."""

        def __getattr__(self, name: str) -> object:
            return getattr(lib, name)

        def volume_close(self, handle: object) -> int:
            closed.append(lib.volume_close(handle))
            return -number

    settings = VolumeSettings(source=str(scratch.source), state_dir=scratch.state)
    secret = secrets_input.from_key_file(str(scratch.key))
    volume.setup_crypto("auto")
    monkeypatch.setattr(volume, "lib", Core())
    with (
        secret,
        Source(settings.source) as source,
        pytest.raises(EncfsdError) as caught,
        volume.unlocked(source, settings, secret, read_only=False),
    ):
        pass
    assert closed == [0]
    assert caught.value.exit_code == code
    lost = "what was written since the last successful fsync may be missing"
    assert str(caught.value).startswith(f"{scratch.source}: {wrong}; {lost}: ")


def test_an_init_that_fails_leaves_nothing(tmp_path: Path) -> None:
    made = Scratch(tmp_path)
    no_locked_memory = ["prlimit", "--memlock=0:0"]
    if os.geteuid() == 0:  # root may lock what it likes
        no_locked_memory += ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-all"]
    command = [*no_locked_memory, sys.executable, "-m", "encfsd.cli", "init", *made.unlock]
    result = subprocess.run(
        [*command, str(made.source)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == Exit.MEMORY_NOT_LOCKED, result.stderr
    assert "LimitMEMLOCK" in result.stderr
    assert list(made.source.iterdir()) == []
    made.init()


def test_not_a_volume(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert "encfsd init" in encfsd("info", tmp_path, code=Exit.NOT_A_VOLUME).stderr
    encfsd("info", tmp_path / "missing", code=Exit.BACKING_GONE)


def test_no_terminal_and_no_file(scratch: Scratch) -> None:
    state = f"--state-dir={scratch.state}"
    result = encfsd("verify", state, scratch.source, code=Exit.SECRET_REFUSED)
    assert "use --passphrase-file or --key-file" in result.stderr
    for command in (["key", "add"], ["passwd"]):
        result = encfsd(*command, *scratch.unlock, scratch.source, code=Exit.SECRET_REFUSED)
        assert "use --new-passphrase-file or --new-key-file" in result.stderr


def test_wrong_key_file(scratch: Scratch) -> None:
    scratch.key.write_bytes(b"\xfe" + os.urandom(63))
    result = encfsd("verify", *scratch.unlock, scratch.source, code=Exit.UNLOCK_FAILED)
    assert result.stdout == ""


def test_another_volume_than_the_pinned_one(scratch: Scratch) -> None:
    other = "--volume-id=" + "00" * 16
    encfsd("verify", other, *scratch.unlock, scratch.source, code=Exit.WRONG_VOLUME)


def test_a_machine_that_knows_nothing_of_the_volume(scratch: Scratch, tmp_path: Path) -> None:
    elsewhere = [scratch.unlock[0], f"--state-dir={tmp_path / 'elsewhere'}"]
    refused = encfsd("verify", *elsewhere, scratch.source, code=Exit.NO_RECORD)
    root = re.search(r"--accept-root=([0-9a-f]{64})", refused.stderr)
    assert root is not None
    assert f"in the state directory {tmp_path / 'elsewhere'}" in refused.stderr
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "mnt").mkdir()
    mount = encfsd("mount", *elsewhere, scratch.source, tmp_path / "mnt", code=Exit.NO_RECORD)
    assert mount.stderr == refused.stderr
    assert not (tmp_path / "elsewhere").exists()
    assert refused.stderr.index("--state-dir") < refused.stderr.index("--trust-first")
    encfsd("verify", *elsewhere, "--trust-first", scratch.source)
    encfsd("verify", *elsewhere, f"--accept-root={root[1]}", scratch.source)
    # Looking is not remembering.
    encfsd("verify", *elsewhere, scratch.source, code=Exit.NO_RECORD)
    other = "--accept-root=" + "00" * 32
    wrong = encfsd("verify", *elsewhere, other, scratch.source, code=Exit.DAMAGED_CONTENTS)
    assert f"--accept-root={root[1]}" in wrong.stderr
    assert "backup" not in wrong.stderr


def test_damaged_metadata(scratch: Scratch) -> None:
    meta = scratch.source / "meta"
    meta.write_bytes(bytes(meta.stat().st_size))
    encfsd("verify", *scratch.unlock, scratch.source, code=Exit.DAMAGED_CONTENTS)
    accept = "--accept-root=" + "00" * 32
    result = encfsd("verify", *scratch.unlock, accept, scratch.source, code=Exit.DAMAGED_CONTENTS)
    assert "contents damaged" in result.stderr


def test_an_interrupted_verify_stops(scratch: Scratch) -> None:
    code = (
        "import sys; from encfsd import cli, progress\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "progress.Progress.update = interrupt\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "verify", *scratch.unlock, str(scratch.source)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert "sound" not in result.stdout


def test_key_slots(scratch: Scratch, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.touch(mode=0o600)
    second.write_bytes(b"\xff" + os.urandom(31))
    new = f"--new-key-file={second}"
    added = encfsd("key", "add", *scratch.unlock, new, scratch.source)
    assert added.stdout == "added key slot 1\n"
    assert len(encfsd("key", "list", scratch.source).stdout.splitlines()) == 2
    with_second = [f"--key-file={second}", scratch.unlock[1]]
    encfsd("verify", *with_second, scratch.source)
    removed = encfsd("key", "remove", *with_second, scratch.source, "0")
    assert removed.stdout == "removed key slot 0\n"
    assert "old copy" in removed.stderr
    encfsd("verify", *scratch.unlock, scratch.source, code=Exit.UNLOCK_FAILED)
    encfsd("verify", *with_second, scratch.source)
    encfsd("key", "remove", *with_second, scratch.source, "1", code=Exit.KEY_SLOT_REFUSED)
    encfsd("key", "remove", *with_second, scratch.source, "7", code=Exit.KEY_SLOT_REFUSED)


def test_a_key_file_that_is_text_is_told_to_be_a_passphrase(tmp_path: Path) -> None:
    made = Scratch(tmp_path)
    told = f"{made.key}: the key file is text, so it is treated as a passphrase\n"
    made.key.write_text("correct horse battery staple\n")
    assert told in encfsd("init", *made.unlock, made.source).stderr
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("another one\n")
    told = f"{other}: the key file is text, so it is treated as a passphrase\n"
    new = f"--new-key-file={other}"
    assert told in encfsd("key", "add", *made.unlock, new, made.source).stderr
    assert encfsd("info", made.source).stdout.count("passphrase, Argon2id") == 2


def test_a_volume_in_use_is_told_before_a_secret_is_asked_for(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(volume, "CLOSING_SECONDS", 0.0)
    with Source(str(scratch.source)) as source:
        source.lock(read_only=False)
        for command in (["verify"], ["key", "add"], ["passwd"]):
            code = cli.main([*command, scratch.unlock[1], str(scratch.source)])
            assert code == Exit.VOLUME_IN_USE
            waiting, refused = capsys.readouterr().err.splitlines()
            assert "in use; waiting up to 0 s, in case a mount is just ending" in waiting
            assert "in use by another process" in refused
        entry = mounting.MountEntry("/mnt", "0:99", mounting.TYPE, str(scratch.source), 0)
        monkeypatch.setattr(mounting, "mounted_from", lambda _: entry)
        monkeypatch.setattr(cli, "Client", lambda _: contextlib.nullcontext())
        assert cli.main(["verify", str(scratch.source)]) == Exit.VOLUME_IN_USE
        assert capsys.readouterr().err == (
            f"encfsd: {scratch.source}: mounted at /mnt; unmount it with 'encfsd umount /mnt'\n"
        )


def test_the_device_that_holds_both_is_mentioned_by_init_only(tmp_path: Path) -> None:
    made = Scratch(tmp_path)
    assert "--state-dir" in encfsd("init", *made.unlock, made.source).stderr
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_bytes(b"\xfe" * 64)
    added = encfsd("key", "add", *made.unlock, f"--new-key-file={other}", made.source)
    assert added.stderr == ""


def test_a_secret_opens_one_slot_only(scratch: Scratch) -> None:
    again = f"--new-key-file={scratch.key}"
    refused = encfsd(
        "key", "add", *scratch.unlock, again, scratch.source, code=Exit.KEY_SLOT_REFUSED
    )
    assert "key slot 0: key slot cannot be changed (the new secret opens it already)" in (
        refused.stderr
    )
    assert len(encfsd("key", "list", scratch.source).stdout.splitlines()) == 1


def test_passwd(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for file, text in ((old, "old one\n"), (new, "new one\n")):
        file.touch(mode=0o600)
        file.write_text(text)
    source, state = tmp_path / "src", f"--state-dir={tmp_path / 'state'}"
    encfsd("init", f"--passphrase-file={old}", state, source)
    same = [f"--passphrase-file={old}", f"--new-passphrase-file={old}", state, str(source)]
    refused = encfsd("passwd", *same, code=Exit.KEY_SLOT_REFUSED)
    assert "the new secret opens it already" in refused.stderr
    changed = encfsd(
        "passwd", f"--passphrase-file={old}", f"--new-passphrase-file={new}", state, source
    )
    assert "old copy" in changed.stderr
    encfsd("verify", f"--passphrase-file={old}", state, source, code=Exit.UNLOCK_FAILED)
    encfsd("verify", f"--passphrase-file={new}", state, source)


def test_an_old_header_is_not_accepted(scratch: Scratch, tmp_path: Path) -> None:
    """Whoever kept a header with a removed key puts it back: it opens, but does not count."""
    old = {name: (scratch.source / name).read_bytes() for name in ("volume.header",)}
    old["volume.header.bak"] = (scratch.source / "volume.header.bak").read_bytes()
    second = tmp_path / "second"
    second.touch(mode=0o600)
    second.write_bytes(b"\xff" + os.urandom(31))
    new = f"--new-key-file={second}"
    encfsd("key", "add", *scratch.unlock, new, scratch.source)
    for name, raw in old.items():
        (scratch.source / name).write_bytes(raw)
    encfsd("verify", *scratch.unlock, scratch.source, code=Exit.HEADER_NOT_ACCEPTED)


def test_a_change_mends_a_damaged_copy_of_the_header(scratch: Scratch, tmp_path: Path) -> None:
    copy = scratch.source / "volume.header"
    raw = bytearray(copy.read_bytes())
    raw[4000] ^= 1
    copy.write_bytes(raw)
    warning = encfsd("info", scratch.source).stderr
    assert len(warning.splitlines()) == 1
    assert "a read-write mount repairs it" in warning
    second = tmp_path / "second"
    second.touch(mode=0o600)
    second.write_bytes(b"\xff" + os.urandom(31))
    encfsd("key", "add", *scratch.unlock, f"--new-key-file={second}", scratch.source)
    assert encfsd("info", scratch.source).stderr == ""
    assert copy.read_bytes() == (scratch.source / "volume.header.bak").read_bytes()


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal() -> None:
    times = iter([0.0, 10.0, 10.05, 20.0])
    terminal = Terminal()
    with Progress(terminal, "verify", clock=lambda: next(times)) as progress:
        progress.update(25, 100)
        progress.update(26, 100)  # too soon to draw again
        progress.update(100, 100)
    progress.update(1, 2)  # too late
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert drawn == [
        "",
        "verify [#######.......................]  25%, 0:30 left",
        "verify [##############################] 100%, 0:00 left",
        "",
    ]


def test_no_progress_elsewhere() -> None:
    stream = io.StringIO()
    with Progress(stream, "verify") as progress:
        progress.update(1, 2)
    assert stream.getvalue() == ""
