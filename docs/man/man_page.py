"""Turn a manual page in Markdown into one for man(1): `man_page.py SOURCE TARGET`, for the build.

Knows what encfsd.1.md uses and no more: pandoc's title line, sections, paragraphs, lines that begin
with a bar, definitions, tables of two columns, indented examples; bold, italic, code, backslashes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_FONTS = {"**": r"\fB", "*": r"\fI", "`": r"\fB"}
_INLINE = re.compile(r"\\(?P<literal>.)|(?P<mark>\*\*|\*|`)")
_CELLS = re.compile(r"\| (.*?) \| (.*) \|")


def _literal(text: str) -> str:
    return text.replace("\\", r"\(rs").replace("-", r"\-")


def _inline(text: str) -> str:
    """Return a line of roff: text whose marks are turned into changes of the font."""
    out, end, now = "", 0, ""
    for found in _INLINE.finditer(text):
        out += _literal(text[end : found.start()])
        end = found.end()
        mark = found["mark"]
        if mark is None:
            out += _literal(found["literal"])
        elif now in ("", mark):
            out += r"\fR" if now else _FONTS[mark]
            now = "" if now else mark
        else:
            out += mark  # within other marks it stands for itself
    out += _literal(text[end:])
    return rf"\&{out}" if out.startswith((".", "'")) else out


def _block(lines: list[str]) -> list[str]:
    """Return what a run of lines without an empty one becomes."""
    first = lines[0]
    if first.startswith("# "):
        return [f".SH {first[2:]}"]
    if first.startswith("    "):
        return [".PP", ".in +4n", ".EX", *(_inline_example(line) for line in lines), ".EE", ".in"]
    if first.startswith("| **"):
        return [".PP", ".nf", *(_inline(line[2:]) for line in lines), ".fi"]
    if first.startswith("|"):
        rows = [cells.groups() for cells in map(_CELLS.fullmatch, lines[2:]) if cells]
        return [line for term, text in rows for line in (".TP", rf"\fB{term}\fR", _inline(text))]
    if len(lines) > 1 and lines[1].startswith(":   "):
        return [".TP", _inline(first), *(_inline(line[4:]) for line in lines[1:])]
    return [".PP", *map(_inline, lines)]


def _inline_example(line: str) -> str:
    text = _literal(line[4:])
    return rf"\&{text}" if text.startswith((".", "'")) else text


def man_page(source: str) -> str:
    """Return the page for man(1)."""
    title, _, body = source.partition("\n")
    head = re.fullmatch(r"% (\w+)\((\d)\) \| (.+)", title)
    if head is None:
        raise ValueError(f"not a title: {title}")
    out = [f'.TH {head[1]} {head[2]} "" "" "{head[3]}"']
    for block in re.split(r"\n{2,}", body.strip("\n")):
        out += _block(block.split("\n"))
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(man_page(Path(sys.argv[1]).read_text("utf-8")), "utf-8")
