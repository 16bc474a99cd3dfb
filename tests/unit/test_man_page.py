"""The manual page as man(1) wants it."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "man"
man_page = runpy.run_path(str(FOLDER / "man_page.py"))["man_page"]
TITLE = "% X(1) | Commands\n\n"


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        ("# NAME", [".SH NAME"]),
        ("a **b** *c* `d`-e", [".PP", r"a \fBb\fR \fIc\fR \fBd\fR\-e"]),
        (r"**\--a**\[*b*\]", [".PP", r"\fB\-\-a\fR[\fIb\fR]"]),
        ("`a*b\\.`", [".PP", r"\fBa*b.\fR"]),
        ("two\n.lines", [".PP", "two", r"\&.lines"]),
        ("| **a** b\n| **c**", [".PP", ".nf", r"\fBa\fR b", r"\fBc\fR", ".fi"]),
        (
            "    a-b *c*\n    'd\\",
            [".PP", ".in +4n", ".EX", r"a\-b *c*", r"\&'d\(rs", ".EE", ".in"],
        ),
        ("**a**, **b**\n:   text\n    more", [".TP", r"\fBa\fR, \fBb\fR", "text", "more"]),
        ("| c | m |\n| --- | --- |\n| 1 | *x* |", [".TP", r"\fB1\fR", r"\fIx\fR"]),
    ],
)
def test_blocks(block: str, lines: list[str]) -> None:
    assert man_page(f"{TITLE}{block}\n").splitlines() == ['.TH X 1 "" "" "Commands"', *lines]


def test_a_page_without_title_is_refused() -> None:
    with pytest.raises(ValueError, match="not a title"):
        man_page("# NAME\n")


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_has_nothing_to_say_and_shows_what_was_written() -> None:
    page = man_page((FOLDER / "encfsd.1.md").read_text())
    shown = subprocess.run(
        ["groff", "-man", "-ww", "-k", "-Tutf8", "-P-c", "-rLL=200n"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stderr == ""
    text = re.sub(".\b", "", shown.stdout)  # bold and underlined letters are typed twice
    for line in ("encfsd key add [options] SRC\n", "--free-list=SIZE\n", "$XDG_RUNTIME_DIR/encfsd"):
        assert line in text
    assert not re.search(r"\*\*|\\", text)
