"""What the checks of test_semantics_*.py are made of, and the child process that runs one.

A check is a generator that works in a fresh folder, its working directory, and yields what it saw.
It asserts what it knows to be right. The same check runs on ext4 too, where the machine has one,
and must have seen the same there: so even what no standard says is as programs are used to.

    python posix_checks.py FILE NAME FOLDER REFERENCE [ARGUMENT...]

runs the check NAME of FILE in FOLDER, and in REFERENCE if that is not empty. This module imports
nothing that is slow to import, and so should the files of checks, as each check pays for it.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import functools
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Check = Callable[..., Iterator[object]]
Test = Callable[["Ground"], None]

ROOT = os.geteuid() == 0
USER, OTHER = 65534, 4711  # two ordinary users, and groups

RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000

_REALTIME_COARSE = 5  # not in the module time
_libc = ctypes.CDLL(None, use_errno=True)


# ---- what tests see ----


@dataclass(frozen=True)
class Ground:
    """Where checks run: a folder on a mount, and one on a local ext4 if there is one."""

    folder: Path
    reference: Path | None

    def run(self, check: Check, *arguments: str, same: bool = False, timeout: float = 60.0) -> None:
        """Run a check in a child process; fail the test if it or the comparison fails."""
        import pytest  # noqa: PLC0415

        from tests.mount.harness import run  # noqa: PLC0415

        reference = str(self.reference) if same and self.reference else ""
        file = check.__globals__["__file__"]
        command = [sys.executable, "-I", __file__, file, check.__name__]
        command += [str(self.folder), reference, *arguments]
        result = run(command, timeout=timeout, check=False)
        if result.returncode != 0:
            pytest.fail(result.stdout + result.stderr, pytrace=False)


def check(
    *, root: bool = False, same: bool = True, timeout: float = 60.0
) -> Callable[[Check], Test]:
    """Make a test of a check.

    `root`: it becomes other users or makes devices. `same`: what it yields must be the same on
    ext4. `timeout`: seconds for both runs.
    """

    def make(function: Check) -> Test:
        @functools.wraps(function)
        def test(ground: Ground) -> None:
            import pytest  # noqa: PLC0415

            if root and not ROOT:
                pytest.skip("needs root")
            ground.run(function, same=same, timeout=timeout)

        # Else pytest would look for the fixtures of the check, which has none.
        del test.__wrapped__
        setattr(test, "check", function)  # noqa: B010
        return test

    return make


# ---- what checks use ----


def outcome(function: Callable[..., object], *args: Any, **named: Any) -> object:
    """Return what a call returned, or the name of its error."""
    try:
        return function(*args, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def fails(function: Callable[..., object], *args: Any, **named: Any) -> str | None:
    """Return the name of a call's error, or None if it had none."""
    try:
        function(*args, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def opens(path: str | bytes, flags: int, mode: int = 0o666) -> str | None:
    """Open and close a file; return the name of the error or None."""
    return fails(lambda: os.close(os.open(path, flags, mode)))


def write(path: str | bytes, data: bytes | str = b"") -> None:
    """Make a file with these contents."""
    with open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def read(path: str | bytes) -> bytes:
    """Return the contents of a file."""
    with open(path, "rb") as file:
        return file.read()


def system(name: str, *args: Any) -> int:
    """Call a function of libc that returns -1 for an error; raise OSError then."""
    function = getattr(_libc, name)
    function.restype = ctypes.c_int
    result: int = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


def rename2(old: str, new: str, flags: int) -> None:
    """Rename with flags."""
    system("renameat2", AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def in_child(function: Callable[[], object]) -> Any:
    """Run a function in a process of its own; return its result, a plain value."""
    return start(function)()


def start(function: Callable[[], object]) -> Callable[[], Any]:
    """Start a function in a process of its own; return what waits for its result."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(here, repr(function()).encode())
            status = 0
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(here)

    def wait() -> Any:
        with open(there, "rb") as pipe:
            text = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        if status != 0:
            sys.exit(1)  # it has said why
        return ast.literal_eval(text)

    return wait


def as_user(
    uid: int, function: Callable[[], object], *, gid: int | None = None, groups: Sequence[int] = ()
) -> Any:
    """Run a function as another user in a process of its own; return its result."""

    def child() -> object:
        os.setgroups(groups)
        os.setgid(uid if gid is None else gid)
        os.setuid(uid)
        return function()

    return in_child(child)


def tick() -> None:
    """Return when a time stamp taken now differs from all taken before."""
    # File systems stamp with the coarse clock; two steps, as clocks of two kinds may be at work.
    for _ in range(2):
        before = time.clock_gettime_ns(_REALTIME_COARSE)
        while time.clock_gettime_ns(_REALTIME_COARSE) == before:
            time.sleep(0.001)


# ---- the child ----


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _seen(function: Check, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Run a check in a folder of its name, in a process of its own; return what it yielded."""

    def child() -> list[str]:
        own = folder / function.__name__
        own.mkdir(exist_ok=True)
        os.chdir(own)
        os.umask(0o022)
        return [repr(value) for value in function(*arguments)]

    seen: list[str] = in_child(child)
    return seen


def _main(file: str, name: str, folder: str, reference: str, *arguments: str) -> int:
    function = getattr(_load(file), name)
    function = getattr(function, "check", function)
    found = _seen(function, Path(folder), arguments)
    if not reference:
        return 0
    expected = _seen(function, Path(reference), arguments)
    wrong = [
        f"{name}, value {number}: {here}\n    on ext4: {there}"
        for number, (here, there) in enumerate(zip(found, expected, strict=True), 1)
        if here != there
    ]
    print(*wrong, sep="\n", end="")
    return bool(wrong)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.modules["tests.mount.posix_checks"] = sys.modules["__main__"]
    sys.exit(_main(*sys.argv[1:]))
