"""The documents name what there is: files in the map, targets of links, tests that show claims."""

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if ".venv" not in path.parts
)


def test_map_names_every_file() -> None:
    named = re.findall(r"`(_?[a-z0-9*_]+\.(?:c|h|py))`", (ROOT / "docs/design.md").read_text())
    files = [*(ROOT / "encfsd").glob("*.c"), *(ROOT / "encfsd").glob("*.py")]
    sources = {path.name for path in files} - {"__init__.py"}
    missing = {
        name for name in sources if not any(fnmatch.fnmatch(name, pattern) for pattern in named)
    }
    assert missing == set()
    gone = {name for name in named if "*" not in name and not (ROOT / "encfsd" / name).exists()}
    assert gone == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_claims_name_tests_that_exist() -> None:
    text = (ROOT / "docs/threat-model.md").read_text()
    paths = set(re.findall(r"`((?:tests|bench)/[^` ]+)`", text))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_invariants_name_tests_that_exist() -> None:
    text = (ROOT / "docs/invariants.md").read_text()
    named = re.findall(r"`([a-z_/]+\.(?:c|py))::([a-z0-9_]+)`", text)
    assert len(named) > 50
    wrong = []
    for file, name in named:
        path = ROOT / "tests" / (file if "/" in file else f"native/{file}")
        definition = f"TEST({name})" if file.endswith(".c") else f"def test_{name}("
        if not path.exists() or definition not in path.read_text():
            wrong.append(f"{file}::{name}")
    assert wrong == []
