"""Measure mounts beside the raw directory, a C passthrough and the peers. Run it with `make bench`.

In each round every candidate does the work once, one right after the other, and the order rotates:
on a machine that others use too, ratios within a round can be trusted, times cannot. A table says
what encfsd has to reach and whether it does, by the median of the rounds' ratios; what is in
parentheses is only reported. Another one has the medians of everybody.

All volumes lie in the same file system. "Cold" is a volume that was just mounted, after all
caches of the kernel were dropped, which needs root.

Writes mount.json (all samples and the machine they came from) and plots beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import plots
from candidates import BUILD, Candidate, Role, everybody
from machine import machine, output_of
from place import PIN_TO, PINNED, Place, make_template, may_drop_caches
from requirements import (
    Results,
    by_question,
    is_speed,
    median,
    median_table,
    verdict_table,
    verdicts,
)
from samples import Sample
from works import DISK, FULL, QUICK, STILL, TMPFS, WORKS, Figure, Sizes, Work

RESULTS = Path(__file__).parent / "results"
TOO_SLOW = 12.0  # seconds of a round after which a candidate takes part in no further one
FAILURES = (AssertionError, OSError, RuntimeError, subprocess.SubprocessError)
PINNED_SUFFIX = f", {PINNED}"  # needs no telling where nothing free is shown
GROUPS = (
    ("requests", ("random", "append")),
    ("files", ("create", "stat", "open", "cold open", "unlink", "untar", "ls")),
    ("throughput", ("sequential", "RocksDB")),
)


@dataclasses.dataclass
class Report:
    """Everything that was found out so far."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    series: list[dict[str, object]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep something that the reader of the figures has to know."""
        self.notes.append(text)
        say(text)

    def add(self, figure: Figure, fs: str, side: str, n: int) -> None:
        """Keep a figure."""
        question = ", ".join(filter(None, (figure.what, fs, figure.way)))
        self.samples.append(Sample(question, side, n, figure.unit, figure.value))
        if figure.series:
            values = {"question": question, "side": side, "round": n, "values": figure.series}
            self.series.append(values)


START = time.monotonic()


def say(text: str) -> None:
    """Show progress."""
    print(f"[{time.monotonic() - START:5.0f} s] {text}", file=sys.stderr, flush=True)


class Bench:
    """Runs works on candidates."""

    def __init__(
        self,
        candidates: list[Candidate],
        size: Sizes,
        bases: dict[str, Path],
        names: dict[str, str],
        report: Report,
    ) -> None:
        """`bases`: an empty directory for each; `names`: what their file systems are called."""
        self._candidates = candidates
        self._size = size
        self._bases = bases
        self._names = names
        self._report = report
        self._templates: dict[str, Path] = {}
        self._kept: dict[tuple[str, str], Place] = {}

    def close(self) -> None:
        """End the mounts that outlive a work."""
        for place in self._kept.values():
            place.close()

    def _template(self, candidate: Candidate) -> Path:
        if candidate.name not in self._templates:
            template = make_template(candidate, self._bases[DISK])
            self._templates[candidate.name] = template
        return self._templates[candidate.name]

    @contextlib.contextmanager
    def _place(self, work: Work, candidate: Candidate, base: str) -> Iterator[Place]:
        key = candidate.name, base
        place = self._kept.get(key)
        if place is None:
            place = Place(candidate, self._template(candidate), self._bases[base])
        if candidate.keeps_mount:
            self._kept[key] = place
        try:
            with place.work_in(work.name):
                yield place
        finally:
            if not candidate.keeps_mount:
                place.close()

    def _fail(self, what: str, place: Place | None, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [repr(error)]
        self._report.note(f"{what} FAILED: {lines[0][-200:]} ... {lines[-1][-200:]}")
        if place is not None and place.describe_end():
            say(f"its log ends: {place.describe_end()}")
        if place is not None and place.candidate.keeps_mount:
            place.close()
            for key in [key for key, kept in self._kept.items() if kept is place]:
                del self._kept[key]

    def run(self, work: Work, base: str) -> None:
        """Do a work on a base, round by round. A candidate that fails drops out of it."""
        what = f"{work.name} on {self._names[base]}"
        with contextlib.ExitStack() as stack:
            places: list[Place] = []
            for candidate in work.instead or self._candidates:
                if candidate.role not in work.roles:
                    continue
                if candidate.name in work.left_out:
                    reason = work.left_out[candidate.name]
                    self._report.note(f"{what}: without {candidate.name}, which {reason}")
                    continue
                place = None
                before = time.monotonic()
                try:
                    place = stack.enter_context(self._place(work, candidate, base))
                    work.prepare(place, self._size)
                    places.append(place)
                    say(f"{what}: {candidate.name} prepared, {time.monotonic() - before:.1f} s")
                except FAILURES as error:
                    self._fail(f"{what}: {candidate.name}: preparation", place, error)
            for n in range(self._size.rounds):
                turn = n % len(places) if places else 0
                for place in places[turn:] + places[:turn]:
                    if not self._once(work, base, what, place, n):
                        places.remove(place)

    def _once(self, work: Work, base: str, what: str, place: Place, n: int) -> bool:
        """Measure one round of one candidate; return whether it may take part in the next."""
        name = place.candidate.name
        before = time.monotonic()
        try:
            for figure in work.measure(place, self._size, n):
                self._report.add(figure, self._names[base], name, n)
        except FAILURES as error:
            self._fail(f"{what}: {name}: round {n + 1}", place, error)
            return False
        took = time.monotonic() - before
        say(f"{what}: round {n + 1} of {self._size.rounds}: {name} {took:.1f} s")
        if took > TOO_SLOW and n + 1 < self._size.rounds:
            self._report.note(f"{what}: {name} takes {took:.0f} s a round: no further rounds")
            return False
        return True


def file_system(directory: Path) -> str:
    """Return its type."""
    types = output_of("findmnt", "-no", "FSTYPE", "-T", str(directory)).split()
    return types[-1] if types else "unknown"


# ---- output ----


def relative(results: Results, words: tuple[str, ...]) -> Iterator[plots.Beside]:
    """Return the costs of everybody as multiples of the raw directory's, for a plot."""
    for question, sides in results.items():
        if not question.startswith(words) or "free" in question or "raw" not in sides:
            continue
        raw, fast = sides["raw"], is_speed(sides)
        against = median(raw)
        yield plots.Beside(
            question.removesuffix(PINNED_SUFFIX),
            {
                side: tuple(
                    against / s.value if fast else s.value / against for s in rounds.values()
                )
                for side, rounds in sides.items()
            },
        )


def draw(report: Report, results: Results, roles: dict[str, Role], where: Path) -> None:
    """Write the plots for which there are figures."""
    judged = [v for v in verdicts(results, roles) if v.counts and v.other is not None]
    drawn: dict[str, str] = {}
    if judged:
        # Shares of speed upside down, so that less is better in all rows.
        strips = [
            plots.Strip(
                f"{v.question.removesuffix(PINNED_SUFFIX)} / {v.against}",
                tuple(1 / r if v.requirement.at_least else r for r in v.ratios),
                1 / v.requirement.bound if v.requirement.at_least else v.requirement.bound,
            )
            for v in judged
        ]
        drawn["ratios"] = plots.strips("times as long as the other", strips)
    for name, words in GROUPS:
        rows = list(relative(results, words))
        if rows:
            drawn[name] = plots.beside("times as long as the raw directory", rows)
    for name, curves in courses(report).items():
        drawn[f"batches-{name}"] = plots.curves(
            "ms a batch of 50 puts, mean of 20 batches", "batches", curves
        )
    for name, picture in drawn.items():
        (where / f"mount-{name}.svg").write_text(picture)


def courses(report: Report) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return by base and side how a batch's time (ms) went on: the median of the rounds."""
    found: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for course in report.series:
        base = str(course["question"]).rsplit(", ", 1)[-1]
        values = course["values"]
        assert isinstance(values, tuple)
        found.setdefault(base, {}).setdefault(str(course["side"]), []).append(values)
    return {
        base: {
            side: [
                (20.0 * (i + 1), sorted(at)[len(at) // 2] / 1e3)
                for i, at in enumerate(zip(*rounds, strict=True))
            ]
            for side, rounds in sides.items()
        }
        for base, sides in found.items()
    }


def write(report: Report, described: dict[str, object], roles: dict[str, Role], to: Path) -> None:
    """Write mount.json and the plots."""
    to.mkdir(parents=True, exist_ok=True)
    results = by_question(report.samples)
    document = {
        **described,
        "notes": report.notes,
        "verdicts": [
            {
                "question": v.question,
                "against": v.against,
                "ratio": v.median,
                "ratios": v.ratios,
                "to_reach": str(v.requirement),
                "verdict": v.text,
            }
            for v in verdicts(results, roles)
        ],
        "samples": [dataclasses.asdict(s) for s in report.samples],
        "series": report.series,
    }
    (to / "mount.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(report, results, roles, to)


def conclude(report: Report, candidates: list[Candidate], roles: dict[str, Role]) -> None:
    """Print the tables and what to know about them."""
    results = by_question(report.samples)
    print(median_table(results, [*(c.name for c in candidates), STILL]))
    print()
    print(verdict_table(list(verdicts(results, roles))))
    print()
    for candidate in candidates:
        print(f"{candidate.name} {candidate.version}: {candidate.remark}")
    for note in report.notes:
        print(note)


# ---- the command ----


def parse(names: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--only",
        action="append",
        choices=[work.name for work in WORKS],
        help="a work; may be repeated",
    )
    parser.add_argument(
        "--candidates", action="append", choices=names, help="a candidate; may be repeated"
    )
    parser.add_argument("--tmpfs", default="/dev/shm", help="a directory on tmpfs")
    parser.add_argument("--disk", default=BUILD, help="a directory on the disk")
    parser.add_argument(
        "--results", type=Path, help="where to write (default: bench/results, quick: build-bench)"
    )
    return parser.parse_args()


def main() -> None:
    """Measure; print tables; write results and plots."""
    # So that a terminated run unmounts and removes what it made, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # passthrough_ll has a descriptor open for each inode that the kernel knows.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    candidates, missing = everybody()
    arguments = parse([candidate.name for candidate in candidates])
    chosen = [c for c in candidates if c.name in (arguments.candidates or [c.name])]
    roles = {candidate.name: candidate.role for candidate in candidates}
    size = QUICK if arguments.quick else FULL
    results = arguments.results or (BUILD if arguments.quick else RESULTS)

    report = Report()
    for peer in missing:
        report.note(f"{peer.name} is not installed: apt-get install {peer.package}")
    if not may_drop_caches():
        report.note("not root: the kernel keeps its caches, so nothing is quite cold")
    with (
        tempfile.TemporaryDirectory(prefix="mount-", dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(prefix="mount-", dir=arguments.tmpfs) as tmpfs,
    ):
        bases = {DISK: Path(disk), TMPFS: Path(tmpfs)}
        names = {base: file_system(path) for base, path in bases.items()}
        described = {
            "machine": machine(Path(disk)),
            "pinned_to_cpu": PIN_TO,
            "sizes": dataclasses.asdict(size),
            "candidates": [
                {"name": c.name, "version": c.version, "remark": c.remark} for c in chosen
            ],
        }
        bench = Bench(chosen, size, bases, names, report)
        try:
            for work in WORKS:
                if work.name in (arguments.only or [work.name]):
                    for base in work.bases:
                        bench.run(work, base)
                    write(report, described, roles, results)
        finally:
            bench.close()
        described["load_average_at_the_end"] = os.getloadavg()
    write(report, described, roles, results)
    conclude(report, chosen, roles)
    print(f"\nresults and plots: {os.path.relpath(results)}")


if __name__ == "__main__":
    main()
