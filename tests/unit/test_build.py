"""What the build makes and what it lists."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import encfsd
import encfsd._native

ROOT = Path(__file__).parents[2]


def test_the_extension_has_the_stable_abi_and_functions() -> None:
    assert str(encfsd._native.__file__).endswith("/_native.abi3.so")
    assert encfsd._native.lib.ENCFSD_HAVE_IPSEC_MB in (0, 1)


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    meson = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())
    assert meson is not None
    assert {project["version"], meson[1], importlib.metadata.version("encfsd")} == {
        encfsd.__version__
    }
