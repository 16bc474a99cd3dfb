"""What counts as the secret, and that it comes from a terminal or a file only."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encfsd import errors, secrets_input
from encfsd.keys import Secret, SecretKind

RANDOM = bytes(range(0x80, 0xA0)) + b"\0"  # 33 bytes, not UTF-8


def write(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "secret"
    path.write_bytes(data)
    path.chmod(0o600)
    return str(path)


def passphrase(secret: Secret) -> bytes:
    assert secret.kind is SecretKind.PASSPHRASE
    return bytes(secret.data)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"hunter2", b"hunter2"),
        (b"hunter2\n", b"hunter2"),
        (b"hunter2\n\n", b"hunter2\n"),
        (b"hunter2\r\n", b"hunter2\r"),
        (b" two words ", b" two words "),
        (b"\n\n", b"\n"),
        ("Gr\u00f6\u00dfe".encode(), "Gr\u00f6\u00dfe".encode()),
        ("Gro\u0308\u00dfe".encode(), "Gr\u00f6\u00dfe".encode()),
        (b"x" * 1024 + b"\n", b"x" * 1024),
    ],
)
def test_passphrase_file(tmp_path: Path, contents: bytes, expected: bytes) -> None:
    assert passphrase(secrets_input.from_passphrase_file(write(tmp_path, contents))) == expected


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"x" * 1025, "too long"),
        (b"x" * 1026, "too large"),
        # Decomposed, it would shrink to a size that is allowed: never use a part of a file.
        ("o\u0308".encode() * 400, "too large"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_passphrase_file_refused(tmp_path: Path, contents: bytes, problem: str) -> None:
    with pytest.raises(errors.SecretRefused) as caught:
        secrets_input.from_passphrase_file(write(tmp_path, contents))
    assert caught.value.detail == problem


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.SecretRefused, match=r"/nothing: .*No such file") as caught:
        secrets_input.from_key_file(str(tmp_path / "nothing"))
    assert "1024" not in str(caught.value)


@pytest.mark.parametrize("size", [32, 33, 1024])
def test_key_file_is_used_as_it_is(tmp_path: Path, size: int) -> None:
    data = (b"\xff\n" * 512)[-size:]
    secret = secrets_input.from_key_file(write(tmp_path, data))
    assert (secret.kind, bytes(secret.data)) == (SecretKind.RANDOM, data)


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (b"\xff" * 31, "31 bytes are too few for a key file"),
        (b"\xff" * 1025, "too large"),
        (b"\xff" * 5000, "too large"),
        (b"", "empty"),
    ],
)
def test_key_file_refused(tmp_path: Path, contents: bytes, problem: str) -> None:
    with pytest.raises(errors.SecretRefused) as caught:
        secrets_input.from_key_file(write(tmp_path, contents))
    assert caught.value.detail == problem


@pytest.mark.parametrize("text", [b"short", b"a memorable sentence of more than 32 bytes\n"])
def test_key_file_that_is_text_is_stretched_like_a_passphrase(tmp_path: Path, text: bytes) -> None:
    secret = secrets_input.from_key_file(write(tmp_path, text))
    assert passphrase(secret) == text.removesuffix(b"\n")


def test_both_options_read_the_same_passphrase(tmp_path: Path) -> None:
    path = write(tmp_path, "Gro\u0308\u00dfe\n".encode())
    assert secrets_input.from_key_file(path) == secrets_input.from_passphrase_file(path)


@given(st.binary(max_size=1100))
def test_no_contents_raise_anything_but_the_defined_error(contents: bytes) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, contents)
    os.close(write_end)
    try:
        secret = secrets_input.from_key_file(f"/dev/fd/{read_end}")
    except errors.SecretRefused:
        assert not 32 <= len(contents) <= 1024
    else:
        assert 1 <= len(secret.data) <= 1024
        if secret.kind is SecretKind.RANDOM:
            assert bytes(secret.data) == contents
    finally:
        os.close(read_end)


def test_file_that_others_may_read_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, b"hunter2")
    secrets_input.from_passphrase_file(path)
    assert caplog.text == ""
    Path(path).chmod(0o644)
    assert passphrase(secrets_input.from_passphrase_file(path)) == b"hunter2"
    told = f"{path}: other users may read this secret (mode 0644); 'chmod 600 {path}' ends that"
    assert told in caplog.text
    assert "hunter2" not in caplog.text


# The terminal


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    prompts: list[str] = []
    left = list(answers)

    def fake(prompt: str) -> str:
        prompts.append(prompt)
        return left.pop(0)

    monkeypatch.setattr(getpass, "getpass", fake)
    return prompts


def test_terminal_asks_once_to_open_and_twice_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answer(monkeypatch, "o\u0308") == []
    assert passphrase(secrets_input.from_terminal("Passphrase")) == "\u00f6".encode()
    prompts = answer(monkeypatch, "x", "x")
    assert passphrase(secrets_input.from_terminal("New passphrase", twice=True)) == b"x"
    assert prompts == ["New passphrase: ", "New passphrase (again): "]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (("x", "y"), "the two entries differ"),
        (("", ""), "empty"),
        (("\udcff", "\udcff"), "not valid text"),
        (("x" * 1025, "x" * 1025), "too long"),
    ],
)
def test_entries_refused(
    answers: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, *answers)
    with pytest.raises(errors.SecretRefused) as caught:
        secrets_input.from_terminal("Passphrase", twice=True)
    assert caught.value.detail == problem
    assert ("1 to 1024 bytes" in str(caught.value)) == (problem != "the two entries differ")


def test_an_input_that_ends_is_not_a_missing_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: str) -> str:
        raise EOFError  # as of Ctrl-D

    monkeypatch.setattr(getpass, "getpass", end)
    with pytest.raises(errors.SecretRefused) as caught:
        secrets_input.from_terminal("Passphrase")
    assert caught.value.detail == "the input ended"
    assert caught.value.remedy == "enter one, or use --passphrase-file or --key-file"


ASK = """
from encfsd import errors, secrets_input
try:
    with secrets_input.from_terminal("Passphrase") as secret:
        print("got", bytes(secret.data))
except errors.SecretRefused as error:
    print(f"{error.detail}; {error.remedy}")
"""


def test_without_a_terminal_nothing_is_read_from_standard_input() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ASK],
        input=b"hunter2\n",
        capture_output=True,
        start_new_session=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == b"no terminal to ask on; use --passphrase-file or --key-file\n"


def test_real_terminal_does_not_echo() -> None:
    controller, terminal = os.openpty()
    take_terminal = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", take_terminal + ASK],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    seen = b""
    try:
        while b"got" not in seen:
            seen += os.read(controller, 1024)
            if seen.endswith(b"Passphrase: "):
                os.write(controller, b"hunter2\n")
                seen += b"|"
        child.wait(60)
    finally:
        child.kill()
        child.wait()
        os.close(controller)
        os.close(terminal)
    assert seen.replace(b"\r", b"").startswith(b"Passphrase: |\ngot")
