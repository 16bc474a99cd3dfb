"""Where passphrases and key files come from: a terminal or a file, never argv or environment.

What counts as the secret is part of the format (docs/format-keys.md):

- A passphrase is text. One trailing newline of a file is dropped, no other byte. The text is
  normalised to Unicode NFC, so that the same keys typed on another system open the volume, and
  must be 1 to 1024 bytes of UTF-8 then.
- A key file is 32 to 1024 bytes that are not text. It is used as it is. A key file that is text
  is treated as a passphrase: nobody can tell a random text from a memorable one, and stretching
  a random one costs a moment only.
"""

from __future__ import annotations

import getpass
import logging
import os
import stat
import unicodedata
import warnings

from encfsd.errors import SecretRefused, printable
from encfsd.keys import Secret, SecretBytes, SecretKind

MAX_SIZE = 1024
MIN_KEY_FILE_SIZE = 32

_TERMINAL = "passphrase"
_OLD_OPTIONS = "--passphrase-file or --key-file"
NEW_OPTIONS = "--new-passphrase-file or --new-key-file"
_log = logging.getLogger(__name__)


def from_terminal(prompt: str, *, twice: bool = False, instead: str = _OLD_OPTIONS) -> Secret:
    """Ask for a passphrase on the terminal, `twice` for a new one. The caller wipes it.

    Raises SecretRefused if there is no terminal, or no entry, naming the options to use `instead`,
    or if the two entries differ.
    """
    first = _ask(prompt, instead)
    if twice and _ask(f"{prompt} (again)", instead) != first:
        raise SecretRefused(_TERMINAL, "the two entries differ", "enter the same one twice")
    try:
        return _passphrase(first, _TERMINAL)
    except UnicodeEncodeError:
        raise SecretRefused(_TERMINAL, "not valid text") from None


def from_passphrase_file(path: str) -> Secret:
    """Read a passphrase from a file, a pipe or a device. The caller wipes it."""
    with _read(path) as data:
        return _passphrase_bytes(data, path)


def from_key_file(path: str) -> Secret:
    """Read a key file: random bytes, or else a passphrase. The caller wipes it."""
    with _read(path) as data:
        if _is_text(data):
            return _passphrase_bytes(data, path)
        if len(data) < MIN_KEY_FILE_SIZE:
            raise SecretRefused(path, f"{len(data)} bytes are too few for a key file")
        if len(data) > MAX_SIZE:
            raise SecretRefused(path, "too large")
        return Secret(SecretKind.RANDOM, SecretBytes(data))


def _ask(prompt: str, instead: str) -> str:
    try:
        with warnings.catch_warnings():
            # Without a terminal getpass would read standard input and echo: refuse instead.
            warnings.simplefilter("error", getpass.GetPassWarning)
            return getpass.getpass(f"{prompt}: ")
    except getpass.GetPassWarning:
        raise SecretRefused(_TERMINAL, "no terminal to ask on", f"use {instead}") from None
    except EOFError:
        raise SecretRefused(_TERMINAL, "the input ended", f"enter one, or use {instead}") from None
    except UnicodeDecodeError:
        raise SecretRefused(_TERMINAL, "not valid text") from None


def _read(path: str) -> SecretBytes:
    """Read a file of any kind whole: at most the longest passphrase and its newline."""
    data = SecretBytes(MAX_SIZE + 2)  # one byte more than that, to see that there is more
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
                _log.warning(
                    "%s: other users may read this secret (mode %04o); 'chmod 600 %s' ends that",
                    printable(path),
                    stat.S_IMODE(found.st_mode),
                    printable(path),
                )
            size = _fill(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        remedy = "check that the file exists and that this user can read it"
        raise SecretRefused(path, error.strerror or str(error), remedy) from None
    if size == len(data):
        data.wipe()
        raise SecretRefused(path, "too large")
    del data[size:]
    return data


def _fill(fd: int, data: SecretBytes) -> int:
    size = 0
    with memoryview(data) as view:
        while size < len(view):
            count = os.readv(fd, [view[size:]])
            if count == 0:
                break
            size += count
    return size


def _is_text(data: SecretBytes) -> bool:
    """Say whether all of it is UTF-8 without control characters, tab and newline excepted."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return not any(unicodedata.category(char) == "Cc" and char not in "\t\r\n" for char in text)


def _passphrase_bytes(data: SecretBytes, where: str) -> Secret:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise SecretRefused(where, "not UTF-8 text") from None
    return _passphrase(text.removesuffix("\n"), where)


def _passphrase(text: str, where: str) -> Secret:
    data = SecretBytes(unicodedata.normalize("NFC", text).encode())
    if not data:
        raise SecretRefused(where, "empty")
    if len(data) > MAX_SIZE:
        data.wipe()
        raise SecretRefused(where, "too long")
    return Secret(SecretKind.PASSPHRASE, data)
