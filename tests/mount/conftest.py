"""Fixtures for tests on a real mount."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount import harness
from tests.mount.harness import Volume, run
from tests.mount.posix_checks import ROOT, Ground


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """Return a fresh, empty volume; use it with `with volume.mounted() as mount:`.

    It opens with a key file, in a fraction of the time that a passphrase takes.
    """
    fresh = Volume(tmp_path, key_file=True)
    fresh.init()
    return fresh


@pytest.fixture
def passphrase_volume(tmp_path: Path) -> Volume:
    """Return a volume that opens with a passphrase."""
    fresh = Volume(tmp_path)
    fresh.init()
    return fresh


def _is_ext4(folder: Path) -> bool:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[2] == number and " - ext4 " in line for line in lines)


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Return the mount that all checks share; when they are done the volume must be sound."""
    volume = Volume(tmp_path_factory.mktemp("ground"), key_file=True)
    volume.init()
    reference = tmp_path_factory.mktemp("reference")
    reference.chmod(0o755)
    options = ["-o", "allow_other,dev,suid"] if ROOT else []
    with volume.mounted(*options, lifetime=7200.0):
        run(["chmod", "755", volume.point])
        yield Ground(volume.point, reference if _is_ext4(reference) else None)
    volume.encfsd("verify", *volume.unlock, volume.source)
    log = volume.log.read_text()
    assert "failed" not in log and "error" not in log.lower(), log
    assert (", fast path, " in log) == harness.fast_path, log
