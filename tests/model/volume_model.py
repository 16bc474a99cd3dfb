"""A model of transaction groups, solo commits and recovery, at the level of a whole volume.

Every object is a backing file of root slots and data slots; object 0 holds one row an object. The
contents of slots are unique tokens, so a root that was adopted although one of its pages is gone
cannot go unnoticed. `VolumeModel` offers the steps of the protocol one at a time (each barrier is a
step of its own) and mixes them with process kills, power losses, failed barriers and, if asked, an
attacker; after each crash it recovers as a mount does and checks what was opened:

* nothing that was acknowledged or served is lost, and no abandoned root comes back;
* without an attacker nothing is unreadable; with one, an object is unreadable or not older than its
  row in the metadata root that the trusted state record names.

What is random is asked of a `Chooser`, so that one model serves seeds and exhaustive search alike.
`Rules` names each rule that can be broken; tests break them one by one.

Left out: creation and deletion of objects, space, the tree above the pages, sealing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

META = 0
"""The number of the metadata object."""

ROOT, DATA = "root", "data"
Slot = tuple[str, int]
"""A kind and an index: (ROOT, 2) or (DATA, 17)."""

Action = tuple[str | int, ...]
"""The name of a method of `VolumeModel` and its arguments."""


class Violation(Exception):
    """The protocol broke a promise."""


class Chooser(Protocol):
    """The source of every choice that the protocol does not make."""

    def pick(self, count: int) -> int:
        """Return a number from 0 to count - 1."""


@dataclass(frozen=True)
class Rules:
    """The protocol; a test sets one field to False in order to break that rule."""

    fence: bool = True
    """Recovery makes an object durable before it reads roots that no row names exactly."""
    read_device: bool = True
    """Recovery reads the device: the cache shows pages of a failed barrier that are not there."""
    tag_at_start: bool = True
    """Slots of a commit are not rewritten in place from its start on, rather than from its end."""
    fold_barrier: bool = True
    """A commit without a delta makes all else durable before its root, for a group or not."""
    pins: bool = True
    """A root slot that a durable or captured mark names exactly is not written."""
    hold_until_mark: bool = True
    """Replaced data slots of an object outside the active set wait for a durable mark."""
    hold_captured: bool = True
    """...and those of any object for a captured mark that names an older root exactly."""
    keep_in_flight: bool = True
    """A mark keeps an object in the active set while a solo commit of it is in flight."""
    solo_waits: bool = True
    """A solo commit waits while a captured mark drops its object from the active set."""
    match_epoch: bool = True
    """Recovery of an active object takes only roots of the epoch in which it became active."""
    reserve_epoch: bool = True
    """A mount notes its epoch in the trusted state before it writes a root of that epoch."""
    state_first: bool = True
    """The first mark of a mount reaches the state record before the mount's first other root."""


@dataclass(frozen=True)
class Config:
    """The size of the world and what may happen in it."""

    objects: int = 1
    pages: int = 1
    root_slots: int = 4
    failures: bool = False
    folds: bool = False
    attacker: bool = False


@dataclass(frozen=True)
class Root:
    """The contents of a root slot. `uid` plays the random salt R that names a root."""

    uid: int
    slot: int
    epoch: int
    counter: int
    table: tuple[tuple[int, int, int], ...]
    """(page, data slot, token) of each page."""
    delta: tuple[tuple[int, int], ...]
    """(data slot, token) of each write that this commit made: what recovery has to verify.

    Empty after a fold: the tree holds the entries, and nobody verifies a whole tree at a mount.
    """
    rows: tuple[Row, ...] = ()
    """In object 0: the row of object 1, 2, ..."""

    @property
    def order(self) -> tuple[int, int]:
        """Roots of one object are ordered by mount epoch, then counter."""
        return self.epoch, self.counter


@dataclass(frozen=True)
class Row:
    """What the metadata know of an object: a root, and since when newer ones may be taken."""

    record: Root
    active_epoch: int | None = None


class Disk:
    """A backing file under a page cache that a power loss takes away.

    `pending` are writes without a barrier, oldest first. `ghosts` are pages whose barrier failed:
    the cache shows them, clean, so that no later barrier will ever write them. `log` is what an
    attacker who watches has seen being written.
    """

    def __init__(self) -> None:
        self.durable: dict[Slot, Root | int | None] = {}
        self.pending: list[tuple[Slot, Root | int]] = []
        self.ghosts: dict[Slot, Root | int] = {}
        self.log: list[tuple[Slot, Root | int]] = []

    def copy(self) -> Disk:
        """Return an independent copy."""
        other = Disk()
        other.durable, other.pending = dict(self.durable), list(self.pending)
        other.ghosts = dict(self.ghosts)
        other.log = list(self.log)
        return other

    def view(self) -> dict[Slot, Root | int | None]:
        """Return what a read through the page cache finds."""
        return {**self.durable, **self.ghosts, **dict(self.pending)}

    def write(self, slot: Slot, value: Root | int) -> None:
        """Write a slot into the page cache."""
        self.ghosts.pop(slot, None)
        self.pending.append((slot, value))
        self.log.append((slot, value))

    def barrier(self) -> None:
        """Succeed in fdatasync."""
        self.durable.update(self.pending)
        self.pending.clear()

    def fail_barrier(self, chooser: Chooser) -> None:
        """Fail in fdatasync: some writes arrive, all pages turn clean, the cache keeps them."""
        cached = dict(self.pending)
        self._settle(chooser)
        self.ghosts.update(
            {slot: value for slot, value in cached.items() if self.durable.get(slot) != value}
        )

    def lose_power(self, chooser: Chooser) -> None:
        """Keep any subset of the unsynced writes, each whole or torn, and empty the cache."""
        self._settle(chooser)
        self.ghosts.clear()

    def drop_cache(self) -> None:
        """Forget clean pages, or read past them (O_DIRECT)."""
        self.ghosts.clear()

    def tamper(self, chooser: Chooser) -> None:
        """Destroy a slot or put back anything that it ever held."""
        slot, value = self.log[chooser.pick(len(self.log))]
        self.barrier()
        self.durable[slot] = value if chooser.pick(3) else None

    def roll_back(self, chooser: Chooser) -> None:
        """Put back the whole file as it was at some time."""
        self.pending.clear()
        self.durable = dict(self.log[: chooser.pick(len(self.log)) + 1])

    def _settle(self, chooser: Chooser) -> None:
        writes: dict[Slot, list[Root | int]] = {}
        for slot, value in self.pending:
            writes.setdefault(slot, []).append(value)
        for slot, values in writes.items():
            choice = chooser.pick(len(values) + 2)
            if choice == len(values) + 1:
                self.durable[slot] = None
            elif choice > 0:
                self.durable[slot] = values[choice - 1]
        self.pending.clear()


class ObjectModel:
    """One open object: its last completed commit, the next one, and which slots may be written."""

    def __init__(self, disk: Disk, rules: Rules, config: Config, tokens: int = 0) -> None:
        self.disk, self.rules, self.config = disk, rules, config
        self.tokens = tokens  # the newest token or uid drawn for this object, over all mounts
        self.crash()

    def crash(self) -> None:
        """Forget everything but the file."""
        self.committed: Root | None = None  # None: unreadable
        self.counter = 0  # the highest one seen in an authentic root, adopted or not
        self.table: dict[int, tuple[int, int]] = {}
        self.fresh: dict[int, int] = {}  # data slots that belong to the next commit, with token
        self.replaced: dict[int, int] = {}  # data slot -> counter of the commit that left it
        self.end = 0
        self.in_flight: Root | None = None
        self.solo = False
        self.poisoned = False

    def copy(self) -> ObjectModel:
        """Return an independent copy."""
        other = ObjectModel(self.disk.copy(), self.rules, self.config, self.tokens)
        other.committed, other.counter = self.committed, self.counter
        other.table, other.fresh = dict(self.table), dict(self.fresh)
        other.replaced, other.end = dict(self.replaced), self.end
        other.in_flight, other.solo, other.poisoned = self.in_flight, self.solo, self.poisoned
        return other

    def _token(self) -> int:
        self.tokens += 1
        return self.tokens

    # Recovery

    def read_roots(self, *, exact: bool = False) -> list[Root]:
        """Return the authentic roots of an unclean file, newest first.

        A root that is named exactly was durable when it was named; any other one has to be made
        so before it is adopted.
        """
        if self.rules.fence and not exact:
            self.disk.barrier()
        if self.rules.read_device and not exact:
            self.disk.drop_cache()
        roots = [value for value in self.disk.view().values() if isinstance(value, Root)]
        self.counter = max([root.counter for root in roots], default=0)
        return sorted(roots, key=lambda root: root.order, reverse=True)

    def verifies(self, root: Root) -> bool:
        """Say whether all that the root's own commit wrote is there."""
        view = self.disk.view()
        return all(view.get((DATA, slot)) == token for slot, token in root.delta)

    def readable(self, root: Root) -> bool:
        """Say whether every page is there: what the promise is about."""
        view = self.disk.view()
        return all(view.get((DATA, slot)) == token for _, slot, token in root.table)

    def adopt(self, root: Root) -> None:
        """Go on from a root; every slot that it does not reach is free."""
        self.committed = root
        self.counter = max(self.counter, root.counter)
        self.table = {page: (slot, token) for page, slot, token in root.table}
        used = {slot for _, slot, _ in root.table}
        self.end = 1 + max([slot for kind, slot in self.disk.view() if kind == DATA], default=-1)
        self.replaced = {slot: 0 for slot in range(self.end) if slot not in used}

    # Writing

    def write(self, page: int, floor: int) -> None:
        """Change a page. Slots replaced by commits up to `floor` may be used again."""
        token = self._token()
        slot, _ = self.table.get(page, (None, 0))
        if slot is None or slot not in self.fresh:
            if slot is not None:
                self.replaced[slot] = self.counter + 1
            slot = self._take(floor)
        self.fresh[slot] = token
        self.table[page] = (slot, token)
        self.disk.write((DATA, slot), token)

    def _take(self, floor: int) -> int:
        free = [slot for slot, counter in self.replaced.items() if counter <= floor]
        if free:
            slot = min(free)
            del self.replaced[slot]
            return slot
        self.end += 1
        return self.end - 1

    def free_root_slot(self, pinned: set[int]) -> int | None:
        """Return a root slot for the next commit, or None: wait for the mark."""
        assert self.committed is not None
        taken = pinned | {self.committed.slot}
        return next((s for s in range(self.config.root_slots) if s not in taken), None)

    def start(self, slot: int, epoch: int, rows: tuple[Row, ...] = (), *, fold: bool) -> Root:
        """Freeze the pages and write a root; the caller owes it a barrier."""
        self.counter += 1
        table = tuple((page, slot, token) for page, (slot, token) in sorted(self.table.items()))
        delta = () if fold else tuple(sorted(self.fresh.items()))
        root = Root(self._token(), slot, epoch, self.counter, table, delta, rows)
        self.disk.write((ROOT, slot), root)
        self.in_flight = root
        if self.rules.tag_at_start:
            self.fresh.clear()
        return root

    def finish(self) -> Root:
        """Complete the barrier of the commit in flight."""
        assert self.in_flight is not None
        self.disk.barrier()
        self.committed, self.in_flight, self.solo = self.in_flight, None, False
        if not self.rules.tag_at_start:
            frozen = {slot: token for _, slot, token in self.committed.table}
            self.fresh = {s: token for s, token in self.fresh.items() if frozen.get(s) != token}
        return self.committed

    def fail(self, chooser: Chooser) -> None:
        """Fail the barrier: nothing is committed until the next recovery."""
        self.disk.fail_barrier(chooser)
        self.in_flight, self.solo, self.poisoned = None, False, True

    def key(self) -> Hashable:
        """Return what tells two states apart."""
        return (
            tuple(sorted(self.disk.durable.items(), key=lambda item: item[0])),
            tuple(self.disk.pending),
            tuple(sorted(self.disk.ghosts.items(), key=lambda item: item[0])),
            self.tokens, self.committed, self.counter, self.in_flight, self.solo, self.poisoned,
            tuple(sorted(self.table.items())), tuple(sorted(self.fresh.items())),
            tuple(sorted(self.replaced.items())), self.end,
        )  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A captured metadata commit: `durable` after its barrier, gone once the state names it."""

    root: Root
    first: bool = False
    durable: bool = False


@dataclass
class Ledger:
    """What was promised, kept outside the volume: the judge of every recovery."""

    line: dict[int, list[Root]] = field(default_factory=dict)
    """The roots of each object that may still be opened, oldest first."""
    abandoned: set[tuple[int, int]] = field(default_factory=set)
    """(object, uid) of roots that a mount which served had passed over."""
    promised: dict[int, Root] = field(default_factory=dict)
    """The newest root of each object that was acknowledged, recorded or served."""

    def copy(self) -> Ledger:
        """Return an independent copy."""
        line = {number: list(roots) for number, roots in self.line.items()}
        return Ledger(line, set(self.abandoned), dict(self.promised))

    def promise(self, number: int, root: Root) -> None:
        """Note that the object may not become older than this root any more."""
        old = self.promised.get(number)
        if old is None or root.order > old.order:
            self.promised[number] = root

    def serve(self, number: int, opened: Root, *successors: Root) -> None:
        """A mount serves this root: all other ones that are not its ancestors are abandoned."""
        line = self.line[number]
        kept = [*line[: line.index(opened) + 1], *successors]
        self.abandoned |= {(number, root.uid) for root in line if root not in kept}
        self.line[number] = kept


class VolumeModel:
    """A volume and everything that can happen to it, one public method an `Action`."""

    def __init__(self, rules: Rules, config: Config, chooser: Chooser) -> None:
        """Create a volume that has just been mounted for the first time."""
        self.rules, self.config, self.chooser = rules, config, chooser
        self.numbers = range(1, config.objects + 1)
        self.objects = {n: ObjectModel(Disk(), rules, config) for n in (META, *self.numbers)}
        self.ledger = Ledger()
        self.waits: Counter[str] = Counter()
        self.epoch = 1
        self.reserved = 1
        """The highest epoch that the trusted state knows, used or not."""
        self.mounted, self.read_only, self.attacked = True, False, False
        rows: tuple[Row, ...] = ()
        for number in (*self.numbers, META):
            o = self.objects[number]
            o.write(0, 0)
            root = o.start(0, 1, rows if number == META else (), fold=False)
            o.finish()
            rows += (Row(root),)
            self.ledger.line[number] = [root]
            self.ledger.promise(number, root)
        self.state = self.meta_root
        """The metadata root that the trusted state record names."""
        self.mark: Mark | None = None
        self.opened: Root | None = None  # by the recovery under way: the metadata root it found

    def copy(self, chooser: Chooser) -> VolumeModel:
        """Return an independent copy that asks another chooser."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.chooser = chooser
        other.objects = {number: o.copy() for number, o in self.objects.items()}
        other.ledger, other.waits = self.ledger.copy(), self.waits.copy()
        return other

    def key(self) -> Hashable:
        """Return what tells two states apart (only without an attacker: history is left out)."""
        return (
            tuple(o.key() for o in self.objects.values()), self.state, self.mark, self.opened,
            self.mounted, self.read_only, self.epoch, self.reserved,
            tuple(self.ledger.promised.items()), frozenset(self.ledger.abandoned),
        )  # fmt: skip

    # What the volume knows

    @property
    def meta_root(self) -> Root:
        """Return the durable metadata root."""
        root = self.objects[META].committed
        assert root is not None
        return root

    @property
    def captured(self) -> Root | None:
        """Return the metadata root in flight, if any."""
        return self.mark.root if self.mark and not self.mark.durable else None

    @property
    def serving(self) -> bool:
        """Say whether ordinary objects may be written."""
        if not self.mounted or self.read_only:
            return False
        if self.mark is None or not self.mark.first:
            return True
        return self.mark.durable and not self.rules.state_first

    def exact(self, number: int, *metas: Root | None) -> list[Root]:
        """Return the roots of an object that one of these metadata roots names exactly."""
        rows = [meta.rows[number - 1] for meta in metas if meta is not None]
        return [row.record for row in rows if row.active_epoch is None]

    def active(self, number: int, meta: Root | None) -> bool:
        """Say whether this metadata root holds the object in the active set."""
        return meta is not None and meta.rows[number - 1].active_epoch is not None

    def floor(self, number: int) -> int:
        """Return the counter up to which commits have given their replaced data slots back."""
        o = self.objects[number]
        assert o.committed is not None
        holders = [o.committed]
        if self.rules.hold_until_mark:
            holders += self.exact(number, self.meta_root)
        if self.rules.hold_until_mark and self.rules.hold_captured:
            holders += self.exact(number, self.captured)
        return min(root.counter for root in holders)

    # What may happen next

    def actions(self) -> list[Action]:
        """Return all that may happen next."""
        if not self.mounted:
            down: list[Action] = [("mount",), ("lose_power",)]
            down += [("fail_fence",)] * self.config.failures
            return down + [("tamper",), ("roll_back",)] * self.config.attacker
        result: list[Action] = [("kill",), ("lose_power",)]
        if self.mark and self.mark.durable:
            result.append(("record_state",))
        elif self.mark and not self.read_only:
            result.append(("finish_mark",))
            result += [("fail_mark",)] * self.config.failures
        elif self.serving:
            result.append(("capture_group",))
        for number in self.numbers:
            result += self._object_actions(number)
        return result

    def _object_actions(self, number: int) -> list[Action]:
        o = self.objects[number]
        if o.committed is None or o.poisoned:
            return []
        result: list[Action] = []
        if o.in_flight:
            result.append(("finish", number))
            if self.config.failures:
                result.append(("fail", number))
        if not self.serving:
            return result
        result += [("write", number, page) for page in range(self.config.pages)]
        if self.mark is None and not self.active(number, self.meta_root):
            result.append(("enter", number))
        if not o.in_flight:
            result.append(("start", number))
            if self._may_go_solo(number):
                result.append(("start_solo", number))
        return result

    def _may_go_solo(self, number: int) -> bool:
        dropped = bool(self.exact(number, self.captured)) and self.rules.solo_waits
        return self.active(number, self.meta_root) and not dropped

    def apply(self, action: Action) -> None:
        """Let it happen; raise `Violation` if a recovery finds a promise broken."""
        name, *arguments = action
        getattr(self, str(name))(*arguments)

    # Objects

    def write(self, number: int, page: int) -> None:
        """Change a page of an object."""
        self.objects[number].write(page, self.floor(number))

    def start(self, number: int) -> None:
        """Start a commit for the next group."""
        self._start(number, solo=False)

    def start_solo(self, number: int) -> None:
        """Start a commit that will be acknowledged by its own barrier."""
        self._start(number, solo=True)

    def _start(self, number: int, solo: bool) -> None:
        o = self.objects[number]
        named = self.exact(number, self.meta_root, self.captured) if self.rules.pins else []
        slot = o.free_root_slot({root.slot for root in named})
        kind = "solo" if solo else "group"
        self.waits[f"{kind} commits"] += 1
        if slot is None:
            self.waits[f"{kind} waits, mark {'in flight' if self.captured else 'needed'}"] += 1
            return
        o.solo = solo
        fold = self._fold(o)
        self.ledger.line[number].append(o.start(slot, self.epoch, fold=fold))

    def _fold(self, o: ObjectModel) -> bool:
        """Decide whether the commit folds its delta into the tree; if so, it takes two barriers."""
        fold = self.config.folds and self.chooser.pick(2) == 1
        if fold and (o.solo or self.rules.fold_barrier):
            o.disk.barrier()
        return fold

    def finish(self, number: int) -> None:
        """Complete an object's barrier; a solo commit is acknowledged."""
        o = self.objects[number]
        solo = o.solo
        root = o.finish()
        if solo:
            self.ledger.promise(number, root)

    def fail(self, number: int) -> None:
        """Fail an object's barrier."""
        self.objects[number].fail(self.chooser)

    # Marks

    def enter(self, number: int) -> None:
        """Capture a mark that puts an object into the active set."""
        rows = list(self.meta_root.rows)
        rows[number - 1] = Row(self._committed(number), self.epoch)
        self._capture(tuple(rows))

    def capture_group(self) -> None:
        """Capture a group's mark: every object at its last completed barrier.

        Which objects stay in the active set, or enter it because they were fsynced often, is
        policy, and so a choice; but a solo commit in flight must stay.
        """
        self._capture(tuple(self._group_row(number) for number in self.numbers))

    def _group_row(self, number: int) -> Row:
        o = self.objects[number]
        if o.committed is None:
            return self.meta_root.rows[number - 1]
        busy = o.in_flight is not None and o.solo and self.rules.keep_in_flight
        return Row(o.committed, self.epoch if busy or self.chooser.pick(2) else None)

    def _committed(self, number: int) -> Root:
        root = self.objects[number].committed
        assert root is not None
        return root

    def _capture(self, rows: tuple[Row, ...], first: bool = False) -> None:
        meta = self.objects[META]
        meta.write(0, self.meta_root.counter)
        slot = meta.free_root_slot(set())
        assert slot is not None
        root = meta.start(slot, self.epoch, rows, fold=self._fold(meta))
        self.ledger.line[META].append(root)
        self.mark = Mark(root, first)

    def finish_mark(self) -> None:
        """Complete the metadata barrier: pins and slots of older marks are released."""
        assert self.mark is not None
        root = self.objects[META].finish()
        self.mark = Mark(root, self.mark.first, durable=True)
        if self.mark.first and not self.rules.state_first:
            self._serve()
        if not self.mark.first:
            self._promise_rows(root)

    def record_state(self) -> None:
        """Write the trusted state record, which ends the mark."""
        assert self.mark is not None
        self.state = self.mark.root
        if self.mark.first and self.rules.state_first:
            self._serve()
        self.mark = None

    def fail_mark(self) -> None:
        """Fail the metadata barrier: read-only from now on."""
        self.objects[META].fail(self.chooser)
        self.read_only = True

    def _promise_rows(self, meta: Root) -> None:
        self.ledger.promise(META, meta)
        for number, row in zip(self.numbers, meta.rows, strict=True):
            self.ledger.promise(number, row.record)

    # Crashes

    def kill(self) -> None:
        """The process dies; the page cache survives."""
        for o in self.objects.values():
            o.crash()
        self.mounted, self.read_only, self.mark, self.opened = False, False, None, None

    def lose_power(self) -> None:
        """The machine dies."""
        for o in self.objects.values():
            o.disk.lose_power(self.chooser)
        self.kill()

    def fail_fence(self) -> None:
        """A mount dies at the first barrier of its recovery, which fails."""
        self.objects[self.chooser.pick(len(self.objects))].disk.fail_barrier(self.chooser)

    def tamper(self) -> None:
        """The attacker changes some slot; from now on his promise counts, not the honest one."""
        self._attack().tamper(self.chooser)

    def roll_back(self) -> None:
        """The attacker puts back an old copy of some file."""
        self._attack().roll_back(self.chooser)

    def _attack(self) -> Disk:
        self.attacked = True
        disk = self.objects[self.chooser.pick(len(self.objects))].disk
        disk.drop_cache()
        return disk

    # Recovery

    def mount(self) -> None:
        """Recover up to the capture of the first mark, which pins what was adopted."""
        meta = self.objects[META]
        roots = meta.read_roots()
        found = next((r for r in roots if self._is_current(r) and meta.verifies(r)), None)
        if found is None:
            self._unreadable(META)
            return
        self._check(META, found)
        self.epoch = 1 + max(self.reserved, self.state.epoch, *(root.epoch for root in roots))
        if self.rules.reserve_epoch:
            self.reserved = self.epoch
        rows = tuple(self._open(n, row) for n, row in zip(self.numbers, found.rows, strict=True))
        meta.adopt(found)
        self.mounted, self.opened = True, found
        self._capture(rows, first=True)

    def _is_current(self, root: Root) -> bool:
        return root.uid == self.state.uid or root.order > self.state.order

    def _open(self, number: int, row: Row) -> Row:
        """Adopt what the row allows. An unreadable object keeps its row: it may be mended."""
        o = self.objects[number]
        roots = o.read_roots(exact=row.active_epoch is None)
        roots = [root for root in roots if self._allows(row, root) and o.verifies(root)]
        if not roots:
            self._unreadable(number)
            return row
        self._check(number, roots[0])
        o.adopt(roots[0])
        return Row(roots[0])

    def _allows(self, row: Row, root: Root) -> bool:
        if root.uid == row.record.uid:
            return True
        if row.active_epoch is None or root.order <= row.record.order:
            return False
        return root.epoch == row.active_epoch or not self.rules.match_epoch

    def _serve(self) -> None:
        assert self.opened is not None and self.mark is not None
        self.ledger.serve(META, self.opened, self.mark.root)
        for number in self.numbers:
            root = self.objects[number].committed
            if root is not None:
                self.ledger.serve(number, root)
        self._promise_rows(self.mark.root)

    # Judgement

    def _unreadable(self, number: int) -> None:
        if not self.attacked:
            raise Violation(f"object {number} is unreadable without an attacker")

    def _check(self, number: int, root: Root) -> None:
        """Judge the root that a recovery is about to adopt."""
        if (number, root.uid) in self.ledger.abandoned:
            raise Violation(f"object {number}: an abandoned root came back")
        if self.attacked:
            bound = self.state if number == META else self.state.rows[number - 1].record
        else:
            bound = self.ledger.promised[number]
            if not self.objects[number].readable(root):
                raise Violation(f"object {number}: a page of the adopted root is gone")
        if root.order < bound.order:
            raise Violation(f"object {number} is older than promised")
