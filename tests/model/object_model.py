"""The slow model of one object: docs/format.md in plain Python, on nothing but primitives.

It reads and writes the backing files that the C core reads and writes, and shares no line with it,
so a mistake in either shows as a difference. Nothing is optimised: a fold builds the whole tree
anew, a slot is never used twice, everything is read again for each root. "(2.4)" names the section
of docs/format.md that a definition follows; for keys it is docs/format-keys.md.

* `Keys` seals and opens roots and nodes.
* `Version` is what one root says: the object as of one commit.
* `open_exactly`, `recover_active`, `recover_meta` choose the root that counts (4).
* `ObjectModel` changes an object and commits it (3).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NODE = 4096  # bytes of a slot, a data node, a tree node
ROOT_SLOTS = 4
FANOUT = 73
MAX_HEIGHT = 9
DELTA_MAX = 56
MAX_SIZE = 2**63 - 1
VERSION = 1
MAGIC = b"ENCFSD"
DATA, TREE = 1, 2  # kinds of nodes (2.6)
_NONCE = bytes(12)  # zero: each key seals one message (2.6)

Random = Callable[[int], bytes]


class Damaged(Exception):
    """Where a root or a node should be there is none, or it is not authentic (5)."""


class Refused(Damaged):
    """Authentic contents that a reader must refuse all the same (5)."""


class Stale(Exception):
    """Object 0 is older than the trusted state record, or another one of the same order (4)."""


def seeded(seed: bytes) -> Random:
    """Return a source of bytes that is the same each time: for vectors, never for real volumes.

    Draw number i of n bytes is SHAKE-256(seed, i as u64). `ObjectModel.commit` draws the keys of
    data nodes by ascending index, then of tree nodes bottom-up and from left to right, then R.
    """
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(seed + struct.pack("<Q", drawn - 1)).digest(size)

    return draw


def nodes_for(size: int) -> int:
    return -(-size // NODE)


def height_for(nodes: int) -> int:
    """Return the lowest height whose tree holds `nodes` data nodes; 0 for none."""
    height = 0
    while nodes > (FANOUT**height if height else 0):
        height += 1
    return height


def get_slot(file: bytes | bytearray, slot: int) -> bytes:
    """Return a slot of a backing file; past the end of the file there are zeros (5)."""
    return bytes(file[slot * NODE : (slot + 1) * NODE]).ljust(NODE, b"\0")


def put_slot(file: bytearray, slot: int, content: bytes | bytearray) -> None:
    assert len(content) == NODE
    file.extend(bytes(max(0, (slot + 1) * NODE - len(file))))
    file[slot * NODE : (slot + 1) * NODE] = content


# Structures


@dataclass(frozen=True)
class Entry:
    """How a parent knows its child (2.1)."""

    slot: int
    key: bytes
    tag: bytes

    SIZE = 56

    def pack(self) -> bytes:
        return struct.pack("<Q32s16s", self.slot, self.key, self.tag)

    @classmethod
    def parse(cls, raw: bytes, end: int) -> Entry:
        """Parse an entry of a root whose `end` is given."""
        entry = cls(*struct.unpack("<Q32s16s", raw))
        if entry.slot == 0:
            if any(raw):
                raise Refused("a hole that is not zero")
        elif not ROOT_SLOTS <= entry.slot < end:
            raise Refused("slot outside [4, end)")
        return entry


HOLE = Entry(0, bytes(32), bytes(16))


@dataclass(frozen=True)
class Root:
    """The plaintext of a root (2.4)."""

    epoch: int
    counter: int
    instance: bytes
    previous: bytes
    size: int
    atime: int
    mtime: int
    ctime: int
    end: int
    nodes: int
    height: int = 0
    top: Entry = HOLE
    delta: dict[int, Entry] = field(default_factory=dict)

    SIZE = 4040
    _HEAD = struct.Struct("<QQ16s32sQqqqQQBBHI56s272s")
    DELTA_OFFSET = 448

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.counter

    def pack(self) -> bytes:
        head = self._HEAD.pack(
            self.epoch, self.counter, self.instance, self.previous, self.size,
            self.atime, self.mtime, self.ctime, self.end, self.nodes,
            self.height, 0, len(self.delta), 0, self.top.pack(), bytes(272),
        )  # fmt: skip
        delta = b"".join(
            struct.pack("<Q", index) + entry.pack() for index, entry in sorted(self.delta.items())
        )
        return (head + delta).ljust(self.SIZE, b"\0")

    @classmethod
    def parse(cls, raw: bytes) -> Root:
        """Parse an authentic plaintext; Refused if it breaks a rule of section 5."""
        (
            epoch, counter, instance, previous, size, atime, mtime, ctime, end, nodes,
            height, reserved0, count, reserved1, top, reserved2,
        ) = cls._HEAD.unpack(raw[: cls.DELTA_OFFSET])  # fmt: skip
        reserved3 = raw[cls.DELTA_OFFSET + 64 * DELTA_MAX :]
        if reserved0 or reserved1 or any(reserved2) or any(reserved3):
            raise Refused("reserved bytes")
        if size > MAX_SIZE:
            raise Refused("size")
        if not ROOT_SLOTS <= end <= MAX_SIZE // NODE:
            raise Refused("end")
        if nodes > nodes_for(size):
            raise Refused("number of data nodes")
        if height > min(MAX_HEIGHT, height_for(nodes_for(size))):
            raise Refused("height")
        top_entry = Entry.parse(top, end)
        if (height == 0) != (top_entry == HOLE):
            raise Refused("top entry and height")
        if count > DELTA_MAX:
            raise Refused("number of delta entries")
        delta: dict[int, Entry] = {}
        for i in range(DELTA_MAX):
            at = cls.DELTA_OFFSET + 64 * i
            if i >= count:
                if any(raw[at : at + 64]):
                    raise Refused("unused delta entries")
                continue
            index = int.from_bytes(raw[at : at + 8], "little")
            if delta and index <= max(delta):
                raise Refused("delta not ascending")
            if index >= nodes_for(size):
                raise Refused("delta index past the size")
            delta[index] = Entry.parse(raw[at + 8 : at + 64], end)
        return cls(
            epoch, counter, instance, previous, size, atime, mtime, ctime, end, nodes,
            height, top_entry, delta,
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """Names one exact root (4)."""

    epoch: int
    counter: int
    r: bytes

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.counter


@dataclass(frozen=True)
class StoredRoot:
    """An authentic root and where it lies."""

    slot: int
    r: bytes
    root: Root

    @property
    def record(self) -> Record:
        return Record(self.root.epoch, self.root.counter, self.r)


# Keys and sealing


def hmac256(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def f(key: bytes, label: str, context: bytes) -> bytes:
    """F of docs/format-keys.md: HKDF-Expand for 32 bytes is a single HMAC."""
    return hmac256(key, b"encfsd/v1/" + label.encode() + b"\0" + context + b"\x01")


def volume_prk(volume_id: bytes, volume_key: bytes) -> bytes:
    """Return P: HKDF-Extract of VK with VID as the salt."""
    return hmac256(volume_id, volume_key)


@dataclass(frozen=True)
class Keys:
    """Seals and opens the roots and nodes of one object (2.3, 2.6)."""

    volume_id: bytes
    p: bytes
    object_id: bytes

    @cached_property
    def object_key(self) -> bytes:
        """KO; the key epoch in front of the object id is 0."""
        return f(self.p, "object", struct.pack("<I", 0) + self.object_id)

    def root_key(self, r: bytes) -> bytes:
        return f(self.object_key, "root", r)

    def _root_aad(self, magic: bytes, slot: int, r: bytes) -> bytes:
        return magic + self.volume_id + self.object_id + struct.pack("<Q", slot) + r

    def seal_root(self, slot: int, r: bytes, plain: bytes, version: int = VERSION) -> bytes:
        assert len(plain) == Root.SIZE
        magic = MAGIC + struct.pack("<H", version)
        sealed = AESGCM(self.root_key(r)).encrypt(_NONCE, plain, self._root_aad(magic, slot, r))
        return magic + r + sealed[-16:] + sealed[:-16]

    def open_root(self, slot: int, raw: bytes) -> StoredRoot:
        magic, r, tag, ciphertext = raw[:8], raw[8:40], raw[40:56], raw[56:]
        if magic[:6] != MAGIC:
            raise Damaged("no root")
        if magic[6:] != struct.pack("<H", VERSION):
            raise Refused("format version")
        try:
            plain = AESGCM(self.root_key(r)).decrypt(
                _NONCE, ciphertext + tag, self._root_aad(magic, slot, r)
            )
        except InvalidTag:
            raise Damaged("not authentic") from None
        return StoredRoot(slot, r, Root.parse(plain))

    def _node_aad(self, kind: int, level: int) -> bytes:
        return struct.pack("<HBB", VERSION, kind, level) + self.object_id

    def seal_node(self, kind: int, level: int, key: bytes, plain: bytes) -> tuple[bytes, bytes]:
        """Return sealed node and tag."""
        assert len(plain) == NODE
        sealed = AESGCM(key).encrypt(_NONCE, plain, self._node_aad(kind, level))
        return sealed[:-16], sealed[-16:]

    def open_node(self, kind: int, level: int, entry: Entry, sealed: bytes) -> bytes:
        try:
            return AESGCM(entry.key).decrypt(
                _NONCE, sealed + entry.tag, self._node_aad(kind, level)
            )
        except InvalidTag:
            raise Damaged("not authentic") from None


# Reading


def read_roots(file: bytes | bytearray, keys: Keys) -> dict[int, StoredRoot]:
    """Return the roots that a backing file holds, by root slot; what is damaged holds none."""
    roots = {}
    for slot in range(ROOT_SLOTS):
        try:
            roots[slot] = keys.open_root(slot, get_slot(file, slot))
        except Damaged:
            continue
    return roots


def next_counter(roots: dict[int, StoredRoot]) -> int:
    """Return the counter of the next root: it exceeds every authenticated one seen (4)."""
    return 1 + max((stored.root.counter for stored in roots.values()), default=0)


class Version:
    """The object as one root of a backing file has it."""

    def __init__(self, file: bytes | bytearray, keys: Keys, stored: StoredRoot) -> None:
        """Keep a copy of `file`, so that later changes of it do not show."""
        self.file = bytes(file)
        self.keys = keys
        self.stored = stored
        self.root = stored.root
        self._tree_nodes: dict[Entry, list[Entry]] = {}

    def tree_node(self, level: int, entry: Entry) -> list[Entry]:
        """Return the entries of the tree node that lies where `entry` says (2.2)."""
        if entry not in self._tree_nodes:
            plain = self.keys.open_node(TREE, level, entry, get_slot(self.file, entry.slot))
            if any(plain[FANOUT * Entry.SIZE :]):
                raise Refused("reserved bytes")
            self._tree_nodes[entry] = [
                Entry.parse(plain[i * Entry.SIZE : (i + 1) * Entry.SIZE], self.root.end)
                for i in range(FANOUT)
            ]
        return self._tree_nodes[entry]

    def find(self, index: int) -> Entry:
        """Return the entry of data node `index`: from the delta, else down the tree (2.5)."""
        if index in self.root.delta:
            return self.root.delta[index]
        entry = self.root.top
        if index >= FANOUT**self.root.height:
            return HOLE
        for level in range(self.root.height, 0, -1):
            if entry == HOLE:
                break
            entry = self.tree_node(level, entry)[index // FANOUT ** (level - 1) % FANOUT]
        return entry

    def data_node(self, index: int) -> bytes:
        entry = self.find(index)
        if entry == HOLE:
            return bytes(NODE)
        return self.keys.open_node(DATA, 0, entry, get_slot(self.file, entry.slot))

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the object, fewer at its end. Damaged: nothing of the range counts."""
        end = min(offset + size, self.root.size)
        if offset >= end:
            return b""
        first = offset // NODE
        nodes = b"".join(self.data_node(i) for i in range(first, nodes_for(end)))
        return nodes[offset - first * NODE : end - first * NODE]

    def tree_slots(self) -> Iterator[int]:
        """Yield the slots of all tree nodes."""
        for level, _, entry in self._walk(self.root.height, 0, self.root.top):
            if level:
                yield entry.slot

    def tree_entries(self) -> dict[int, Entry]:
        """Return the data nodes that the tree holds, whatever the delta says of them."""
        walk = self._walk(self.root.height, 0, self.root.top)
        return {index: entry for level, index, entry in walk if level == 0}

    def _walk(self, level: int, index: int, entry: Entry) -> Iterator[tuple[int, int, Entry]]:
        """Yield level, index within the level, and entry of all that `entry` reaches."""
        if entry == HOLE:
            return
        yield level, index, entry
        if level:
            for k, child in enumerate(self.tree_node(level, entry)):
                yield from self._walk(level - 1, FANOUT * index + k, child)

    def entries(self) -> dict[int, Entry]:
        """Return all data nodes that are not holes, by index."""
        entries = {**self.tree_entries(), **self.root.delta}
        return {index: entries[index] for index in sorted(entries) if entries[index] != HOLE}

    def verify_delta(self) -> None:
        """Open every data node of the delta: only then did this commit reach the disk whole (4)."""
        for index in self.root.delta:
            self.data_node(index)

    def check(self) -> None:
        """Assert all that a writer owes: every node authentic, and what a reader need not see."""
        entries = self.entries()
        for index in entries:
            self.data_node(index)
        assert len(entries) == self.root.nodes
        tree = self.tree_entries()
        assert max(tree, default=-1) < nodes_for(self.root.size), "the tree reaches past the size"
        assert tree or self.root.height == 0, "a tree that holds nothing"
        slots = [entry.slot for entry in entries.values()] + list(self.tree_slots())
        assert len(set(slots)) == len(slots), "one slot for two nodes"
        if self.root.size % NODE:
            last = self.data_node(self.root.size // NODE)
            assert not any(last[self.root.size % NODE :]), "bytes past the size are not zero"


# Opening and recovery (4)


def open_exactly(file: bytes | bytearray, keys: Keys, record: Record) -> Version:
    """Open an object that is not active."""
    for stored in read_roots(file, keys).values():
        if stored.record == record:
            return Version(file, keys, stored)
    raise Damaged("the recorded root is gone")


def recover_active(
    file: bytes | bytearray, keys: Keys, record: Record, active_epoch: int
) -> Version:
    """Open an active object: at a later root of the epoch in which it became active, if any."""
    for stored in _newest_first(file, keys):
        if stored.record == record:
            return Version(file, keys, stored)
        if stored.root.epoch == active_epoch and stored.root.order > record.order:
            version = Version(file, keys, stored)
            if _is_whole(version):
                return version
    raise Damaged("neither the recorded root nor a later one")


def recover_meta(file: bytes | bytearray, keys: Keys, trusted: Record) -> Version:
    """Open object 0. Stale if it is not what the trusted state record has, or a successor."""
    for stored in _newest_first(file, keys):
        version = Version(file, keys, stored)
        if not _is_whole(version):
            continue
        if stored.root.order < trusted.order:
            raise Stale("older")
        if stored.root.order == trusted.order and stored.record != trusted:
            raise Stale("another root of the same order")
        return version
    raise Damaged("no root")


def _newest_first(file: bytes | bytearray, keys: Keys) -> list[StoredRoot]:
    roots = read_roots(file, keys).values()
    return sorted(roots, key=lambda stored: stored.root.order, reverse=True)


def _is_whole(version: Version) -> bool:
    try:
        version.verify_delta()
    except Damaged:
        return False
    return True


# Writing (3)


class ObjectModel:
    """One object that is open for writing. `file` is its backing file."""

    def __init__(
        self,
        keys: Keys,
        *,
        epoch: int = 1,
        instance: bytes = bytes(16),
        random: Random = os.urandom,
        base: Version | None = None,
    ) -> None:
        """Continue `base`, or start a new and empty object."""
        self.keys = keys
        self.epoch = epoch
        self.instance = instance
        self.random = random
        self.base = base
        self.file = bytearray(base.file if base else bytes(ROOT_SLOTS * NODE))
        self.size = base.root.size if base else 0
        self.times = (base.root.atime, base.root.mtime, base.root.ctime) if base else (0, 0, 0)
        self._changed: dict[int, bytes | None] = {}  # data nodes; None: became a hole
        self._shrank = False

    def _node(self, index: int) -> bytes:
        if index in self._changed:
            return self._changed[index] or bytes(NODE)
        return self.base.data_node(index) if self.base else bytes(NODE)

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        first = offset // NODE
        nodes = b"".join(self._node(i) for i in range(first, nodes_for(end)))
        return nodes[offset - first * NODE : end - first * NODE]

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        for index in range(offset // NODE, nodes_for(end)):
            start = index * NODE
            a, b = max(offset, start), min(end, start + NODE)
            node = self._node(index)
            self._changed[index] = (
                node[: a - start] + data[a - offset : b - offset] + node[b - start :]
            )
        self.size = max(self.size, end)

    def truncate(self, size: int) -> None:
        if size < self.size:
            self._shrank |= nodes_for(size) < nodes_for(self.size)
            for index in self._held():
                if index >= nodes_for(size):
                    self._changed[index] = None
            if size % NODE:
                self._zero(size, NODE - size % NODE)
        self.size = size

    def punch(self, offset: int, size: int) -> None:
        """Make [offset, offset + size) zero; nodes that lie in it become holes.

        So does the last one, if all of its bytes that belong to the file do.
        """
        end = offset + size
        if end >= self.size:
            end = nodes_for(self.size) * NODE
        for index in self._held():
            start = index * NODE
            if offset <= start and start + NODE <= end:
                self._changed[index] = None
            else:
                a, b = max(offset, start), min(end, start + NODE)
                if a < b:
                    self._zero(a, b - a)

    def _held(self) -> list[int]:
        """Return the indices of the data nodes that are not holes."""
        held = dict.fromkeys(self.base.entries() if self.base else (), True)
        held.update({index: node is not None for index, node in self._changed.items()})
        return [index for index, is_data in held.items() if is_data]

    def _zero(self, offset: int, size: int) -> None:
        """Make bytes within one node zero, unless it is a hole."""
        index, start = offset // NODE, offset % NODE
        if index in self._held():
            node = self._node(index)
            self._changed[index] = node[:start] + bytes(size) + node[start + size :]

    def commit(self, *, fold: bool = False) -> Record:
        """Put the state into the backing file. A fold happens if it must, or if `fold` is set."""
        roots = read_roots(self.file, self.keys)
        self._end = max([ROOT_SLOTS, *(stored.root.end for stored in roots.values())])

        # Data nodes, into slots that no root reaches (3, step 1)
        changes = {
            index: HOLE if node is None else self._store(DATA, 0, node)
            for index, node in sorted(self._changed.items())
            if index < nodes_for(self.size)
        }
        old_delta = self.base.root.delta if self.base else {}
        tree = self.base.tree_entries() if self.base else {}
        delta = {**old_delta, **changes}
        entries = {**tree, **delta}
        entries = {i: e for i, e in entries.items() if e != HOLE and i < nodes_for(self.size)}
        height = self.base.root.height if self.base else 0
        top = self.base.root.top if self.base else HOLE

        # The tree, only if the delta cannot hold the changes (3, step 2)
        if fold or self._shrank or len(delta) > DELTA_MAX:
            height, top = self._store_tree(entries)
            delta = {}

        # The root, into a root slot that holds neither the last root nor an older recorded one
        # as long as there is another (3, step 3)
        taken = self.base.stored.slot if self.base else None
        slot = min(
            (slot for slot in range(ROOT_SLOTS) if slot != taken),
            key=lambda slot: roots[slot].root.order if slot in roots else (-1, -1),
        )
        atime, mtime, ctime = self.times
        root = Root(
            epoch=self.epoch,
            counter=next_counter(roots),
            instance=self.instance,
            previous=self.base.stored.r if self.base else bytes(32),
            size=self.size,
            atime=atime,
            mtime=mtime,
            ctime=ctime,
            end=self._end,
            nodes=len(entries),
            height=height,
            top=top,
            delta=delta,
        )
        r = self.random(32)
        put_slot(self.file, slot, self.keys.seal_root(slot, r, root.pack()))
        self.base = Version(self.file, self.keys, StoredRoot(slot, r, root))
        self._changed = {}
        self._shrank = False
        return self.base.stored.record

    def _store(self, kind: int, level: int, plain: bytes) -> Entry:
        """Seal a node into the next new slot."""
        key = self.random(32)
        sealed, tag = self.keys.seal_node(kind, level, key, plain)
        put_slot(self.file, self._end, sealed)
        self._end += 1
        return Entry(self._end - 1, key, tag)

    def _store_tree(self, entries: dict[int, Entry]) -> tuple[int, Entry]:
        """Build the tree of all data nodes anew; return its height and top entry (2.2)."""
        level = 0
        while level == 0 or set(entries) != {0}:
            if not entries:
                return 0, HOLE
            level += 1
            nodes: dict[int, list[Entry]] = {}
            for index, entry in sorted(entries.items()):
                nodes.setdefault(index // FANOUT, [HOLE] * FANOUT)[index % FANOUT] = entry
            entries = {
                index: self._store(TREE, level, b"".join(e.pack() for e in node) + bytes(8))
                for index, node in nodes.items()
            }
        return level, entries[0]
