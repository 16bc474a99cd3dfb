"""The commit protocol keeps its promises in the volume model; without any one rule it does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.model.volume_model import Action, Config, Rules, Violation, VolumeModel

RARE = {"kill", "lose_power", "fail", "fail_mark", "fail_fence"}
HONEST = Config(objects=2, pages=2, failures=True, folds=True)
ATTACKED = replace(HONEST, attacker=True)


@dataclass(frozen=True)
class Counterexample:
    """A history after which a promise was broken."""

    history: tuple[Action, ...]
    violation: str

    def __str__(self) -> str:
        steps = [" ".join(map(str, action)) for action in self.history]
        return f"{self.violation}: " + ", ".join(steps)


class Seeded:
    """Random choices."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, count: int) -> int:
        return self.rng.randrange(count)


class Script:
    """Choices given in advance, then zeros; remembers how many ways there were."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.choices = choices
        self.counts: list[int] = []

    def pick(self, count: int) -> int:
        position = len(self.counts)
        self.counts.append(count)
        return self.choices[position] if position < len(self.choices) else 0


def run_seed(rules: Rules, config: Config, seed: int, waits: Counter[str]) -> Counterexample | None:
    """Play one random history of a few dozen steps."""
    rng = random.Random(seed)
    config = replace(config, objects=rng.randint(1, config.objects))
    config = replace(config, pages=rng.randint(1, config.pages))
    volume = VolumeModel(rules, config, Seeded(rng))
    history: list[Action] = []
    rarity = rng.choice((0.05, 0.2, 0.5))
    for _ in range(rng.randrange(8, 60)):
        actions = volume.actions()
        weights = [rarity if action[0] in RARE else 1 for action in actions]
        history.append(rng.choices(actions, weights)[0])
        try:
            volume.apply(history[-1])
        except Violation as violation:
            return Counterexample(tuple(history), str(violation))
    waits.update(volume.waits)
    return None


def explore_seeds(
    rules: Rules, config: Config, seeds: range, waits: Counter[str] | None = None
) -> Counterexample | None:
    """Return the first counterexample of these seeds."""
    waits = Counter() if waits is None else waits
    found = (run_seed(rules, config, seed, waits) for seed in seeds)
    return next(filter(None, found), None)


def successors(volume: VolumeModel, action: Action) -> Iterator[VolumeModel]:
    """Yield every outcome of an action, whatever the chooser may say."""
    choices: tuple[int, ...] | None = ()
    while choices is not None:
        script = Script(choices)
        successor = volume.copy(script)
        successor.apply(action)
        yield successor
        taken = [*choices, *[0] * (len(script.counts) - len(choices))]
        while taken and taken[-1] == script.counts[len(taken) - 1] - 1:
            taken.pop()
        choices = (*taken[:-1], taken[-1] + 1) if taken else None


def explore_breadth_first(
    rules: Rules, config: Config, prefix: tuple[Action, ...], steps: int
) -> tuple[Counterexample | None, int]:
    """Try every history of so many steps after the prefix, in which every choice is zero.

    Return a shortest counterexample, if any, and the number of different states seen.
    """
    start = VolumeModel(rules, config, Script(()))
    for action in prefix:
        start.apply(action)
    seen: set[int] = {hash(start.key())}
    frontier: list[tuple[VolumeModel, tuple[Action, ...]]] = [(start, prefix)]
    for _ in range(steps):
        following: list[tuple[VolumeModel, tuple[Action, ...]]] = []
        for volume, history in frontier:
            for action in volume.actions():
                try:
                    for successor in successors(volume, action):
                        key = hash(successor.key())
                        if key not in seen:
                            seen.add(key)
                            following.append((successor, (*history, action)))
                except Violation as violation:
                    return Counterexample((*history, action), str(violation)), len(seen)
        frontier = following
    return None, len(seen)


def broken(*names: str) -> Rules:
    """Return the rules without some of them."""
    return replace(Rules(), **dict.fromkeys(names, False))


FRESH: tuple[Action, ...] = ()
ACTIVE: tuple[Action, ...] = (("enter", 1), ("finish_mark",), ("record_state",))
COMMITTED: tuple[Action, ...] = (*ACTIVE, ("write", 1, 0), ("start", 1), ("finish", 1))
PIPELINED: tuple[Action, ...] = (*COMMITTED, ("capture_group",), ("write", 1, 0), ("start", 1))
CRASHED: tuple[Action, ...] = (*ACTIVE, ("write", 1, 0), ("start_solo", 1), ("kill",))
STARTS = pytest.mark.parametrize(
    ("prefix", "steps"),
    [(FRESH, 5), (ACTIVE, 5), (PIPELINED, 4), (CRASHED, 6)],
    ids=["fresh", "active", "pipelined", "crashed"],
)


@pytest.mark.parametrize("root_slots", [2, 3, 4])
@pytest.mark.parametrize("config", [HONEST, ATTACKED], ids=["honest", "attacked"])
def test_random_histories_keep_every_promise(config: Config, root_slots: int) -> None:
    assert explore_seeds(Rules(), replace(config, root_slots=root_slots), range(800)) is None


@STARTS
def test_all_short_histories_keep_every_promise(prefix: tuple[Action, ...], steps: int) -> None:
    found, states = explore_breadth_first(Rules(), Config(failures=True), prefix, steps)
    assert found is None
    assert states > 1000


@pytest.mark.long
@pytest.mark.parametrize("config", [HONEST, ATTACKED], ids=["honest", "attacked"])
def test_many_random_histories(config: Config) -> None:
    """Ten times as many as find each broken rule; all longer histories prove what is near."""
    assert explore_seeds(Rules(), config, range(100_000)) is None


@pytest.mark.long
@STARTS
@pytest.mark.parametrize(
    ("config", "more"),
    [(Config(), 3), (Config(failures=True), 2), (Config(folds=True), 1), (Config(objects=2), 1)],
    ids=["plain", "failures", "folds", "two objects"],
)
def test_all_longer_histories(
    config: Config, more: int, prefix: tuple[Action, ...], steps: int
) -> None:
    found, _ = explore_breadth_first(Rules(), config, prefix, steps + more)
    assert found is None


@pytest.mark.parametrize(
    "rule",
    [
        "fence",
        "read_device",
        "tag_at_start",
        "fold_barrier",
        "pins",
        "hold_until_mark",
        "hold_captured",
        "keep_in_flight",
        "solo_waits",
        "match_epoch",
    ],
)
def test_every_rule_is_needed(rule: str) -> None:
    config = Config(failures=rule == "read_device", folds=rule == "fold_barrier")
    assert explore_seeds(broken(rule), config, range(10_000))


@pytest.mark.parametrize("rule", ["reserve_epoch", "state_first"])
def test_rule_is_needed_against_an_attacker(rule: str) -> None:
    """Rules about the trusted state: without an attacker they are never missed."""
    assert explore_seeds(broken(rule), Config(attacker=True), range(10_000))
    assert explore_seeds(broken(rule), HONEST, range(500)) is None


@pytest.mark.parametrize(
    ("rule", "prefix", "history"),
    [
        ("fence", FRESH, "capture_group, kill, mount, lose_power, mount"),
        ("read_device", CRASHED, "fail_fence, mount, lose_power, mount"),
        ("fold_barrier", FRESH, "capture_group, lose_power, mount"),
        ("pins", FRESH, "start 1, finish 1, start 1, kill, mount"),
        ("keep_in_flight", ACTIVE, "start_solo 1, capture_group, finish 1, kill, mount"),
        ("solo_waits", ACTIVE, "capture_group, start_solo 1, finish 1, kill, mount"),
        ("hold_captured", PIPELINED, "finish 1, write 1 0, kill, mount"),
    ],
)
def test_shortest_history_of_a_broken_rule(
    rule: str, prefix: tuple[Action, ...], history: str
) -> None:
    config = Config(failures=rule == "read_device", folds=rule == "fold_barrier")
    found, _ = explore_breadth_first(broken(rule), config, prefix, 5)
    assert found
    tail = replace(found, history=found.history[len(prefix) :])
    assert str(tail).endswith(": " + history)


def test_only_commits_for_groups_wait_for_a_root_slot() -> None:
    """Four slots never wait, three only while a mark is in flight, two may need a mark forced."""
    waits: dict[int, Counter[str]] = {slots: Counter() for slots in (2, 3, 4)}
    for slots, counter in waits.items():
        explore_seeds(Rules(), replace(HONEST, root_slots=slots), range(400), counter)
        assert counter["solo commits"] > 100
    kinds = {slots: {name for name in waits[slots] if "waits" in name} for slots in waits}
    assert kinds == {
        2: {"group waits, mark in flight", "group waits, mark needed"},
        3: {"group waits, mark in flight"},
        4: set(),
    }
