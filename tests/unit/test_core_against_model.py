"""Each sealing backend in a process of its own: see core_against_model.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("core_against_model.py")


@pytest.mark.parametrize("backend", ["openssl", "ipsec-mb"])
def test_core_against_model(backend: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)],
        cwd=TESTS.parent.parent.parent,
        env={**os.environ, "ENCFSD_CRYPTO": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and backend != "openssl":
        pytest.skip(f"{backend} cannot be used here")
    assert result.returncode == 0, result.stdout
