"""What the build makes and what it lists."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import encfsd
import encfsd._native

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "encfsd"


def listed(pattern: str) -> list[str]:
    """Return the files in encfsd/meson.build whose name matches."""
    return re.findall(rf"'({pattern})'", (PACKAGE / "meson.build").read_text())


def test_the_extension_has_the_stable_abi_and_functions() -> None:
    assert str(encfsd._native.__file__).endswith("/_native.abi3.so")
    assert encfsd._native.lib.ENCFSD_HAVE_IPSEC_MB in (0, 1)


def test_every_c_file_is_compiled() -> None:
    generated = {"_native.c"}
    assert set(listed(r"_\w+\.c")) - generated == {path.name for path in PACKAGE.glob("_*.c")}


def test_every_python_file_is_installed() -> None:
    installed = {
        path.name for path in PACKAGE.iterdir() if path.suffix in {".py", ".pyi", ".typed"}
    }
    assert set(listed(r"\w+\.(?:py|pyi|typed)")) == installed


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    meson = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())
    assert meson is not None
    assert {project["version"], meson[1], importlib.metadata.version("encfsd")} == {
        encfsd.__version__
    }
