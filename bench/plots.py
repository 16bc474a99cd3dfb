"""Plain SVG for a README, light or dark: strips of ratios, candidates side by side, courses.

A row is a question; all axes of values are logarithmic.
"""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

WIDTH, ROW, TOP = 900, 22, 50
LETTER = 6.1  # how wide one is, more or less

# Readable on white and on the near-black of a dark page; chosen also for the colour-blind.
COLOURS = ("#3b82d6", "#e08a1e", "#2fa572", "#d1539b", "#8d6fd1", "#c2482f", "#8a9a2b", "#7d8590")
STYLE = """<style>
 text { fill: #1f2328; } .page { fill: #ffffff; } .grid { stroke: #d8dde3; } .dim { fill: #656d76; }
 .dot { fill: #3366cc; } .median { stroke: #003366; } .bound { stroke: #cc0000; }
 @media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .page { fill: #0d1117; }
  .grid { stroke: #30363d; } .dim { fill: #8d96a0; }
  .dot { fill: #79a8ff; } .median { stroke: #cfe2ff; } .bound { stroke: #ff7b72; }
 }
</style>"""


@dataclasses.dataclass(frozen=True)
class Strip:
    """One row of `strips`. `bound`: where its target lies."""

    label: str
    values: tuple[float, ...]
    bound: float | None


@dataclasses.dataclass(frozen=True)
class Beside:
    """One row of `beside`: the rounds of each candidate."""

    label: str
    values: Mapping[str, tuple[float, ...]]


class _Scale:
    """A logarithmic axis from one pixel to another that shows all of `values`."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        positive = [value for value in values if value > 0]
        self._low, self._high = math.log(min(positive) / 1.2), math.log(max(positive) * 1.2)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return self._start + (self._end - self._start) * share

    def ticks(self) -> list[float]:
        """Return the round numbers on the axis: 1, 2, 5 of each decade."""
        first, last = self._low / math.log(10), self._high / math.log(10)
        decades = range(math.floor(first), math.ceil(last) + 1)
        every = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [tick for tick in every if self._low <= math.log(tick) <= self._high]


def _line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {attributes}/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(text)}</text>'


def _page(height: int, body: list[str]) -> str:
    font = 'font-family="sans-serif" font-size="12"'
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', STYLE]
    return "\n".join([*head, '<rect class="page" width="100%" height="100%"/>', *body, "</svg>\n"])


def _room(labels: Iterable[str]) -> float:
    """Return how many pixels labels need to the left of the axis."""
    return 20 + LETTER * max(map(len, labels))


def _rows(x: _Scale, labels: Sequence[str], top: int) -> tuple[int, list[str]]:
    """Return the height of a picture with a row for each label, and its grid and labels."""
    left = _room(labels) - 10
    height = top + ROW * len(labels) + 10
    body = []
    for tick in x.ticks():
        body.append(_line(x(tick), top - 8, x(tick), height, 'class="grid"'))
        body.append(_text(x(tick), top - 14, f"{tick:g}", 'class="dim" text-anchor="middle"'))
    body += [
        _text(left, top + ROW * i + ROW / 2 + 4, label, 'text-anchor="end"')
        for i, label in enumerate(labels)
    ]
    return height, body


def _legend(names: Sequence[str], y: int) -> list[str]:
    """Return a line that tells whose colour is which."""
    body, left = [], 20.0
    for name, colour in zip(names, COLOURS, strict=False):
        body.append(f'<circle cx="{left}" cy="{y - 4}" r="4" fill="{colour}"/>')
        body.append(_text(left + 8, y, name))
        left += 30 + 6.6 * len(name)
    return body


def strips(unit: str, rows: list[Strip]) -> str:
    """Draw a dot a round, a bar at the median and a dashed line at the target."""
    values = [v for s in rows for v in (*s.values, *([s.bound] if s.bound else []))]
    labels = [row.label for row in rows]
    x = _Scale(values, _room(labels), WIDTH - 20)
    height, body = _rows(x, labels, TOP)
    body.append(_text(_room(labels), 16, f"{unit}; dot: a round, bar: median, dashed: target"))
    for i, row in enumerate(rows):
        y = TOP + ROW * i + ROW / 2
        if row.bound:
            at = x(row.bound)
            body.append(_line(at, y - 10, at, y + 10, 'class="bound" stroke-dasharray="3 2"'))
        body += [
            f'<circle class="dot" cx="{x(value):.1f}" cy="{y}" r="3" fill-opacity="0.45"/>'
            for value in row.values
        ]
        middle = x(statistics.median(row.values))
        body.append(_line(middle, y - 7, middle, y + 7, 'class="median" stroke-width="2"'))
    return _page(height, body)


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def beside(unit: str, rows: list[Beside]) -> str:
    """Draw a dot at each candidate's median, on a line over its rounds."""
    names = _names(row.values for row in rows)
    labels = [row.label for row in rows]
    all_rounds = (rounds for row in rows for rounds in row.values.values())
    x = _Scale((v for rounds in all_rounds for v in rounds), _room(labels), WIDTH - 20)
    height, body = _rows(x, labels, TOP + 20)
    body.append(_text(20, 40, f"{unit}; dot: median, line: all rounds"))
    body += _legend(names, 16)
    for i, row in enumerate(rows):
        y = TOP + 20 + ROW * i + ROW / 2
        for name, values in row.values.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            ends = x(min(values)), x(max(values))
            body.append(_line(ends[0], y, ends[1], y, f'stroke="{colour}" stroke-opacity="0.6"'))
            middle = x(statistics.median(values))
            body.append(f'<circle cx="{middle:.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return _page(height, body)


def curves(unit: str, along: str, lines: Mapping[str, list[tuple[float, float]]]) -> str:
    """Draw how a value goes on, a line for each candidate."""
    return stacked(along, {unit: lines}, 310)


def stacked(
    along: str, panels: Mapping[str, Mapping[str, list[tuple[float, float]]]], tall: int = 220
) -> str:
    """Draw how values go on, one above the other on the same axis; a panel's name is its unit."""
    left, top = 60, 60
    names = _names(panels.values())
    end = max(at for lines in panels.values() for line in lines.values() for at, _ in line)

    def x(at: float) -> float:
        return left + (WIDTH - left - 20) * at / end

    body = _legend(names, 16)
    for unit, lines in panels.items():
        bottom = top + tall
        y = _Scale((value for line in lines.values() for _, value in line), bottom, top)
        body.append(_text(left, top - 20, unit))
        for tick in y.ticks():
            body.append(_line(left, y(tick), WIDTH - 20, y(tick), 'class="grid"'))
            label = _text(left - 6, y(tick) + 4, f"{tick:g}", 'class="dim" text-anchor="end"')
            body.append(label)
        for name, line in lines.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line)
            stroke = f'stroke="{colour}" stroke-width="1.5"'
            body.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        top = bottom + 50
    bottom = top - 50
    body += [
        _text(x(at), bottom + 18, f"{at:.0f}" if at >= 10 else f"{at:g}", 'text-anchor="end"')
        for at in (end / 4, end / 2, end * 3 / 4, end)
    ]
    body.append(_text(left, bottom + 18, along))
    return _page(bottom + 30, body)
