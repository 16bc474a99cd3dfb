"""Measure take and give of each strategy beside what the pool competes with.

Each cell (strategy, shape, age, threads) is a process of its own; a round runs every cell once, in
an order by chance, so that whatever else the machine does hits all alike. Times are CPU time of the
thread for one take and one give, and what of it are the driver's own calls; p99.9 is wall time of
a take, about 25 ns of it reading the clock. Writes bench/results/pool.json (all samples), a plot of
medians over threads for each shape and age, and for two threads each round's CPU time, p99.9 and
resident memory.

Run `make bench-drivers` first, or let `make bench-core` do it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
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
SHAPES = ("single", "burst")
AGES = ("warm", "fragmented")
THREADS = (1, 2, 4, 8, 16)


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


def net(samples: list[Sample], question: str, side: str) -> list[float]:
    """Return the figures of one cell without what the driver itself cost in the same run."""
    driver = values(samples, f"{question}, driver", side)
    return [v - d for v, d in zip(values(samples, question, side), driver, strict=True)]


def draw(samples: list[Sample]) -> None:
    """Write the plots: time over threads, and each round's figures for two threads."""
    for shape, age in itertools.product(SHAPES, AGES):
        lines = {
            name: [
                (float(n), statistics.median(values(samples, f"{shape}, {age}, {n}", name)))
                for n in THREADS
            ]
            for name in STRATEGIES
        }
        plot = plots.curves(f"{shape}, {age}: ns of CPU for a take and a give", "threads", lines)
        (RESULTS / f"pool-{shape}-{age}.svg").write_text(plot)
    for file, what, unit in (
        ("cpu", "", "ns of CPU for a take and a give"),
        ("tail", ", p99.9", "ns of wall time for a take, 99.9th percentile"),
        ("resident", ", resident", "KiB resident while it runs"),
    ):
        strips = [
            plots.Strip(
                f"{shape}, {age}: {name}",
                tuple(max(v, 1.0) for v in values(samples, f"{shape}, {age}, 2{what}", name)),
                None,
            )
            for shape, age, name in itertools.product(SHAPES, AGES, STRATEGIES)
        ]
        (RESULTS / f"pool-{file}.svg").write_text(plots.strips(f"2 threads, {unit}", strips))


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
    for n in THREADS:
        question = f"single, warm, {n}"
        v, d = net(samples, question, "pooling"), values(samples, f"{question}, driver", "pooling")
        print(
            f"a hot pair of pooling on {n} threads without the driver: "
            f"{statistics.median(v):.1f} ns ({min(v):.1f}-{max(v):.1f}), "
            f"the driver {statistics.median(d):.1f} ns ({min(d):.1f}-{max(d):.1f})"
        )
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
