"""The C core beside the model of the format; run by `test_core_against_model.py`."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encfsd.merkle import Environment, Object
from encfsd.state import RootId
from tests.model import format_vectors
from tests.model.format_backends import choose
from tests.model.format_vectors import Attempt, Expected, Vector
from tests.model.object_model import (
    MAX_SIZE,
    NODE,
    Keys,
    ObjectModel,
    Record,
    Version,
    nodes_for,
    open_exactly,
    read_roots,
)

choose()

KEYS = Keys(b"v" * 16, b"p" * 32, b"o" * 16)


def backing_file(source: Path, object_id: bytes) -> Path:
    if object_id == bytes(16):
        return source / "meta"
    return source / "objects" / object_id.hex()[:2] / object_id.hex()[2:]


@contextmanager
def environment(
    source: Path,
    keys: Keys,
    epoch: int,
    **options: Any,
) -> Iterator[Environment]:
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with Environment(fd, volume_id=keys.volume_id, p=keys.p, epoch=epoch, **options) as env:
            yield env
    finally:
        os.close(fd)


def fails(code: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=rf"^\[Errno {code}\]")


# Vectors


def open_as(env: Environment, keys: Keys, attempt: Attempt) -> Object:
    record = attempt.record
    root = RootId(record.epoch, record.counter, record.r) if record else None
    if attempt.active_epoch is not None:
        return env.recover(keys.object_id, root, attempt.active_epoch)
    assert root
    return env.open(keys.object_id, root)


def check_contents(object_: Object, expected: Expected) -> None:
    extents = expected.extents()
    attributes = object_.attributes
    assert (attributes.size, attributes.nodes) == (expected.size, expected.nodes)
    damaged = {i for d in object_.verify() for i in range(d.first, d.first + d.count)}
    assert damaged == set(expected.unreadable)
    for index in expected.unreadable:
        with fails(errno.EIO):
            object_.read(index * NODE, NODE)
    if damaged:
        with fails(errno.EIO):
            object_.read(0, (max(damaged) + 1) * NODE)
        for start, run in extents:
            for at in range(0, len(run), NODE):
                if (start + at) // NODE not in damaged:
                    assert object_.read(start + at, NODE) == run[at : at + NODE]
        return
    if expected.size <= format_vectors.WHOLE:
        assert object_.read(0, expected.size + 1) == expected.contents()
    at = 0
    for start, run in extents:
        assert object_.read(start, len(run)) == run
        assert object_.seek_data(at) == start
        at = start + len(run)
        assert object_.seek_hole(start) == at
    assert object_.seek_data(at) is None


# Entries of an authentic tree node that section 5 refuses.
VECTORS = [pytest.param(vector, id=vector.name) for vector in format_vectors.load_all()]


@pytest.mark.parametrize("vector", VECTORS)
def test_vector(vector: Vector, tmp_path: Path) -> None:
    file, keys = vector.file(), vector.keys
    epoch = 1 + max((stored.root.epoch for stored in read_roots(file, keys).values()), default=0)
    path = backing_file(tmp_path, keys.object_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in vector.attempts():
        path.write_bytes(file)
        with environment(tmp_path, keys, epoch) as env:
            if attempt.expect is None:
                with fails(errno.EBADMSG):
                    open_as(env, keys, attempt)
                continue
            object_ = open_as(env, keys, attempt)
            assert object_.root.salt.hex() == attempt.expect.root
            check_contents(object_, attempt.expect)
            assert path.read_bytes() == file, "opening and reading write nothing"
            object_.set_times(1, 2, 3)
            root = object_.commit()
            assert root.epoch == epoch
            assert attempt.expect.next_counter in (None, root.counter)
        version = open_exactly(path.read_bytes(), keys, Record(*root))
        assert (version.root.atime, version.root.mtime, version.root.ctime) == (1, 2, 3)
        assert version.root.previous.hex() == attempt.expect.root
        if not attempt.expect.unreadable:
            version.check()


def test_write_across_two_leaves_that_cannot_be_cached(tmp_path: Path) -> None:
    with environment(tmp_path, KEYS, 1) as env:
        object_ = env.create(KEYS.object_id)
        object_.write(0, b"a" * 150 * NODE)
        root = object_.commit()
    with environment(tmp_path, KEYS, 2, free_list_bytes=0) as env:
        object_ = env.open(KEYS.object_id, root)
        object_.write(70 * NODE + 5, b"b" * 5 * NODE)
        assert object_.read(70 * NODE, 6 * NODE) == b"a" * 5 + b"b" * 5 * NODE + b"a" * (NODE - 5)


# Random histories


class Plain:
    """What an object must be: its size, and the bytes of each data node that is not a hole."""

    def __init__(self) -> None:
        self.size = 0
        self.node: dict[int, bytes] = {}

    def copy(self) -> Plain:
        other = Plain()
        other.size, other.node = self.size, dict(self.node)
        return other

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        first = offset // NODE
        nodes = b"".join(self.node.get(i, bytes(NODE)) for i in range(first, nodes_for(end)))
        return nodes[offset - first * NODE : end - first * NODE]

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        for index in range(offset // NODE, nodes_for(end)):
            self.node.setdefault(index, bytes(NODE))
        self._put(offset, data)
        self.size = max(self.size, end)

    def truncate(self, size: int) -> None:
        if size < self.size:
            self.node = {i: node for i, node in self.node.items() if i < nodes_for(size)}
            self._put(size, bytes(-size % NODE))
        self.size = size

    def punch(self, offset: int, size: int) -> None:
        end = offset + size
        if end >= self.size:
            end = nodes_for(self.size) * NODE
        for index in list(self.node):
            a, b = max(offset, index * NODE), min(end, (index + 1) * NODE)
            if b - a == NODE:
                del self.node[index]
            elif a < b:
                self._put(a, bytes(b - a))

    def _put(self, offset: int, data: bytes) -> None:
        """Change bytes of nodes that are not holes."""
        for index in range(offset // NODE, nodes_for(offset + len(data))):
            if index in self.node:
                start = index * NODE
                a, b = max(offset, start), min(offset + len(data), start + NODE)
                node = self.node[index]
                self.node[index] = (
                    node[: a - start] + data[a - offset : b - offset] + node[b - start :]
                )

    def seek_data(self, offset: int) -> int | None:
        if offset >= self.size:
            return None
        found = [i for i in self.node if i >= offset // NODE]
        return max(offset, min(found) * NODE) if found else None

    def seek_hole(self, offset: int) -> int | None:
        if offset >= self.size:
            return None
        index = offset // NODE
        while index in self.node:
            index += 1
        return min(max(offset, index * NODE), self.size)


# Few places, so that histories meet themselves: a file that a tree of two levels holds, the border
# of three levels, and places that only a sparse file reaches.
NEAR = st.integers(0, 160 * NODE) | st.integers(0, 160).map(lambda i: i * NODE)
FAR = st.sampled_from([5329 * NODE, 73**4 * NODE, 1 << 40, MAX_SIZE]).flatmap(
    lambda at: st.integers(max(0, at - 2 * NODE), min(MAX_SIZE, at + 2 * NODE))
)
SMALL = st.integers(1, 3 * NODE)
LARGE = st.integers(50, 90).map(lambda n: n * NODE)


class CoreMachine(RuleBasedStateMachine):
    """One object of the core through commits, reopenings, and commits that the model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Path(tempfile.mkdtemp())
        self.path = backing_file(self.source, KEYS.object_id)
        self.plain = Plain()
        self.committed: dict[bytes, Plain] = {}  # by R
        self.history: list[RootId] = []
        self.root: RootId | None = None
        self.reusable_before = (0, 0)  # older roots may have lost nodes
        self.epoch = 1
        self.writes = 0

    @initialize(
        free_list_bytes=st.sampled_from([0, 64 * NODE, 8 << 20]),
        dirty_limit=st.sampled_from([4, 1024]),
        cache_data=st.booleans(),
        threads=st.sampled_from([0, 0, 2]),
    )
    def start(self, **options: Any) -> None:
        self.options = options
        self.enter()
        self.object = self.env.create(KEYS.object_id)
        self.commit(True)

    def enter(self) -> None:
        self.context = environment(self.source, KEYS, self.epoch, **self.options)
        self.env = self.context.__enter__()

    def leave(self) -> None:
        self.context.__exit__(None, None, None)

    def teardown(self) -> None:
        if hasattr(self, "env"):
            self.leave()
        shutil.rmtree(self.source)

    @rule(offset=NEAR, size=SMALL | LARGE)
    def write(self, offset: int, size: int) -> None:
        self.writes += 1
        data = format_vectors.plaintext(str(self.writes), size)
        self.object.write(offset, data)
        self.plain.write(offset, data)

    @rule(offset=FAR, size=SMALL)
    def write_far(self, offset: int, size: int) -> None:
        if offset + size <= MAX_SIZE:
            self.write(offset, size)
            return
        with fails(errno.EFBIG):
            self.object.write(offset, bytes(size))

    @rule(at=NEAR)
    def append_and_commit(self, at: int) -> None:
        if self.plain.size < 200 * NODE:
            self.write(self.plain.size, at % 1000 + 1)
            self.commit(True)

    @rule(size=NEAR | FAR)
    def truncate(self, size: int) -> None:
        self.object.truncate(size)
        self.plain.truncate(size)

    @rule(offset=NEAR | FAR, size=SMALL | LARGE)
    def punch(self, offset: int, size: int) -> None:
        size = min(size, MAX_SIZE - offset)
        self.object.punch(offset, size)
        self.plain.punch(offset, size)

    @rule(offset=NEAR | FAR, size=SMALL | LARGE)
    def read(self, offset: int, size: int) -> None:
        assert self.object.read(offset, size) == self.plain.read(offset, size)

    @rule(offset=NEAR | FAR)
    def seek(self, offset: int) -> None:
        assert self.object.seek_data(offset) == self.plain.seek_data(offset)
        assert self.object.seek_hole(offset) == self.plain.seek_hole(offset)

    @rule(atime=st.integers(-(2**63), 2**63 - 1))
    def set_times(self, atime: int) -> None:
        self.object.set_times(atime, -1, 7)
        assert self.object.attributes[2:] == (atime, -1, 7)

    @rule(solo=st.booleans())
    def commit(self, solo: bool) -> None:
        was_dirty = self.object.is_dirty
        before, self.root = self.root, self.object.commit(solo=solo)
        assert (self.root != before) == was_dirty
        assert not self.object.is_dirty
        assert self.object.root == self.root
        self.committed[self.root.salt] = self.plain.copy()
        self.history.append(self.root)
        self.check_file()
        assert self.object.attributes.nodes == len(self.plain.node)

    def check_file(self) -> None:
        """All roots that may still be opened are whole in the file, and say what they must."""
        assert self.root
        file = self.path.read_bytes()
        roots = read_roots(file, KEYS)
        assert Record(*self.root) in [stored.record for stored in roots.values()]
        for stored in roots.values():
            if stored.root.order < self.reusable_before:
                continue
            plain = self.committed[stored.r]
            version = Version(file, KEYS, stored)
            version.check()
            assert version.root.size == plain.size
            assert version.root.nodes == len(plain.node)
            assert set(version.entries()) == set(plain.node)
            for index, node in plain.node.items():
                assert version.data_node(index) == node

    @rule()
    def release(self) -> None:
        assert self.root
        self.object.release(self.root)
        if self.root.epoch == self.epoch:
            self.reusable_before = self.root[:2]

    @rule()
    def scan(self) -> None:
        self.object.scan()

    @rule()
    def verify(self) -> None:
        assert self.object.verify() == []

    @rule(back=st.none() | st.integers(0, 5))
    def reopen(self, back: int | None) -> None:
        """Close without a commit, and open as a later mount does."""
        assert self.root
        self.leave()
        self.open_again(back)

    def open_again(self, back: int | None) -> None:
        """Open at the last root, or recover with a record that is `back` commits old."""
        assert self.root
        active_epoch, self.epoch = self.root.epoch, self.epoch + 1
        self.enter()
        if back is not None:
            recorded = self.history[max(0, len(self.history) - 1 - back)]
            self.object = self.env.recover(KEYS.object_id, recorded, active_epoch)
        else:
            self.object = self.env.open(KEYS.object_id, self.root)
        assert self.object.root == self.root
        self.reusable_before = self.root[:2]
        self.plain = self.committed[self.root.salt].copy()
        assert self.object.attributes.nodes == len(self.plain.node)
        self.check_file()

    @rule(offset=NEAR, size=SMALL, cut=st.none() | NEAR, fold=st.booleans())
    def continue_by_model(self, offset: int, size: int, cut: int | None, fold: bool) -> None:
        """The model commits once to the file that the core wrote; then the core takes over."""
        assert self.root
        self.leave()
        plain = self.committed[self.root.salt].copy()
        self.writes += 1
        data = format_vectors.plaintext(str(self.writes), size)
        base = open_exactly(self.path.read_bytes(), KEYS, Record(*self.root))
        self.epoch += 1
        model = ObjectModel(KEYS, epoch=self.epoch, base=base)
        for target in (model, plain):
            target.write(offset, data)
            target.punch(offset + 5 * NODE, 2 * NODE)
            if cut is not None:
                target.truncate(cut)
        record = model.commit(fold=fold)
        self.path.write_bytes(model.file)
        self.root = RootId(record.epoch, record.counter, record.r)
        self.committed[record.r] = plain
        self.history.append(self.root)
        self.open_again(back=1)

    @invariant()
    def size_is_right(self) -> None:
        if hasattr(self, "object"):
            assert self.object.attributes.size == self.plain.size

    @precondition(lambda self: self.plain.size <= 300 * NODE)
    @rule()
    def read_all(self) -> None:
        assert self.object.read(0, 301 * NODE) == self.plain.read(0, 301 * NODE)


CoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_histories = CoreMachine.TestCase
