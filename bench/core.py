"""Measure the core and the namespace beside their limits. Run it with `make bench-core`.

Each driver does rounds; a round measures encfsd and what it is compared with one right after the
other. So a ratio is taken within a round, and a row of the table is the median of the rounds'
ratios with the smallest and the largest: on a shared machine ratios can be trusted, times cannot.
Beside it stands the ratio of the two sides' best rounds, which others on the machine disturbed
least.
Writes bench/results/core.json (samples and the machine they came from) and two plots beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import plots
from machine import machine
from samples import Sample

HERE = Path(__file__).parent
DRIVERS = HERE.parent / "build-bench" / "bench"
RESULTS = HERE / "results"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a question's median is held against."""

    question: str
    against: str | None  # side that is the limit; None: the figure itself counts
    bound: float
    before: str | None = None  # question of encfsd itself that is the limit
    at_least: bool = False  # a share of the limit's speed, not a multiple of its time


TARGETS = (
    Target("sequential write", "limit", 1.3),
    Target("sequential read", "limit", 1.3),
    Target("random write", "limit", 1.8),
    Target("random read", "limit", 1.8),
    Target("synced append", "raw", 1.0),
    Target("random overwrite and commit", "raw", 1.3),
    *(
        Target(f"cold sequential read, {age}", None, 0.7, "cold sequential read", at_least=True)
        for age in ("a quarter overwritten", "aged")
    ),
    Target("lookup", None, 2),
    Target("getattr", None, 2),
    Target("create", None, 5),
    Target("unlink", None, 5),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a figure of each side, and the rounds' ratios if there are two."""

    question: str
    unit: str
    encfsd: float
    other: float | None
    other_side: str
    values: tuple[float, ...]  # ratios, or encfsd's figures if it is compared with nothing
    best: float  # the same of the best rounds
    is_ratio: bool
    target: Target | None

    @property
    def median(self) -> float:
        return float(statistics.median(self.values))

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "recorded"
        better = self.median >= self.target.bound
        return "reached" if better == self.target.at_least else "MISSED"


def ratio(ours: Sample, other: Sample, target: Target | None) -> float:
    """How many times as long encfsd takes; or, for a lower bound, its share of the speed."""
    cost = other.value / ours.value if ours.is_speed else ours.value / other.value
    return 1 / cost if target is not None and target.at_least else cost


def best_of(samples: dict[int, Sample]) -> Sample:
    """Return the fastest round."""
    return max(samples.values(), key=lambda s: s.value if s.is_speed else -s.value)


def rows(samples: list[Sample]) -> Iterator[Row]:
    """Pair the samples of each question by round."""
    by: dict[tuple[str, str], dict[int, Sample]] = {}
    for s in samples:
        by.setdefault((s.question, s.side), {})[s.round] = s
    targets = {target.question: target for target in TARGETS}
    for (question, side), ours in by.items():
        if side != "encfsd":
            continue
        # A target is a matter of wall time; CPU time is shown beside it.
        target = targets.get(question)
        if target is not None and target.before is not None:
            other_side, other = "before", by[target.before, "encfsd"]
        else:
            other_side = next((x for q, x in by if q == question and x != "encfsd"), "")
            other = by.get((question, other_side), {})
        pairs = [(s, other[n]) for n, s in ours.items() if n in other]
        values = [ratio(s, o, target) for s, o in pairs] or [s.value for s in ours.values()]
        best = best_of(ours)
        best_ratio = ratio(best, best_of(other), target) if pairs else best.value
        yield Row(
            question=question,
            unit=next(iter(ours.values())).unit,
            encfsd=statistics.median(s.value for s in ours.values()),
            other=statistics.median(s.value for s in other.values()) if other else None,
            other_side=other_side,
            values=tuple(values),
            best=best_ratio,
            is_ratio=bool(pairs),
            target=target,
        )


def table(lines: list[Row]) -> str:
    """Format the table."""
    head = f"{'question':45} {'encfsd':>9} {'beside':>16} {'unit':12} {'ratio [spread]':>24}"
    head += f" {'best':>6} target"
    out = [head, "-" * len(head)]
    for r in lines:
        beside = "" if r.other is None else f"{r.other_side} {r.other:.4g}"
        spread = f"{r.median:.2f} [{min(r.values):.2f} .. {max(r.values):.2f}]"
        bound = ""
        if r.target is not None:
            bound = f"{'>=' if r.target.at_least else '<='} {r.target.bound:g}  "
        spread = ("x " if r.is_ratio else "") + spread
        out.append(
            f"{r.question:45} {r.encfsd:9.4g} {beside:>16} {r.unit:12} {spread:>24} {r.best:6.2f}"
            f" {bound}{r.verdict}"
        )
    return "\n".join(out)


def drive(driver: str, *arguments: object) -> Iterator[Sample]:
    """Run a C driver and yield its samples."""
    command = [str(DRIVERS / f"bench_{driver}"), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Sample(**json.loads(line))
    if process.returncode:
        raise SystemExit(f"{command[0]} failed")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int
    tmpfs_mib: int
    disk_mib: int
    operations: int  # synced ones a round
    names: int
    files: int  # of the large volume


FULL = Sizes(11, 128, 128, 300, 50_000, 1_000_000)
QUICK = Sizes(5, 64, 64, 100, 10_000, 20_000)
PARTS = ("throughput", "durable", "namespace", "many")


def measure(part: str, size: Sizes, tmpfs: str, disk: str) -> Iterator[Sample]:
    """Yield the samples of one part."""
    match part:
        case "throughput":
            yield from drive("throughput", tmpfs, size.tmpfs_mib, size.rounds)
        case "durable":
            yield from drive("durable", disk, size.disk_mib, size.operations, size.rounds)
        case "namespace":
            yield from drive("namespace", "operations", tmpfs, size.names, size.rounds)
        case _:
            yield from drive("namespace", "many", disk, size.files)


def main() -> None:
    """Measure, print the table, write results and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a directory on tmpfs")
    parser.add_argument("--disk", help="a directory on the disk (default: in the checkout)")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL

    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(dir=arguments.disk or DRIVERS.parent) as disk:
        described = machine(Path(disk))
        for part in arguments.only or PARTS:
            print(f"{part} ...", file=sys.stderr)
            samples += measure(part, size, arguments.tmpfs, disk)
        described["load_average_at_the_end"] = os.getloadavg()
    lines = list(rows(samples))
    print(table(lines))

    RESULTS.mkdir(exist_ok=True)
    results = {
        "machine": described,
        "sizes": dataclasses.asdict(size),
        "summary": [
            {**dataclasses.asdict(r), "median": r.median, "verdict": r.verdict} for r in lines
        ],
        "samples": [dataclasses.asdict(s) for s in samples],
    }
    (RESULTS / "core.json").write_text(json.dumps(results, indent=1) + "\n")
    ratios = [r for r in lines if r.is_ratio]
    times = [r for r in lines if not r.is_ratio and r.unit == "us"]
    for name, unit, chosen in (
        ("ratios", "times as long as the limit (or share of its speed)", ratios),
        ("namespace", "us an operation", times),
    ):
        strips = [
            plots.Strip(r.question, r.values, r.target.bound if r.target else None) for r in chosen
        ]
        if strips:
            (RESULTS / f"{name}.svg").write_text(plots.strips(unit, strips))
    print(f"\nresults and plots: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    main()
