"""Measure the strategies of the node pool at work. Run it with `make bench-pool`.

- A large file read and written at random with a free list that holds a small part of it: through
  the object layer (bench_pool_file.c), since the way through the kernel would hide the pool.
- RocksDB filled in batches of 50 puts until compaction decides how long a batch takes, through the
  mount: for several sizes of the free list, one of them deliberately too small, and within a memory
  limit (cgroup) around daemon and load. Beside it pages of a file are overwritten at random.
- CPU time of the whole daemon for a GiB written and read from one end to the other.

Each cell has a new volume or process; a round does every cell once, in an order by chance, and
strategies of the same question one right after the other. No round begins that could end after the
time limit. Writes compaction.json (all samples) and compaction-*.svg beside it; the tables say what
has to be reached and whether it is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import plots
from candidates import BUILD, ENCFSD, Candidate, Role, encfsd, encfsd_command
from machine import machine
from place import Place, make_template
from samples import Sample

from encfsd.options import DEFAULT_STRATEGY, POOL_STRATEGIES
from tests.mount import harness

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FILE_DRIVER = BUILD / "bench" / "bench_pool_file"
FILL = HERE / "rocksdb_fill.py"
FAILURES = (AssertionError, OSError, RuntimeError, subprocess.SubprocessError)
CELL_TIMEOUT = 150.0  # seconds
TIME_LIMIT = 360.0  # of all rounds: `make bench-pool` takes 10 minutes, of which pool.py up to 4
HOLDS, MIDDLE, TOO_SMALL = "1G", "64M", "4M"
LISTS = (HOLDS, MIDDLE, TOO_SMALL)
FILE_LIST_MIB = 8
PRESSED = f"{MIDDLE}, memory limit"
BATCH_TIME = "RocksDB batch, list of"
FILE = "large file"
CPU = "daemon's CPU time"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything a round does."""

    rounds: int
    file_mib: int  # read and written at random
    batches: int
    sequential_mib: int
    memory_limit: int  # bytes


# The memory limit has room for what cannot be given back: the list of 64 MiB, dirty nodes beyond it
# (encfsd.volume.DIRTY_LIMIT), two interpreters. It has none for the pages of the database, which
# are in the page cache twice, above the mount and below.
FULL = Sizes(5, 512, 3000, 1024, 512 << 20)
QUICK = Sizes(2, 64, 400, 64, 512 << 20)


@dataclasses.dataclass(frozen=True)
class Course:
    """How one run of RocksDB went on."""

    what: str
    side: str
    round: int
    points: list[dict[str, float]]


@dataclasses.dataclass
class Report:
    """Everything that was found out so far."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    courses: list[Course] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep something that the reader of the figures has to know."""
        if text not in self.notes:
            self.notes.append(text)
            say(text)

    def values(self, question: str, side: str) -> list[float]:
        """Return the rounds of one cell."""
        return [s.value for s in self.samples if (s.question, s.side) == (question, side)]

    def questions(self, *starts: str) -> list[str]:
        """Return those of which each strategy has a figure."""
        names = dict.fromkeys(s.question for s in self.samples if s.question.startswith(starts))
        return [n for n in names if all(self.values(n, side) for side in POOL_STRATEGIES)]


START = time.monotonic()


def elapsed() -> float:
    """Return the seconds since the start."""
    return time.monotonic() - START


def say(text: str) -> None:
    """Show progress."""
    print(f"[{elapsed():5.0f} s] {text}", file=sys.stderr, flush=True)


# ---- memory limit ----


class NoLimitError(Exception):
    """Why there can be no memory limit here."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """A cgroup with a memory limit."""

    group: Path
    unified: bool  # cgroup v2

    def events(self) -> dict[str, int]:
        """Return how often the limit was met, and how often somebody was killed."""
        if self.unified:
            lines = (self.group / "memory.events").read_text().splitlines()
            events = dict(line.split() for line in lines)
            return {name: int(events[name]) for name in ("max", "oom_kill")}
        lines = (self.group / "memory.oom_control").read_text().splitlines()
        killed = dict(line.split() for line in lines)["oom_kill"]
        met = (self.group / "memory.failcnt").read_text()
        return {"max": int(met), "oom_kill": int(killed)}


def _hierarchy() -> tuple[Path, str, bool]:
    """Return where cgroups with memory limits are, which is ours, and whether that is v2."""
    mounted = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounted[kind] = Path(before.split()[4])
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.removeprefix("/")
    if "cgroup" in mounted and "memory" in own:
        return mounted["cgroup"], own["memory"], False
    if "cgroup2" in mounted:
        return mounted["cgroup2"], own[""], True
    raise NoLimitError("no cgroup file system is mounted")


def _parent_for_limits() -> tuple[Path, bool]:
    """Return the nearest cgroup whose children may have a limit, ours or above; and if it is v2.

    Nobody is let out of a limit, and no setting of a cgroup that is not ours is changed.
    """
    root, path, unified = _hierarchy()
    own = root / path
    if not unified:
        return own, unified
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            break
        if "memory" in (group / "cgroup.subtree_control").read_text().split():
            return group, unified
        limit = group / "memory.max"
        if limit.exists() and limit.read_text().strip() != "max":
            raise NoLimitError(f"{group} has a limit of its own and gives its children none")
    raise NoLimitError("no cgroup above us gives its children a memory controller")


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[Limit]:
    """Make a cgroup; NoLimitError tells why there is none."""
    try:
        parent, unified = _parent_for_limits()
        group = parent / f"encfsd-bench-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        raise NoLimitError(str(error)) from None
    try:
        setting = group / ("memory.max" if unified else "memory.limit_in_bytes")
        try:
            setting.write_text(str(limit))
        except OSError as error:
            raise NoLimitError(str(error)) from None
        yield Limit(group, unified)
    finally:
        # Whoever was in it has ended; the kernel may take a moment to see that.
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
        else:
            say(f"{group} cannot be removed")


def within(limit: Limit | None) -> list[str]:
    """Return what to put before a command to run it in a cgroup."""
    if limit is None:
        return []
    return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(limit.group / "cgroup.procs")]


# ---- cells ----


class Served(Place):
    """A volume whose daemon is looked at."""

    @property
    def point(self) -> Path:
        """Where it is mounted."""
        return self._top

    def cpu_seconds(self) -> float:
        """Return user and system time that the daemon has spent."""
        assert self._mount is not None
        fields = Path(f"/proc/{self._mount.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def strategy(self) -> str:
        """Return the one in effect."""
        counters = harness.run([*ENCFSD, "stats", "--json", self.point]).stdout
        return str(json.loads(counters)["pool"].get("strategy", ""))


class Bench:
    """Runs cells."""

    def __init__(self, size: Sizes, disk: Path, tmpfs: Path, report: Report) -> None:
        self._size, self._disk, self._tmpfs, self._report = size, disk, tmpfs, report
        self._template = make_template(encfsd("encfsd"), disk)

    def _add(self, question: str, side: str, n: int, unit: str, value: float) -> None:
        self._report.samples.append(Sample(question, side, n, unit, value))

    @contextlib.contextmanager
    def _served(
        self, strategy: str, free_list: str, base: Path, limit: Limit | None = None
    ) -> Iterator[Served]:
        # The last option counts, also where `encfsd_command` has the same.
        options = (f"--free-list={free_list}", f"--pool-strategy={strategy}")
        command = encfsd_command(*options)
        candidate = Candidate(
            strategy, Role.OURS, "", command=lambda folder: [*within(limit), *command(folder)]
        )
        place = Served(candidate, self._template, base)
        try:
            effect = place.strategy()
            if effect and effect != strategy:
                self._report.note(f"{strategy} became {effect}: this kernel cannot do it")
            with place.work_in("work"):
                yield place
        except FAILURES:
            say(f"the daemon's log ends: {place.describe_end()}")
            raise
        finally:
            place.close()

    def large_file(self, strategy: str, n: int) -> None:
        """Read and write at random."""
        sizes = map(str, (self._size.file_mib, FILE_LIST_MIB, n))
        command = [str(FILE_DRIVER), strategy, str(self._tmpfs), *sizes]
        for line in harness.run(command, timeout=CELL_TIMEOUT).stdout.splitlines():
            sample = Sample(**json.loads(line))
            question = f"{FILE}, {sample.question}"
            if sample.unit == "":
                question = f"misses, {FILE}"
            self._report.samples.append(dataclasses.replace(sample, question=question))

    def rocksdb(self, strategy: str, free_list: str, n: int) -> None:
        """Fill a database."""
        with self._served(strategy, free_list, self._disk) as place:
            self._fill(place, free_list, n, None)

    def rocksdb_pressed(self, strategy: str, n: int) -> None:
        """Fill one where memory is short."""
        try:
            with memory_limit(self._size.memory_limit) as limit:
                # Backing files on tmpfs would count as memory that cannot be given back.
                with self._served(strategy, MIDDLE, self._disk, limit) as place:
                    self._fill(place, PRESSED, n, limit)
                for event, count in limit.events().items():
                    self._add(f"{PRESSED}: {event}", strategy, n, "", float(count))
        except NoLimitError as reason:
            self._report.note(f"RocksDB under memory pressure: SKIPPED: {reason}")

    def _fill(self, place: Served, what: str, n: int, limit: Limit | None) -> None:
        side = place.candidate.name
        before = place.cpu_seconds()
        load = map(str, (FILL, place.point, place.directory / "db", self._size.batches))
        command = [*within(limit), sys.executable, *load]
        found = json.loads(harness.run(command, timeout=CELL_TIMEOUT).stdout)
        points = found["points"]
        self._report.courses.append(Course(what, side, n, points))
        # The second half: by then compaction has its full share.
        half = [point["us"] for point in points[len(points) // 2 :]]
        self._add(f"{BATCH_TIME} {what}, mean", side, n, "us", statistics.mean(half))
        self._add(f"{BATCH_TIME} {what}, slowest 50", side, n, "us", max(half))
        cpu = place.cpu_seconds() - before
        self._add(f"{CPU}, RocksDB, list of {what}", side, n, "s", cpu)
        self._add(f"misses, RocksDB, {what}", side, n, "", found["misses"])
        self._add(f"write amplification, {what}", side, n, "", found["write_amplification"])
        busy = found["compaction_s"] / max(found["batches_s"], 1e-9)
        self._add(f"compaction / batches, {what}", side, n, "", busy)

    def sequential(self, strategy: str, n: int) -> None:
        """Write and read from one end to the other."""
        mib = self._size.sequential_mib
        with self._served(strategy, MIDDLE, self._tmpfs) as place:
            file = place.directory / "large"
            for what, command in (
                ("write", ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={mib}"]),
                ("read", ["dd", f"if={file}", "of=/dev/null", "bs=1M", "iflag=direct"]),
            ):
                if what == "write":
                    command.append("conv=fsync")
                before = place.cpu_seconds()
                harness.run(command, timeout=CELL_TIMEOUT)
                spent = (place.cpu_seconds() - before) * 1024 / mib
                self._add(f"{CPU}, sequential {what}, per GiB", strategy, n, "s", spent)

    def round(self, n: int) -> None:
        """Do every cell once."""
        works: list[tuple[str, Callable[[str], None]]] = [
            (FILE, lambda strategy: self.large_file(strategy, n)),
            ("sequential", lambda strategy: self.sequential(strategy, n)),
            (f"RocksDB, {PRESSED}", lambda strategy: self.rocksdb_pressed(strategy, n)),
        ]
        for free_list in LISTS:

            def fill(strategy: str, free_list: str = free_list) -> None:
                self.rocksdb(strategy, free_list, n)

            works.append((f"RocksDB, list of {free_list}", fill))
        random.shuffle(works)
        for what, work in works:
            for strategy in random.sample(POOL_STRATEGIES, len(POOL_STRATEGIES)):
                before = elapsed()
                try:
                    work(strategy)
                except FAILURES as error:
                    lines = str(error).strip().splitlines() or [repr(error)]
                    self._report.note(f"{what}: {strategy}: FAILED: {lines[-1][-300:]}")
                say(f"round {n + 1}: {what}: {strategy}: {elapsed() - before:.1f} s")


# ---- verdicts ----


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One thing to reach, and whether it is."""

    what: str
    figures: str
    reached: bool | None  # None: not measured

    def __str__(self) -> str:
        """Return a row of the table."""
        text = {True: "reached", False: "NOT REACHED", None: "not measured"}[self.reached]
        return f"{text:13} {self.what}: {self.figures}"


def spread(values: list[float]) -> str:
    """Return the median with the smallest and largest round."""
    shown = statistics.median(values), min(values), max(values)
    middle, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in shown)
    return f"{middle} ({low}-{high})"


def fastest(report: Report, question: str) -> Verdict:
    """Say whether the default strategy is the fastest, or its interval overlaps the fastest's.

    The interval is from the smallest round to the largest: of five, it contains the true median
    in 94 % of the cases.
    """
    found = {side: report.values(question, side) for side in POOL_STRATEGIES}
    best = min(found, key=lambda side: statistics.median(found[side]))
    ours = found[DEFAULT_STRATEGY]
    figures = f"{DEFAULT_STRATEGY} {spread(ours)}, fastest {best} {spread(found[best])}"
    return Verdict(question, figures, min(ours) <= max(found[best]))


def verdicts(report: Report) -> Iterator[Verdict]:
    """Return everything to reach."""
    for question in report.questions(FILE, BATCH_TIME, CPU):
        yield fastest(report, question)
    missed = [report.values(f"misses, RocksDB, {HOLDS}", side) for side in POOL_STRATEGIES]
    most = max((value for values in missed for value in values), default=-1.0)
    yield Verdict(
        f"no misses in RocksDB with a list of {HOLDS}",
        f"at most {most:.0f}" if most >= 0 else "",
        most == 0 if most >= 0 else None,
    )
    ratios = [s.value for s in report.samples if s.question == f"compaction / batches, {HOLDS}"]
    yield Verdict(
        "compaction takes longer than the batches that cause it",
        f"{spread(ratios)} times as long" if ratios else "",
        statistics.median(ratios) > 1 if ratios else None,
    )
    if not report.questions(f"{BATCH_TIME} {PRESSED}"):
        yield Verdict("RocksDB under memory pressure", "see the notes", None)


# ---- output ----


def course(report: Report, what: str, side: str, key: str) -> list[tuple[float, float]]:
    """Return how a figure went on over the MiB put: the median of the rounds."""
    rounds = [c.points for c in report.courses if (c.what, c.side) == (what, side)]
    return [
        (at[0]["mib"], statistics.median(point[key] for point in at))
        for at in zip(*rounds, strict=True)
    ]


def draw(report: Report, to: Path) -> None:
    """Write the plots for which there are figures."""
    drawn: dict[str, str] = {}
    for name, what in (*((free_list, free_list) for free_list in LISTS), ("pressure", PRESSED)):
        if not report.questions(f"{BATCH_TIME} {what}, mean"):
            continue
        times = {side: course(report, what, side, "us") for side in POOL_STRATEGIES}
        missed = {
            side: [(at, n + 1) for at, n in course(report, what, side, "misses")]
            for side in POOL_STRATEGIES
        }
        drawn[f"batches-{name}"] = plots.stacked(
            "MiB put",
            {
                f"us a batch of 50 puts, mean of 50 batches, free list of {what}": times,
                "misses of the free list so far, plus one": missed,
            },
        )
    for name, start, unit in (
        ("means", BATCH_TIME, "us a batch, second half of the run"),
        ("file", FILE, "us a request of 4 KiB"),
        ("cpu", CPU, "seconds"),
    ):
        rows = [
            plots.Beside(q, {side: tuple(report.values(q, side)) for side in POOL_STRATEGIES})
            for q in report.questions(start)
        ]
        if rows:
            drawn[name] = plots.beside(unit, rows)
    for name, picture in drawn.items():
        (to / f"compaction-{name}.svg").write_text(picture)


def write(report: Report, described: dict[str, object], to: Path) -> None:
    """Write compaction.json and the plots."""
    to.mkdir(parents=True, exist_ok=True)
    document = {
        **described,
        "notes": report.notes,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(report)],
        "samples": [dataclasses.asdict(sample) for sample in report.samples],
        "courses": [dataclasses.asdict(course) for course in report.courses],
    }
    (to / "compaction.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(report, to)


def conclude(report: Report) -> None:
    """Print medians with their spread, what has to be reached, and what to know."""
    wide = max(map(len, report.questions("")), default=0)
    print(f"{'':{wide}}" + "".join(f"{side:>30}" for side in POOL_STRATEGIES))
    for question in report.questions(""):
        cells = (spread(report.values(question, side)) for side in POOL_STRATEGIES)
        print(f"{question:{wide}}" + "".join(f"{cell:>30}" for cell in cells))
    print()
    for verdict in verdicts(report):
        print(verdict)
    print()
    for note in report.notes:
        print(note)


def main() -> None:
    """Measure; print tables; write results and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--rounds", type=int, help="more or fewer than five (quick: two)")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a directory on tmpfs")
    parser.add_argument("--disk", default=BUILD, help="a directory on the disk")
    parser.add_argument(
        "--results", type=Path, help="where to write (default: bench/results, quick: build-bench)"
    )
    arguments = parser.parse_args()
    # So that a terminated run unmounts and removes what it made, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = QUICK if arguments.quick else FULL
    results = arguments.results or (BUILD if arguments.quick else RESULTS)
    rounds = arguments.rounds or size.rounds
    report = Report()
    with (
        tempfile.TemporaryDirectory(prefix="pool-", dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(prefix="pool-", dir=arguments.tmpfs) as tmpfs,
    ):
        described: dict[str, object] = {
            "machine": machine(Path(disk)),
            "sizes": dataclasses.asdict(size),
            "lists": {"holds the working set": HOLDS, "too small": TOO_SMALL},
        }
        bench = Bench(size, Path(disk), Path(tmpfs), report)
        if rounds < 3:
            report.note("fewer than three rounds: their intervals decide nothing")
        longest = 0.0
        for n in range(rounds):
            if n > 0 and elapsed() + longest > TIME_LIMIT:
                report.note(f"only {n} of {rounds} rounds: another would pass the time limit")
                break
            before = elapsed()
            bench.round(n)
            longest = max(longest, elapsed() - before)
            write(report, described, results)
    described["load_average_at_the_end"] = os.getloadavg()
    write(report, described, results)
    conclude(report)
    print(f"\nresults and plots: {os.path.relpath(results)}")


if __name__ == "__main__":
    main()
