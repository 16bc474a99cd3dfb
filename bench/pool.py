"""Measure take and give of each strategy beside what the pool competes with.

Each cell (strategy, shape, age, threads) is a process of its own; a round runs every cell once, in
an order by chance, so that whatever else the machine does hits all alike. Times are CPU time of the
thread for one take and one give; p99.9 is wall time and so shows preemption too. Writes
bench/results/pool.json (all samples), and a plot of medians over threads for each shape and age.

Run `make bench-drivers` first, or let `make bench-core` do it.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import itertools
import json
import math
import random
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import plots
from machine import machine
from samples import Sample

HERE = Path(__file__).parent
DRIVER = HERE.parent / "build-bench" / "bench" / "bench_pool"
RESULTS = HERE / "results"
STRATEGIES = (
    "pooling",
    "pooling-cow",
    "malloc",
    "malloc-tuned",
    "glibc",
    "glibc-tuned",
    "mapping",
    "file-list",
)
COLOURS = ("#036", "#39c", "#a00", "#e77", "#060", "#6b6", "#909", "#c80")
SHAPES = ("single", "burst")
AGES = ("warm", "fragmented")
THREADS = (1, 2, 4, 8, 16)
FONT = 'font-family="sans-serif" font-size="12"'


def run(arguments: Iterable[str]) -> list[Sample]:
    """Run one cell."""
    out = subprocess.run([DRIVER, *arguments], check=True, capture_output=True, text=True).stdout
    return [Sample(**json.loads(line)) for line in out.splitlines()]


def measure(rounds: int) -> list[Sample]:
    """Run all cells, all of them once a round."""
    cells = list(itertools.product(STRATEGIES, SHAPES, AGES, map(str, THREADS)))
    samples = []
    for number in range(rounds):
        random.shuffle(cells)
        samples += run(["wipe", str(number)])
        for cell in cells:
            samples += run([*cell, str(number)])
        print(f"round {number + 1} of {rounds}", flush=True)
    return samples


def values(samples: list[Sample], question: str, side: str) -> list[float]:
    """Return the figures of one cell."""
    return [s.value for s in samples if s.question == question and s.side == side]


def lines(title: str, curves: dict[str, list[tuple[int, list[float]]]]) -> str:
    """Draw medians over threads, with a bar from the smallest to the largest round."""
    width, height, left, top, right = 760, 380, 60, 40, 140
    everything = [v for curve in curves.values() for _, round_values in curve for v in round_values]
    low, high = math.log(min(everything) / 1.2), math.log(max(everything) * 1.2)

    def x(threads: int) -> float:
        return left + (width - left - right) * math.log2(threads) / math.log2(THREADS[-1])

    def y(value: float) -> float:
        return height - 40 - (height - 40 - top) * (math.log(value) - low) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20">{html.escape(title)}</text>',
    ]
    out += [
        f'<line x1="{left}" x2="{width - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        f' stroke="#ddd"/><text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end"'
        f' fill="#666">{tick:g}</text>'
        for tick in plots.ticks(low, high)
    ]
    out += [
        f'<text x="{x(n):.1f}" y="{height - 20}" text-anchor="middle" fill="#666">{n}</text>'
        for n in THREADS
    ]
    out.append(f'<text x="{(width - right) / 2:.0f}" y="{height - 4}" fill="#666">threads</text>')
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i]
        points = " ".join(f"{x(n):.1f},{y(statistics.median(v)):.1f}" for n, v in curve)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [
            f'<line x1="{x(n):.1f}" x2="{x(n):.1f}" y1="{y(min(v)):.1f}" y2="{y(max(v)):.1f}"'
            f' stroke="{colour}" stroke-opacity="0.6"/>'
            for n, v in curve
        ]
        out.append(
            f'<text x="{width - right + 10}" y="{top + 16 * i}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*out, "</svg>\n"])


def draw(samples: list[Sample]) -> None:
    """Write the plots."""
    for shape, age in itertools.product(SHAPES, AGES):
        title = f"{shape}, {age}: CPU time of a take and a give, ns (median; bar: all rounds)"
        curves = {
            name: [(n, values(samples, f"{shape}, {age}, {n}", name)) for n in THREADS]
            for name in STRATEGIES
        }
        (RESULTS / f"pool-{shape}-{age}.svg").write_text(lines(title, curves))
    for what, unit in (("p99.9", "ns, wall time"), ("resident", "KiB")):
        strips = [
            plots.Strip(
                f"{shape}, {age}: {name}",
                tuple(max(v, 1.0) for v in values(samples, f"{shape}, {age}, 2, {what}", name)),
                None,
            )
            for shape, age, name in itertools.product(SHAPES, AGES, STRATEGIES)
        ]
        (RESULTS / f"pool-{what}.svg").write_text(
            plots.strips(f"{what}, 2 threads, {unit}", strips)
        )


def table(samples: list[Sample]) -> None:
    """Print medians, with the smallest and the largest round."""
    print(
        f"{'':14}" + "".join(f"{f'{s} {a} {n}':>26}" for s in SHAPES for a in AGES for n in (1, 2))
    )
    for name in STRATEGIES:
        row = f"{name:14}"
        for shape, age, n in itertools.product(SHAPES, AGES, (1, 2)):
            v = values(samples, f"{shape}, {age}, {n}", name)
            row += f"{statistics.median(v):>12.1f} ({min(v):.1f}-{max(v):.1f})".rjust(26)
        print(row)
    for side in ("hot", "cold"):
        v = values(samples, "wiping a page", side)
        print(f"wiping a page, {side}: {statistics.median(v):.0f} ns ({min(v):.0f}-{max(v):.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    samples = measure(parser.parse_args().rounds)
    RESULTS.mkdir(exist_ok=True)
    document = {"machine": machine(RESULTS), "samples": [dataclasses.asdict(s) for s in samples]}
    (RESULTS / "pool.json").write_text(json.dumps(document, indent=0) + "\n")
    draw(samples)
    table(samples)


if __name__ == "__main__":
    main()
