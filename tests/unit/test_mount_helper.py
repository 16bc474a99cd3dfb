"""What mount(8) and umount(8) hand over, as command lines of encfsd, and exit codes for them."""

import os
import sys
from collections.abc import Callable

import pytest

from encfsd import cli, mount_helper
from encfsd.errors import Exit, UsageError


def translated(*texts: str, sloppy: bool = False) -> list[str]:
    command = mount_helper.command_line("/src", "/mnt", texts, sloppy=sloppy)
    assert (command[0], command[-3:]) == ("mount", ["--", "/src", "/mnt"])
    cli.make_parser().parse_args(command)
    return command[1:-3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("rw", ["-o", "rw"]),
        ("ro,noatime,allow_other", ["-o", "ro,noatime,allow_other"]),
        ("free-list=8G,rw,volume-id=ab", ["-o", "rw", "--free-list=8G", "--volume-id=ab"]),
        ("trust-first,no-fast-path", ["--trust-first", "--no-fast-path"]),
        ("passphrase-file=/etc/x=y", ["--passphrase-file=/etc/x=y"]),
        ('key-file="/a,b",ro', ["-o", "ro", "--key-file=/a,b"]),
        ('key-file=/a"b', ['--key-file=/a"b']),
        ("defaults,auto,noauto,nofail,_netdev,async", ["-o", "defaults"]),
        ("user,users,user=me,nouser,owner,group,comment=x", []),
        ("x-systemd.automount,x-systemd.after=a.mount,X-mount.mkdir=700", []),
    ],
)
def test_options(text: str, words: list[str]) -> None:
    assert translated(text) == words


def test_options_of_several_arguments_add_up() -> None:
    assert translated("ro,crypto=openssl", "noexec") == ["-o", "ro,noexec", "--crypto=openssl"]


@pytest.mark.parametrize("name", ["passphrase", "foreground", "help", "sync", "ro=1", "free"])
def test_an_unknown_option_is_named_without_its_value(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        translated(f"rw,{name}=hunter2")
    assert f"-o {name.partition('=')[0]}: not valid (unknown mount option)" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert translated(f"rw,{name}=hunter2", sloppy=True) == ["-o", "rw"]


def helper_exits(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mount.encfsd", *given])
    return mount_helper.mount()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["/src"], "/src: not valid (expected SRC MNT); see 'mount.encfsd --help'"),
        (["/src", "/mnt", "-N", "ns"], "-N: not valid (option -N not recognized)"),
        (["/src", "/mnt", "-o"], "-o: not valid (option -o requires argument)"),
        (["/src", "/mnt", "-o", "rw,free-list"], "mount: --free-list: its value is missing"),
        (["/src", "/mnt", "-f", "-o", "trust-first=1"], "mount: --trust-first: "),
        (["/src", "/mnt", "-o", "remount,ro"], "/mnt: not valid (a mount cannot be changed"),
    ],
)
def test_what_is_refused_is_bad_usage(
    given: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert helper_exits(monkeypatch, *given) == 1
    assert capsys.readouterr().err.startswith(f"encfsd: {says}")


@pytest.mark.parametrize(
    ("helper", "usage"),
    [
        (mount_helper.mount, "mount.encfsd SRC MNT [-sfnv] [-o OPTION[,...]] [-t TYPE]"),
        (mount_helper.umount, "umount.fuse.encfsd MNT [-flnrv] [-t TYPE]"),
    ],
)
def test_usage(
    helper: Callable[[], int],
    usage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["helper"])
    assert helper() == 1
    assert tuple(capsys.readouterr()) == ("", f"usage: {usage}\n")
    for option in ("-h", "--help"):
        monkeypatch.setattr(sys, "argv", ["helper", option])
        assert helper() == 0
        assert tuple(capsys.readouterr()) == (f"usage: {usage}\n", "")


def test_a_faked_mount_is_only_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/src", "/mnt", "-s", "-fnv", "-o", "rw,what=1", "-t", "fuse.encfsd"]
    assert helper_exits(monkeypatch, *given) == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, 0),
        (Exit.USAGE, 1),
        (Exit.NO_PERMISSION, 1),
        (Exit.NOT_ENOUGH_MEMORY, 2),
        (Exit.INTERNAL, 4),
        (cli.INTERRUPTED, 8),
        (Exit.UNLOCK_FAILED, 32),
        (Exit.ALREADY_MOUNTED, 32),
    ],
)
def test_exit_codes_are_those_of_mount(
    code: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "main", lambda _: code)
    assert helper_exits(monkeypatch, "/src", "/mnt") == status
    monkeypatch.setattr(sys, "argv", ["umount.fuse.encfsd", "/mnt", "-n", "-v"])
    assert mount_helper.umount() == status


def test_an_unmount_that_need_not_wait_is_left_to_umount(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: called.append(words))
    monkeypatch.setattr(cli, "main", lambda _: 0)
    monkeypatch.setattr(sys, "argv", ["umount.fuse.encfsd", "/mnt", "-lf"])
    mount_helper.umount()
    assert called == [["umount", "-i", "-l", "-f", "--", "/mnt"]]
