"""Each sealing backend in a process of its own: see core_against_model.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.format_backends import BACKENDS, run_with


@pytest.mark.parametrize("backend", BACKENDS)
def test_core_against_model(backend: str) -> None:
    run_with(backend, Path(__file__).with_name("core_against_model.py"))
