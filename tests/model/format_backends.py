"""Runs a file of tests with one sealing backend, in a process of its own: it is chosen only once.

Such a file calls `choose` when it is imported. Its name does not begin with `test_`, so that pytest
leaves it to the test that calls `run_with`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from encfsd.errors import UsageError
from encfsd.native import ffi, lib
from encfsd.volume import setup_crypto

BACKENDS = ("openssl", "ipsec-mb")
_VARIABLE = "ENCFSD_CRYPTO"
_REPOSITORY = Path(__file__).parent.parent.parent


def choose() -> str:
    """Choose the backend that the environment names; skip the file if it cannot be used here."""
    backend = os.environ[_VARIABLE]
    try:
        setup_crypto(backend)
    except UsageError as error:
        pytest.skip(str(error), allow_module_level=True)
    assert ffi.string(lib.seal_backend_name()).decode() == backend
    return backend


def run_with(backend: str, tests: Path) -> None:
    """Run the tests of a file; fail with their output if one of them fails."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=_REPOSITORY,
        env={**os.environ, _VARIABLE: backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and backend != BACKENDS[0]:
        pytest.skip(f"{backend} cannot be used here")
    assert result.returncode == pytest.ExitCode.OK, result.stdout
