"""Messages and exit codes: complete, unique, and safe to print."""

import errno
import os
import pathlib

import pytest

from encfsd import errors


def below(cls: type[errors.EncfsdError]) -> list[type[errors.EncfsdError]]:
    return [each for sub in cls.__subclasses__() for each in (sub, *below(sub))]


ALL = [cls for cls in below(errors.EncfsdError) if hasattr(cls, "exit_code")]


def make(cls: type[errors.EncfsdError]) -> errors.EncfsdError:
    if issubclass(cls, errors.StaleRoot):
        return cls("/srv/vault", "root aa at 3.4", "root bb at 3.1", b"\xbb" * 32)
    if issubclass(cls, (errors.NoRecord, errors.RootNotFound)):
        return cls("/srv/vault", b"\xbb" * 32)
    if issubclass(cls, errors.CommandLineRefused):
        return cls("encfsd /srv/vault", "not valid")
    if issubclass(cls, errors.MountedElsewhere):
        return cls("/srv/vault", "/mnt")
    return cls("/srv/vault")


def test_each_exit_code_belongs_to_one_error_and_those_that_refine_it() -> None:
    own = [cls.exit_code for cls in ALL if "exit_code" in vars(cls)]
    assert sorted(own) == sorted(errors.Exit)


def test_exit_codes_stay_clear_of_what_shells_and_systemd_use() -> None:
    assert all(0 < code < 64 for code in errors.Exit)


@pytest.mark.parametrize("cls", ALL)
def test_message_names_the_thing_what_is_wrong_and_what_to_do(
    cls: type[errors.EncfsdError],
) -> None:
    error = make(cls)
    thing, rest = str(error).split(": ", 1)
    assert thing == "/srv/vault"
    assert rest.startswith(cls.wrong)
    assert "; " in rest
    assert "{" not in rest


def test_detail_stands_between_what_is_wrong_and_the_remedy() -> None:
    error = errors.FreeListTooLarge("--free-list=8G", "the machine has 4 GiB")
    assert str(error) == (
        "--free-list=8G: free list is larger than the memory available (the machine has 4 GiB); "
        "choose a smaller --free-list"
    )


def test_another_remedy_replaces_that_of_the_class() -> None:
    error = errors.NoPermission("/mnt", "too shy", "ask {thing} again")
    assert str(error) == "/mnt: permission denied (too shy); ask /mnt again"
    assert "owner" in str(errors.NoPermission("/mnt"))


def test_remedy_quotes_the_thing() -> None:
    assert str(errors.BackingInsecure("/srv/vault")).endswith("'chmod go-w /srv/vault'")


def test_unlock_failure_has_one_message_only() -> None:
    with pytest.raises(TypeError):
        errors.UnlockFailed("/srv/vault", "wrong passphrase")  # type: ignore[call-arg]


def test_fork_names_both_roots_and_how_to_accept_the_found_one() -> None:
    text = str(make(errors.ForkedFromRecord))
    assert "root aa at 3.4" in text
    assert "root bb at 3.1" in text
    assert f"--accept-root={'bb' * 32}" in text


@pytest.mark.parametrize(
    ("thing", "shown"),
    [
        ("/a b", "/a b"),
        ("/a\nb", "/a\\nb"),
        ("/a\x1b[2J", "/a\\x1b[2J"),
        (b"/a\xff", "/a\\udcff"),
        (pathlib.Path("/ä"), "/ä"),
        (os.fsdecode(b"\xfe"), "\\udcfe"),
    ],
)
def test_paths_of_any_bytes_print_on_one_line(thing: object, shown: str) -> None:
    assert errors.printable(thing) == shown


@pytest.mark.parametrize(
    ("number", "cls"),
    [
        (errno.ENOENT, errors.BackingGone),
        (errno.ELOOP, errors.BackingInsecure),
        (errno.EROFS, errors.BackingReadOnly),
        (errno.ENOSPC, errors.BackingFull),
        (errno.EACCES, errors.NoPermission),
        (errno.EIO, errors.BackingFailed),
    ],
)
def test_operating_system_errors_become_errors_of_encfsd(
    number: int, cls: type[errors.EncfsdError]
) -> None:
    error = errors.from_oserror("/srv/vault", OSError(number, os.strerror(number)))
    assert type(error) is cls
    assert str(error).startswith("/srv/vault: ")
