"""What each figure of encfsd is to reach, and whether it does."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from candidates import Role
from place import FREE
from samples import Sample
from works import STILL, TMPFS

OURS = "encfsd"
PEERS = "the best peer"


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A bound on encfsd's time as a multiple of another's, or on its speed as a share.

    `against`: a candidate, PEERS, or "" if the figure itself counts.
    """

    questions: str  # how they begin
    against: str
    bound: float
    at_least: bool = False  # of the other's speed
    only_reported_on: str = ""  # a file system on which nothing has to be reached

    def ratio(self, ours: float, other: float, *, is_speed: bool) -> float:
        """Return what is held against the bound."""
        cost = other / ours if is_speed else ours / other
        return 1 / cost if self.at_least else cost

    def holds(self, ratio: float) -> bool:
        """Whether the bound is kept; to be ahead of the peers is to be strictly faster."""
        if self.at_least:
            return ratio >= self.bound
        return ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


_SMALL_FILES = (
    "create a",
    "stat a",
    "open+read+close",
    "cold open+read+close",
    "unlink a",
    "untar",
)

REQUIREMENTS = (
    Requirement("random 4 KiB read", "passthrough_ll", 1.15),
    Requirement("random 4 KiB read", PEERS, 1),
    Requirement("sequential", "passthrough_ll", 1, at_least=True),
    Requirement("sequential", PEERS, 1, at_least=True),
    Requirement("random 4 KiB write", "passthrough_ll", 0.9, at_least=True),
    Requirement("random 4 KiB write", PEERS, 3, at_least=True),
    Requirement("append", "raw", 1.1),
    Requirement("RocksDB", "raw", 1.1, only_reported_on=TMPFS),
    Requirement("RocksDB", PEERS, 1),
    *(
        Requirement(what, "gocryptfs", 1 if what.startswith("unlink") else 0.7)
        for what in _SMALL_FILES
    ),
    *(Requirement(what, "passthrough_ll", 0.9) for what in _SMALL_FILES),
    Requirement("ls -l", "gocryptfs", 1),
    Requirement("beside a spinning thread", STILL, 1.5),
    Requirement("memory per known inode", "", 300),
)


Rounds = Mapping[int, Sample]
Results = Mapping[str, Mapping[str, Rounds]]  # question, side, round


def by_question(samples: list[Sample]) -> dict[str, dict[str, dict[int, Sample]]]:
    """Sort the samples."""
    sorted_samples: dict[str, dict[str, dict[int, Sample]]] = {}
    for s in samples:
        sorted_samples.setdefault(s.question, {}).setdefault(s.side, {})[s.round] = s
    return sorted_samples


def median(rounds: Rounds) -> float:
    """Return the median of the rounds."""
    return float(statistics.median(s.value for s in rounds.values()))


def is_speed(sides: Mapping[str, Rounds]) -> bool:
    """Whether more is better."""
    return next(s for rounds in sides.values() for s in rounds.values()).is_speed


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A requirement at one question."""

    question: str
    unit: str
    encfsd: float
    against: str
    other: float | None
    requirement: Requirement
    ratios: tuple[float, ...]  # of the rounds
    counts: bool  # else it is only reported

    @property
    def median(self) -> float:
        return float(statistics.median(self.ratios))

    @property
    def text(self) -> str:
        held = "reached" if self.requirement.holds(self.median) else "MISSED"
        return held if self.counts else f"({held})"


def _best_peer(sides: Mapping[str, Rounds], peers: frozenset[str]) -> str | None:
    measured = {side: median(rounds) for side, rounds in sides.items() if side in peers}
    if not measured:
        return None
    return (max if is_speed(sides) else min)(measured, key=lambda side: measured[side])


def _judge(
    requirement: Requirement, question: str, sides: Mapping[str, Rounds], peers: frozenset[str]
) -> Verdict | None:
    ours = sides[OURS]
    other: float | None = None
    against = requirement.against
    if not against:
        against, ratios = "its size", [s.value for s in ours.values()]
    else:
        if against == PEERS:
            against = _best_peer(sides, peers) or PEERS
        if against not in sides:
            return None
        rounds, fast = sides[against], is_speed(sides)
        other = median(rounds)
        # One that was too slow for more than one round is held against with that one.
        ratios = [
            requirement.ratio(s.value, rounds[n].value if n in rounds else other, is_speed=fast)
            for n, s in ours.items()
        ]
    only_reported = requirement.only_reported_on
    return Verdict(
        question,
        next(iter(ours.values())).unit,
        median(ours),
        against,
        other,
        requirement,
        tuple(ratios),
        counts=FREE not in question and not (only_reported and only_reported in question),
    )


def verdicts(results: Results, roles: Mapping[str, Role]) -> Iterator[Verdict]:
    """Hold every question that encfsd answered against every requirement that it falls under."""
    peers = frozenset(name for name, role in roles.items() if role is Role.PEER)
    for question, sides in results.items():
        if OURS not in sides:
            continue
        for requirement in REQUIREMENTS:
            if question.startswith(requirement.questions):
                verdict = _judge(requirement, question, sides, peers)
                if verdict is not None:
                    yield verdict


def verdict_table(lines: list[Verdict]) -> str:
    """Format what is to be reached."""
    head = f"{'question':58} {'encfsd':>8} {'against':>24} {'unit':6} {'ratio [spread]':>22}"
    head += f" {'to reach':>8}"
    out = [head, "-" * len(head)]
    for v in lines:
        against = v.against if v.other is None else f"{v.against} {v.other:.4g}"
        spread = f"{v.median:.2f} [{min(v.ratios):.2f} .. {max(v.ratios):.2f}]"
        out.append(
            f"{v.question:58} {v.encfsd:8.4g} {against:>24} {v.unit:6} {spread:>22}"
            f" {v.requirement!s:>8} {v.text}"
        )
    return "\n".join(out)


def median_table(results: Results, names: list[str]) -> str:
    """Format the medians of everybody."""
    names = [name for name in names if any(name in sides for sides in results.values())]
    widths = [max(len(name), 9) for name in names]
    head = f"{'question':58} {'unit':6} "
    head += " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    out = [head, "-" * len(head)]
    for question, sides in results.items():
        unit = next(s for rounds in sides.values() for s in rounds.values()).unit
        cells = [f"{median(sides[name]):.4g}" if name in sides else "" for name in names]
        out.append(
            f"{question:58} {unit:6} "
            + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(out)
