"""Fixtures for tests on a real mount."""

from pathlib import Path

import pytest

from tests.mount.harness import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """Return a fresh, empty volume; use it with `with volume.mounted() as mount:`."""
    fresh = Volume(tmp_path)
    fresh.init()
    return fresh
