"""Limits from the command line, a configuration file, the environment and by default."""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from encfsd import config, options
from encfsd.config import COMMAND_LINE, DEFAULT, ENVIRONMENT, FREE_LIST, INHERITED, Config, Entry
from encfsd.errors import ConfigRefused, Exit, FreeListTooLarge, NoPermission
from encfsd.process import set_limits

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "vault.toml"
    made.touch(mode=0o600)
    return made


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "src").mkdir()
    return str(tmp_path / "src")


def refusal(file: Path, source: str) -> str:
    with pytest.raises(ConfigRefused) as caught:
        config.read(str(file), source)
    assert caught.value.exit_code == Exit.USAGE
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert len(text.splitlines()) == 1
    return text


# ---- which file ----


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/vault", "srv-vault"),
        ("/srv//vault/", "srv-vault"),
        ("/srv/my-vault", r"srv-my\x2dvault"),
        ("/a b/ü:_.x", r"a\x20b-\xc3\xbc:_.x"),
        ("/.hidden", r"\x2ehidden"),
        ("/", "-"),
    ],
)
def test_the_name_is_that_of_the_unit(path: str, name: str) -> None:
    assert config.default_file(path) == Path("/etc/encfsd") / f"{name}.toml"
    try:
        told = subprocess.run(
            ["systemd-escape", "--path", path], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        return
    assert told.stdout == f"{name}\n"


def test_without_a_file_there_is_no_configuration(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "DIRECTORY", tmp_path)
    assert config.read(None, source) == Config()
    path = config.default_file(source)
    path.touch(mode=0o600)
    path.write_text('[rlimit]\nNOFILE = "100"\n')
    assert config.read(None, source) == Config(str(path), {"NOFILE": Entry("100")})


# ---- what it says ----


def test_three_ways_to_write_a_limit(file: Path, source: str) -> None:
    file.write_text(
        '[rlimit]\nNOFILE = "1024:4K"\nMEMLOCK = { value = "unlimited" }\n'
        f'AS = {{ passthrough = true }}\n{FREE_LIST} = "25%"\n'
    )
    assert config.read(str(file), source).entries == {
        "NOFILE": Entry("1024:4K"),
        "MEMLOCK": Entry("unlimited"),
        "AS": Entry(None),
        FREE_LIST: Entry("25%"),
    }


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0", (0, 0)),
        ("65536", (65536, 65536)),
        ("64M", (64 << 20, 64 << 20)),
        ("1K:2K", (1024, 2048)),
        ("2T:unlimited", (2 << 40, UNLIMITED)),
        ("unlimited", (UNLIMITED, UNLIMITED)),
    ],
)
def test_limits(text: str, limit: config.Limit) -> None:
    assert config.parse_limit(text) == limit
    assert config.parse_limit(config.format_limit(limit)) == limit


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('NOFLE = "1"', "[rlimit] NOFLE: unknown; known are NOFILE, MEMLOCK, CORE, AS, NPROC, "),
        ("NOFILE = 65536", '[rlimit] NOFILE: must be text: "65536"'),
        ("NOFILE = true", "[rlimit] NOFILE: must be text)"),
        ("NOFILE = []", "[rlimit] NOFILE: must be text)"),
        ('NOFILE = "many"', '[rlimit] NOFILE: "many" is not a limit: write it like 65536, 64M'),
        ('NOFILE = "5%"', '"5%" is not a limit'),
        ('NOFILE = "-1"', '"-1" is not a limit'),
        ('NOFILE = "63"', '[rlimit] NOFILE: "63" is too low: the daemon itself needs 64'),
        ('AS = "10M"', '[rlimit] AS: "10M" is too low: the daemon itself needs 1024M'),
        ('NOFILE = ""', '"" is not a limit'),
        ('NOFILE = "2:1"', "the soft limit exceeds the hard one"),
        ('NOFILE = "unlimited:1"', "the soft limit exceeds the hard one"),
        ('NOFILE = "9999999T"', "too large: write unlimited"),
        ("NOFILE = {}", "must be { value ="),
        ("NOFILE = { passthrough = false }", "must be { value ="),
        ("NOFILE = { passthrough = 1 }", "must be { value ="),
        ('NOFILE = { value = "1", passthrough = true }', "must be { value ="),
        ("NOFILE = { value = 1 }", 'must be text: "1"'),
        (f'{FREE_LIST} = "much"', '"much" is not a size: write it like 512M, 8G or 25%'),
        (f'{FREE_LIST} = "unlimited"', '"unlimited" is not a size'),
        ('NOFILE = "1"\nNOFILE = "2"', "line 3"),
        ("what is this", "line 2"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_what_is_wrong_is_named(line: str, says: str, file: Path, source: str) -> None:
    file.write_text(f"[rlimit]\n{line}\n")
    assert says in refusal(file, source)


def test_other_tables_and_other_bytes_are_refused(file: Path, source: str) -> None:
    file.write_text('[mount]\noptions = "ro"\n')
    assert "mount: unknown; there is only the table [rlimit]" in refusal(file, source)
    file.write_text('rlimit = "1"\n')
    assert "rlimit: must be a table" in refusal(file, source)
    file.write_bytes(b"\xff")
    assert "not UTF-8" in refusal(file, source)
    file.write_text("#" * 70000)
    assert "larger than 64 KiB" in refusal(file, source)


def test_who_could_have_written_it_matters(file: Path, source: str, tmp_path: Path) -> None:
    for mode in (0o620, 0o602):
        file.chmod(mode)
        assert f"others can write to it); 'chmod go-w {file}'" in refusal(file, source)
    file.chmod(0o644)
    assert config.read(str(file), source) == Config(str(file), {})
    assert "No such file" in refusal(tmp_path / "missing", source)
    assert "not a regular file" in refusal(tmp_path, source)
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "not a regular file" in refusal(tmp_path / "fifo", source)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert "belongs to user 12345" in refusal(file, source)


def test_the_volume_never_configures_its_daemon(file: Path, source: str) -> None:
    inside = Path(source) / "encfsd.toml"
    inside.touch(mode=0o600)
    assert "it lies in the volume" in refusal(inside, source)
    file.unlink()
    file.symlink_to(inside)
    assert "it lies in the volume" in refusal(file, source)


def test_a_file_that_is_linked_elsewhere_is_refused(file: Path, source: str) -> None:
    os.link(file, Path(source) / "encfsd.toml")
    assert "(has several hard links, by which it may lie in the volume)" in refusal(file, source)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_others_must_not_be_able_to_replace_it(tmp_path: Path, source: str, mode: int) -> None:
    inner = tmp_path / "open" / "closed"
    inner.mkdir(parents=True)
    file = inner / "vault.toml"
    file.touch(mode=0o600)
    inner.parent.chmod(mode)
    says = f"(it lies below {inner.parent}, where others can write); 'chmod go-w {inner.parent}'"
    assert says in refusal(file, source)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert says in refusal(link, source)
    inner.parent.chmod(mode | 0o1000)  # like /tmp
    assert config.read(str(file), source) == Config(str(file), {})


def test_where_a_link_lies_matters_too(file: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "open").mkdir()
    link = tmp_path / "open" / "vault.toml"
    link.symlink_to(file)
    assert config.read(str(link), source) == Config(str(link), {})
    (tmp_path / "open").chmod(0o777)
    assert "where others can write" in refusal(link, source)
    if os.geteuid() == 0:
        (tmp_path / "open").chmod(0o755)
        os.chown(tmp_path / "open", 12345, -1)
        assert "open, which belongs to user 12345" in refusal(link, source)


# ---- which of all counts ----


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "memory_limit", lambda: 1000 << 20)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("option", "entry", "environment", "size", "origin"),
    [
        ("3M", Entry("2M"), "1M", 3 << 20, COMMAND_LINE),
        (None, Entry("2M"), "1M", 2 << 20, "FILE"),
        (None, Entry(None), "1M", 1 << 20, ENVIRONMENT),
        (None, Entry(None), None, 50 << 20, DEFAULT),
        (None, None, "1M", 50 << 20, DEFAULT),
    ],
)
def test_precedence_of_the_free_list(
    option: str | None, entry: Entry | None, environment: str | None, size: int, origin: str
) -> None:
    said = Config("FILE", {FREE_LIST: entry} if entry else {})
    found = config.resolve(said, option, {FREE_LIST: environment} if environment else {})
    assert (found.free_list, found.origins[FREE_LIST]) == (size, origin)
    assert bool(found.asked) == (origin != DEFAULT)  # only what was asked for can be refused


@pytest.mark.usefixtures("machine")
def test_a_free_list_that_is_too_large_says_where_it_was_asked_for() -> None:
    said = Config("FILE", {FREE_LIST: Entry("2G")})
    with pytest.raises(FreeListTooLarge, match=f"^FILE: {FREE_LIST}=2G: "):
        config.resolve(said, None, {})
    with pytest.raises(FreeListTooLarge, match=r"^--free-list=2G: "):
        config.resolve(said, "2G", {})


def test_address_space_must_hold_the_free_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "memory_limit", lambda: 8 << 30)
    said = Config("FILE", {"AS": Entry("2G")})
    assert config.resolve(said, "1536M", {}).free_list == 1536 << 20
    with pytest.raises(ConfigRefused) as caught:
        config.resolve(said, "1537M", {})
    assert str(caught.value) == (
        "FILE: not usable as configuration ([rlimit] AS: too low for a free list of 1.5 GiB); "
        "2049M is the least, or choose a smaller free list"
    )


def test_which_limits_are_set_and_which_are_inherited() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = config.resolve(Config(), None, {})
    assert found.rlimits == {"NOFILE": (hard, hard), "CORE": (0, 0)}
    assert found.origins["NOFILE"] == found.origins["CORE"] == DEFAULT
    assert {found.origins[name] for name in ("MEMLOCK", "AS", "NPROC")} == {INHERITED}
    passed = Config("FILE", {"NOFILE": Entry(None), "CORE": Entry(None), "AS": Entry("8T")})
    found = config.resolve(passed, None, {})
    assert found.rlimits == {"AS": (8 << 40, 8 << 40)}
    assert found.soft("AS") == 8 << 40
    assert found.soft("NOFILE") == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert (found.origins["NOFILE"], found.origins["AS"]) == (INHERITED, "FILE")
    shown = config.planned(found)
    assert shown["AS"] == {"value": str(8 << 40), "origin": "FILE"}
    rows = config.table(shown)
    assert len(rows) == 6
    assert all(len(row) <= 80 for row in rows)
    sized = {"MEMLOCK": "8388608:unlimited", "AS": "8388608", "NOFILE": "1024", FREE_LIST: "4096"}
    told = config.table({n: {"value": v, "origin": INHERITED} for n, v in sized.items()})
    assert [" ".join(row.split()) for row in told] == [
        "MEMLOCK 8.0 MiB:unlimited inherited",
        "AS 8.0 MiB inherited",
        "NOFILE 1024 inherited",
        f"{FREE_LIST} 4.0 KiB inherited",
    ]


@pytest.mark.parametrize(
    ("name", "letter"),
    [("NOFILE", "n"), ("MEMLOCK", "l"), ("CORE", "c"), ("AS", "v"), ("NPROC", "u")],
)
def test_a_limit_that_the_kernel_refuses_is_named(
    name: str, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int, __: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, 6))
    with pytest.raises(NoPermission) as caught:
        set_limits({name: (7, 8)})
    assert str(caught.value) == (
        f"{name}=7:8: permission denied (the hard limit of this process is 6); "
        f"ask for less, or raise that: 'ulimit -H{letter}', or Limit{name}= in the unit"
    )
