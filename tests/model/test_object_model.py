"""The model of the object format: vectors, worked sizes, and a plain bytearray beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model import format_vectors
from tests.model.format_vectors import Attempt, Expected, Vector
from tests.model.object_model import (
    DELTA_MAX,
    FANOUT,
    HOLE,
    MAX_SIZE,
    NODE,
    Damaged,
    Keys,
    ObjectModel,
    Record,
    Root,
    Stale,
    Version,
    get_slot,
    height_for,
    next_counter,
    nodes_for,
    open_exactly,
    put_slot,
    read_roots,
    recover_active,
    recover_meta,
    seeded,
)
from tests.vectors import make_object_vectors

KEYS = Keys(b"v" * 16, b"p" * 32, b"o" * 16)
VECTORS = format_vectors.load_all()


def open_as(vector: Vector, file: bytes, attempt: Attempt) -> Version:
    if attempt.active_epoch is None:
        assert attempt.record
        return open_exactly(file, vector.keys, attempt.record)
    if attempt.record is None:
        oldest = Record(attempt.active_epoch, 0, bytes(32))
        return recover_meta(file, vector.keys, oldest)
    return recover_active(file, vector.keys, attempt.record, attempt.active_epoch)


def check_contents(version: Version, expected: Expected) -> None:
    assert version.root.size == expected.size
    assert version.root.nodes == expected.nodes
    if expected.unreadable:
        for index in expected.unreadable:
            with pytest.raises(Damaged):
                version.data_node(index)
        for start, run in expected.extents():
            for at in range(0, len(run), NODE):
                if (start + at) // NODE not in expected.unreadable:
                    assert version.read(start + at, NODE) == run[at : at + NODE]
        return
    version.check()
    indices = [
        i
        for start, run in expected.extents()
        for i in range(start // NODE, nodes_for(start + len(run)))
    ]
    assert set(version.entries()) <= set(indices)
    if expected.size <= format_vectors.WHOLE:
        assert version.read(0, expected.size + 1) == expected.contents()
    else:
        for start, run in expected.extents():
            assert version.read(start, len(run)) == run


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_vector(vector: Vector) -> None:
    file = vector.file()
    for attempt in vector.attempts():
        if attempt.expect is None:
            with pytest.raises((Damaged, Stale)):
                open_as(vector, file, attempt)
            continue
        version = open_as(vector, file, attempt)
        assert version.stored.r.hex() == attempt.expect.root
        check_contents(version, attempt.expect)
        if attempt.expect.next_counter is not None:
            assert next_counter(read_roots(file, vector.keys)) == attempt.expect.next_counter


def test_vectors_come_from_their_generator(tmp_path: Path) -> None:
    make_object_vectors.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in format_vectors.FOLDER.glob("*.json")}


@pytest.mark.parametrize(
    ("size", "nodes", "tree_nodes", "height"),
    [  # section 6
        (0, 0, 0, 0),
        (2049, 1, 1, 1),
        (4096, 1, 1, 1),
        (4097, 2, 1, 1),
        (229_376, 56, 1, 1),
        (229_377, 57, 1, 1),
        (299_008, 73, 1, 1),
        (299_009, 74, 3, 2),
        (21_827_584, 5329, 74, 2),
        (21_827_585, 5330, 77, 3),
    ],
)
def test_worked_sizes(size: int, nodes: int, tree_nodes: int, height: int) -> None:
    model = ObjectModel(KEYS, random=seeded(b"sizes"))
    model.write(0, b"x" * size)
    model.commit()
    assert model.base
    in_delta = nodes <= DELTA_MAX
    assert (model.base.root.height == 0) == in_delta
    model.commit(fold=True)
    root = model.base.root
    assert (root.nodes, root.height, root.delta) == (nodes, height, {})
    assert len(list(model.base.tree_slots())) == tree_nodes


def test_heights() -> None:
    for level in range(1, 10):
        assert height_for(FANOUT**level) == level
        assert height_for(FANOUT**level + 1) == level + 1
    assert (height_for(0), height_for(1)) == (0, 1)
    assert height_for(nodes_for(MAX_SIZE)) == 9


def test_root_survives_packing() -> None:
    model = ObjectModel(KEYS, epoch=2**64 - 1, instance=b"i" * 16, random=seeded(b"pack"))
    model.times = (-(2**63), 2**63 - 1, -1)
    model.write(NODE * 3, b"abc")
    model.commit()
    assert model.base
    root = model.base.root
    assert Root.parse(root.pack()) == root
    assert (root.atime, root.mtime, root.ctime) == model.times
    assert (root.epoch, root.counter, root.instance) == (2**64 - 1, 1, b"i" * 16)


def test_root_of_all_zeros_is_none() -> None:
    with pytest.raises(Damaged):
        KEYS.open_root(0, bytes(NODE))


def test_a_commit_leaves_older_roots_as_they_were() -> None:
    model = ObjectModel(KEYS, random=seeded(b"older"))
    contents = []
    for i in range(7):
        model.write(i * 3000, bytes([i + 1]) * 3000)
        model.commit(fold=i % 2 == 1)
        contents.append(model.read(0, model.size))
    roots = sorted(read_roots(model.file, KEYS).values(), key=lambda stored: stored.root.order)
    assert [stored.root.counter for stored in roots] == [4, 5, 6, 7]
    for stored in roots:
        version = Version(model.file, KEYS, stored)
        version.check()
        assert version.read(0, version.root.size) == contents[stored.root.counter - 1]
    assert [stored.root.previous for stored in roots[1:]] == [stored.r for stored in roots[:-1]]


@pytest.mark.parametrize("way", ["older", "other"])
def test_object_0_must_not_be_older_or_another(way: str) -> None:
    keys = Keys(KEYS.volume_id, KEYS.p, bytes(16))
    model = ObjectModel(keys, random=seeded(b"meta"))
    model.write(0, b"metadata")
    model.commit()
    trusted = model.commit()
    assert recover_meta(model.file, keys, trusted).stored.record == trusted
    file = bytearray(model.file)
    if way == "older":
        put_slot(file, 1, bytes(NODE))
    else:
        stored = keys.open_root(1, get_slot(file, 1))
        put_slot(file, 1, keys.seal_root(1, b"R" * 32, stored.root.pack()))
    with pytest.raises(Stale, match=way):
        recover_meta(file, keys, trusted)


# Random histories beside a bytearray

OFFSETS = st.integers(0, 80 * NODE) | st.integers(0, 80).map(lambda i: i * NODE)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), OFFSETS, st.integers(1, 3 * NODE)),
        st.tuples(st.just("write"), OFFSETS, st.integers(60 * NODE, 70 * NODE)),
        st.tuples(st.just("truncate"), OFFSETS, st.just(0)),
        st.tuples(st.just("punch"), OFFSETS, st.integers(1, 20 * NODE)),
        st.tuples(st.sampled_from(["commit", "fold"]), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@given(STEPS)
def test_histories(steps: list[tuple[str, int, int]]) -> None:
    model = ObjectModel(KEYS, random=seeded(b"histories"))
    plain = bytearray()
    for number, (name, offset, size) in enumerate([*steps, ("commit", 0, 0)]):
        match name:
            case "write":
                content = bytes([number + 1]) * size
                model.write(offset, content)
                plain.extend(bytes(max(0, offset - len(plain))))
                plain[offset : offset + size] = content
            case "truncate":
                model.truncate(offset)
                plain = plain[:offset].ljust(offset, b"\0")
            case "punch":
                model.punch(offset, size)
                end = min(offset + size, len(plain))
                plain[offset:end] = bytes(max(0, end - offset))
            case _:
                record = model.commit(fold=name == "fold")
                version = open_exactly(bytes(model.file), KEYS, record)
                version.check()
                assert version.root.size == len(plain)
                assert version.read(0, len(plain) + 1) == plain
                assert HOLE not in version.entries().values()
        assert model.read(0, model.size + 1) == plain
