"""Strip plots as plain SVG: a row a question, a dot a round, a bar at the median."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics

WIDTH, LABEL, ROW, TOP = 900, 330, 22, 50


@dataclasses.dataclass(frozen=True)
class Strip:
    """One row. `bound`: where its target lies."""

    label: str
    values: tuple[float, ...]
    bound: float | None


def scale(strips: list[Strip]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis that shows everything."""
    values = [v for s in strips for v in (*s.values, *([s.bound] if s.bound else []))]
    return math.log(min(values) / 1.2), math.log(max(values) * 1.2)


def ticks(low: float, high: float) -> list[float]:
    """Return the round numbers on the axis: 1, 2, 5 of each decade."""
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    every = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return [tick for tick in every if low <= math.log(tick) <= high]


def strips(unit: str, rows: list[Strip]) -> str:
    """Draw the rows."""
    low, high = scale(rows)
    height = TOP + ROW * len(rows) + 10

    def x(value: float) -> float:
        return LABEL + (WIDTH - LABEL - 20) * (math.log(value) - low) / (high - low)

    font = 'font-family="sans-serif" font-size="12"'
    legend = f"{html.escape(unit)}; dot: a round, bar: median, dashed: target"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {font}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LABEL}" y="16">{legend}</text>',
    ]
    out += [
        f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 8}" y2="{height}" stroke="#ddd"/>'
        f'<text x="{x(tick):.1f}" y="{TOP - 14}" text-anchor="middle" fill="#666">{tick:g}</text>'
        for tick in ticks(low, high)
    ]
    for i, row in enumerate(rows):
        y = TOP + ROW * i + ROW / 2
        out.append(
            f'<text x="{LABEL - 10}" y="{y + 4}" text-anchor="end">{html.escape(row.label)}</text>'
        )
        if row.bound:
            out.append(
                f'<line x1="{x(row.bound):.1f}" x2="{x(row.bound):.1f}" y1="{y - 10}"'
                f' y2="{y + 10}" stroke="#c00" stroke-dasharray="3 2"/>'
            )
        out += [
            f'<circle cx="{x(value):.1f}" cy="{y}" r="3" fill="#36c" fill-opacity="0.45"/>'
            for value in row.values
        ]
        middle = x(statistics.median(row.values))
        out.append(
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 7}" y2="{y + 7}"'
            ' stroke="#036" stroke-width="2"/>'
        )
    return "\n".join([*out, "</svg>\n"])
