"""What the build makes and what it lists."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import encfsd
import encfsd._native

ROOT = Path(__file__).parents[2]


def test_the_extension_has_the_stable_abi_and_functions() -> None:
    assert str(encfsd._native.__file__).endswith("/_native.abi3.so")
    assert encfsd._native.lib.ENCFSD_HAVE_IPSEC_MB in (0, 1)


def test_what_is_installed_beside_the_package() -> None:
    plan = json.loads((ROOT / "build/meson-info/intro-install_plan.json").read_text())
    names = {entry["destination"] for kind in plan.values() for entry in kind.values()}
    data = "{datadir}/share"  # where meson-python takes {datadir} for the prefix
    assert {
        f"{data}/man/man1/encfsd.1",
        f"{data}/man/man8/mount.encfsd.8",
        f"{data}/encfsd/encfsd@.service",
    } <= names


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    meson = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())
    assert meson is not None
    assert {project["version"], meson[1], importlib.metadata.version("encfsd")} == {
        encfsd.__version__
    }
