"""Write the vectors of docs/format.md: ``python tests/vectors/make_object_vectors.py [FOLDER]``.

What a vector says is described in tests/model/format_vectors.py. The files are made by the model of
the format; keys and contents are drawn from seeds, so a second run writes the same bytes. Damage is
done by hand, and each scenario states what must come of it: nothing here asks the model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.model import format_vectors  # noqa: E402
from tests.model import object_model as om  # noqa: E402
from tests.model.object_model import (  # noqa: E402
    HOLE,
    NODE,
    TREE,
    Entry,
    Keys,
    ObjectModel,
    Record,
    Root,
    get_slot,
    put_slot,
    seeded,
)

VOLUME_ID = bytes(range(16))
P = om.volume_prk(VOLUME_ID, bytes(range(0x40, 0x60)))
KEYS = Keys(VOLUME_ID, P, bytes(range(0xA0, 0xB0)))
META = Keys(VOLUME_ID, P, bytes(16))
OTHER_R = bytes(range(0xC0, 0xE0))
STORED_MAX = 64 << 10  # larger files are made anew from their seed
DAMAGED = format_vectors.DAMAGED

Vector = dict[str, Any]


# What a vector says


def record_of(record: Record) -> Vector:
    return {"epoch": record.epoch, "counter": record.counter, "r": record.r.hex()}


def opened_at(record: Record, expect: Vector | str) -> Vector:
    return {"open": {"record": record_of(record)}, "expect": expect}


def recovered(record: Record | None, active_epoch: int, expect: Vector | str) -> Vector:
    how = {"record": record and record_of(record), "active_epoch": active_epoch}
    return {"recover": how, "expect": expect}


def success(
    record: Record,
    size: int,
    data: list[tuple[int, int, str]],
    *,
    nodes: int,
    next_counter: int | None = 0,
    unreadable: list[int] | None = None,
) -> Vector:
    """Return what must come of an attempt. `next_counter` 0: the one after the record's."""
    return {
        "root": record.r.hex(),
        "next_counter": record.counter + 1 if next_counter == 0 else next_counter,
        "size": size,
        "nodes": nodes,
        "data": data,
        "unreadable": unreadable or [],
    }


def describe_roots(file: bytes, keys: Keys) -> list[Vector]:
    """Return the intermediate values of each root slot that is not empty."""
    roots = []
    for slot in range(om.ROOT_SLOTS):
        raw = get_slot(file, slot)
        if not any(raw):
            continue
        said: Vector = {"slot": slot, "r": raw[8:40].hex(), "key": keys.root_key(raw[8:40]).hex()}
        try:
            root = keys.open_root(slot, raw).root
        except om.Refused as error:
            said["refused"] = str(error)
        except om.Damaged as error:
            said["damaged"] = str(error)
        else:
            said |= {
                "epoch": root.epoch,
                "counter": root.counter,
                "instance": root.instance.hex(),
                "previous": root.previous.hex(),
                "size": root.size,
                "times": [root.atime, root.mtime, root.ctime],
                "end": root.end,
                "nodes": root.nodes,
                "height": root.height,
                "top": describe_entry(root.top),
                "delta": {str(i): describe_entry(e) for i, e in sorted(root.delta.items())},
            }
        roots.append(said)
    return roots


def describe_entry(entry: Entry) -> Any:
    return [entry.slot, entry.key.hex(), entry.tag.hex()] if entry.slot else None


def vector(
    about: str,
    file: bytes | bytearray,
    *attempts: Vector,
    keys: Keys = KEYS,
    made_by: Vector | None = None,
) -> Vector:
    if made_by is not None and len(file) > STORED_MAX:
        stored: Vector = {"made_by": made_by}
    else:
        count = om.nodes_for(len(file))
        slots = {i: file[i * NODE : (i + 1) * NODE] for i in range(count)}
        stored = {
            "slots": {str(i): base64.b64encode(s).decode() for i, s in slots.items() if any(s)}
        }
    return {
        "about": about,
        "volume_id": keys.volume_id.hex(),
        "p": keys.p.hex(),
        "object_id": keys.object_id.hex(),
        "object_key": keys.object_key.hex(),
        "roots": describe_roots(bytes(file), keys),
        "attempts": list(attempts),
        "file_size": len(file),
        "file_sha256": hashlib.sha256(file).hexdigest(),
        **stored,
    }


def made(seed: str, *operations: tuple[Any, ...]) -> tuple[ObjectModel, Vector]:
    """Return an object that went through `operations`, and what a vector says of its making."""
    made_by = {"seed": seed, "operations": [list(operation) for operation in operations]}
    return format_vectors.replay(KEYS, made_by), made_by


def record(model: ObjectModel) -> Record:
    assert model.base
    return model.base.stored.record


def root_of(model: ObjectModel) -> Root:
    assert model.base
    return model.base.root


# Sizes (6)


def sound(
    about: str,
    *operations: tuple[Any, ...],
    size: int,
    nodes: int,
    data: list[tuple[int, int, str]],
) -> Vector:
    """Return a scenario in which nothing is wrong."""
    model, made_by = made(about, *operations)
    expect = success(record(model), size, data, nodes=nodes)
    attempts = [opened_at(record(model), expect), recovered(record(model), 1, expect)]
    return vector(about, model.file, *attempts, made_by=made_by)


def size_vectors() -> Iterator[tuple[str, Vector]]:
    yield "size-0", sound("an empty object", ("commit",), size=0, nodes=0, data=[])
    for size in (1, 2049, 4095, 4096, 4097, 56 * NODE, 56 * NODE + 1, 73 * NODE, 73 * NODE + 1,
                 5329 * NODE, 5329 * NODE + 1):  # fmt: skip
        nodes = om.nodes_for(size)
        yield (
            f"size-{size}",
            sound(
                f"{size} bytes, {nodes} data nodes, written in one commit",
                ("write", 0, size, "a"),
                ("commit",),
                size=size,
                nodes=nodes,
                data=[(0, size, "a")],
            ),
        )
    tib = 1 << 40
    yield (
        "size-1-tib-hole",
        sound("1 TiB that is all hole", ("truncate", tib), ("commit",), size=tib, nodes=0, data=[]),
    )
    for name in ("commit", "fold"):
        yield (
            f"size-1-tib-last-byte-{name}",
            sound(
                "1 TiB, of which the last byte was written; "
                + ("in the delta" if name == "commit" else "one tree node on each of five levels"),
                ("write", tib - 1, 1, "z"),
                (name,),
                size=tib,
                nodes=1,
                data=[(tib - 1, 1, "z")],
            ),
        )
    yield (
        "size-largest",
        sound(
            "2^63 - 1 bytes, the largest object, the last byte written; nine levels",
            ("write", om.MAX_SIZE - 1, 1, "z"),
            ("fold",),
            size=om.MAX_SIZE,
            nodes=1,
            data=[(om.MAX_SIZE - 1, 1, "z")],
        ),
    )


# How contents change


def change_vectors() -> Iterator[tuple[str, Vector]]:
    yield (
        "delta-over-tree",
        sound(
            "the delta replaces one node of the tree, makes another a hole and adds a third",
            ("write", 0, 3 * NODE, "a"),
            ("write", 3 * NODE, NODE, "d"),
            ("fold",),
            ("write", NODE, NODE, "b"),
            ("punch", 2 * NODE, NODE),
            ("write", 5 * NODE, 10, "c"),
            ("commit",),
            size=5 * NODE + 10,
            nodes=4,
            data=[
                (0, NODE, "a"),
                (NODE, NODE, "b"),
                (3 * NODE, NODE, "d"),
                (5 * NODE, 10, "c"),
            ],
        ),
    )
    yield (
        "fold-moves-delta",
        sound(
            "the same, and then a fold: the delta is empty, the hole is a zero entry of the tree",
            ("write", 0, 3 * NODE, "a"),
            ("write", 3 * NODE, NODE, "d"),
            ("fold",),
            ("write", NODE, NODE, "b"),
            ("punch", 2 * NODE, NODE),
            ("write", 5 * NODE, 10, "c"),
            ("commit",),
            ("fold",),
            size=5 * NODE + 10,
            nodes=4,
            data=[
                (0, NODE, "a"),
                (NODE, NODE, "b"),
                (3 * NODE, NODE, "d"),
                (5 * NODE, 10, "c"),
            ],
        ),
    )
    yield (
        "delta-of-holes",
        sound(
            "56 entries of the delta are holes over a tree of 57 nodes",
            ("write", 0, 56 * NODE, "a"),
            ("write", 56 * NODE, NODE, "b"),
            ("fold",),
            ("punch", 0, 56 * NODE),
            ("commit",),
            size=57 * NODE,
            nodes=1,
            data=[(56 * NODE, NODE, "b")],
        ),
    )
    yield (
        "shrunk-and-grown",
        sound(
            "shortened to 100 bytes and grown again: what was cut off is zero",
            ("write", 0, 2 * NODE, "a"),
            ("commit",),
            ("truncate", 100),
            ("commit",),
            ("truncate", 2 * NODE),
            ("commit",),
            size=2 * NODE,
            nodes=1,
            data=[(0, 100, "a")],
        ),
    )
    yield (
        "shrunk-to-0",
        sound(
            "shortened to nothing: a tree of height 0",
            ("write", 0, 2 * NODE, "a"),
            ("fold",),
            ("truncate", 0),
            ("commit",),
            size=0,
            nodes=0,
            data=[],
        ),
    )
    yield (
        "five-commits",
        sound(
            "five commits: the fifth went over the first, in the root slot written longest ago",
            *(
                step
                for i in range(5)
                for step in (("write", i * 1000, 1000, f"part {i}"), ("commit",))
            ),
            size=5000,
            nodes=2,
            data=[(i * 1000, 1000, f"part {i}") for i in range(5)],
        ),
    )
    model = ObjectModel(META, epoch=3, instance=bytes(range(16)), random=seeded(b"meta"))
    model.write(0, format_vectors.plaintext("a", 8192))
    model.times = (-1, 1, -(2**63))
    model.commit()
    expect = success(record(model), 8192, [(0, 8192, "a")], nodes=2)
    yield (
        "object-0",
        vector(
            "object 0, whose id is zero; times before 1970",
            model.file,
            opened_at(record(model), expect),
            recovered(None, 3, expect),
            recovered(None, 4, DAMAGED),
            keys=META,
        ),
    )


# What a reader must refuse (5)

HEAD = {  # offsets of the root plaintext (2.4)
    "size": 64, "end": 96, "nodes": 104, "height": 112, "count": 114, "top": 120, "delta": 448,
}  # fmt: skip


def patched_root(plain: bytes, *patches: tuple[int, bytes]) -> bytes:
    out = bytearray(plain)
    for offset, content in patches:
        out[offset : offset + len(content)] = content
    return bytes(out)


def refusal_vectors() -> Iterator[tuple[str, Vector]]:
    model, _ = made("refusals", ("write", 0, 3 * NODE, "a"), ("fold",), ("write", 0, NODE, "b"),
                    ("write", 2 * NODE, NODE, "c"), ("commit",))  # fmt: skip
    base = root_of(model)
    plain = base.pack()
    u64 = struct.Struct("<Q").pack
    delta = HEAD["delta"]
    spare = Entry(4, b"k" * 32, b"t" * 16)

    def with_delta(*indices: int) -> bytes:
        raw = b"".join(u64(i) + spare.pack() for i in indices)
        return patched_root(plain, (HEAD["count"], struct.pack("<H", len(indices))), (delta, raw))

    cases: dict[str, tuple[str, bytes]] = {
        f"reserved-byte-{at}": (f"byte {at} of the root, which is reserved, is 1",
                                patched_root(plain, (at, b"\1")))
        for at in (113, 116, 119, 176, 447, 4032, 4039)
    } | {
        "size-too-large": ("the size is 2^63", patched_root(plain, (HEAD["size"], u64(1 << 63)))),
        "end-too-small": ("`end` is 3: it lies within the root slots",
                          replace(base, end=3, top=HOLE, height=0, delta={}).pack()),
        "end-too-large": ("`end` is beyond what the offset of a file can reach",
                          patched_root(plain, (HEAD["end"], u64(1 << 51)))),
        "nodes-too-many": ("it claims more data nodes than its size has",
                           patched_root(plain, (HEAD["nodes"], u64(4)))),
        "height-10": ("height 10", patched_root(plain, (HEAD["height"], b"\x0a"))),
        "height-above-size": ("height 2, though three nodes need 1",
                              patched_root(plain, (HEAD["height"], b"\2"))),
        "height-0-with-top": ("height 0 but a top entry", replace(base, height=0).pack()),
        "height-without-top": ("height 1 but no top entry", replace(base, top=HOLE).pack()),
        "top-slot-3": ("the top entry lies in a root slot",
                       replace(base, top=replace(base.top, slot=3)).pack()),
        "top-slot-end": ("the top entry lies at `end`",
                         replace(base, top=replace(base.top, slot=base.end)).pack()),
        "top-hole-with-tag": ("height 0, and a top entry that has slot 0 but a tag",
                              patched_root(replace(base, height=0, top=HOLE).pack(),
                                           (HEAD["top"] + 55, b"\1"))),
        "delta-57": ("57 delta entries", patched_root(plain, (HEAD["count"], b"\x39\0"))),
        "delta-twice": ("an index occurs twice", with_delta(1, 1)),
        "delta-descending": ("indices descend", with_delta(1, 0)),
        "delta-past-size": ("an index past the size", with_delta(1, 3)),
        "delta-past-size-hole": ("a hole past the size",
                                 replace(base, delta={**base.delta, 3: HOLE}).pack()),
        "delta-slot-3": ("a delta entry lies in a root slot",
                         replace(base, delta={1: replace(spare, slot=3)}).pack()),
        "delta-slot-end": ("a delta entry lies at `end`",
                           replace(base, delta={1: replace(spare, slot=base.end)}).pack()),
        "delta-hole-with-key": ("a delta entry has slot 0 but a key",
                                replace(base, delta={1: replace(HOLE, key=b"\1" * 32)}).pack()),
        "delta-unused-not-zero": ("an unused delta entry is not zero",
                                  patched_root(plain, (delta + 64 * 55, b"\1"))),
    }  # fmt: skip
    good = [(0, 3 * NODE, "a"), (0, NODE, "b"), (2 * NODE, NODE, "c")]
    assert model.base
    slot, sound_record = model.base.stored.slot, record(model)
    before = Record(1, 1, base.previous)
    for name, (about, bad) in cases.items():
        file = bytearray(model.file)
        put_slot(file, slot, KEYS.seal_root(slot, OTHER_R, bad))
        refused = Record(1, 2, OTHER_R)
        yield (
            f"refused-{name}",
            vector(
                f"authentic, but {about}; the root before it counts",
                _without_data(file),
                opened_at(refused, DAMAGED),
                recovered(refused, 1, DAMAGED),
                recovered(
                    before,
                    1,
                    success(before, 3 * NODE, [(0, 3 * NODE, "a")], nodes=3,
                            unreadable=[0, 1, 2], next_counter=None),
                ),
            ),
        )  # fmt: skip
    for version in (0, 2):
        file = bytearray(model.file)
        put_slot(file, slot, KEYS.seal_root(slot, OTHER_R, plain, version))
        yield (
            f"refused-format-{version}",
            vector(
                f"sound, but of format version {version}",
                _without_data(file),
                opened_at(Record(1, 2, OTHER_R), DAMAGED),
                recovered(
                    None,
                    1,
                    success(before, 3 * NODE, [], nodes=3, unreadable=[0, 1, 2], next_counter=None),
                ),
            ),
        )
    yield (
        "refused-none",
        vector(
            "the object that the other `refused` scenarios are made of",
            model.file,
            opened_at(sound_record, success(sound_record, 3 * NODE, good, nodes=3)),
        ),
    )


def _without_data(file: bytearray) -> bytearray:
    """Return the roots only: the scenarios about roots need no data, and stay small."""
    out = bytearray(len(file))
    out[: om.ROOT_SLOTS * NODE] = file[: om.ROOT_SLOTS * NODE]
    return out


def tree_vectors() -> Iterator[tuple[str, Vector]]:
    """Tree nodes that are authentic and wrong, or not what the parent says."""
    model, _ = made("tree", ("write", 0, NODE, "a"), ("write", 73 * NODE, NODE, "b"), ("fold",))
    base = root_of(model)
    size, good = 74 * NODE, [(0, NODE, "a"), (73 * NODE, NODE, "b")]
    assert model.base
    stored = model.base.stored
    top = KEYS.open_node(TREE, 2, base.top, get_slot(model.file, base.top.slot))
    first = Entry.parse(top[:56], base.end)
    leaf = KEYS.open_node(TREE, 1, first, get_slot(model.file, first.slot))
    key1, key2 = bytes(range(0x20, 0x40)), bytes(range(0x60, 0x80))

    def rebuilt(
        new_leaf: bytes, kind: int = TREE, level: int = 1, top_tail: bytes = bytes(8)
    ) -> tuple[bytearray, Record]:
        """Put another first leaf, and so another top and root, in place of the old ones."""
        file = bytearray(model.file)
        sealed, tag = KEYS.seal_node(kind, level, key1, new_leaf)
        put_slot(file, first.slot, sealed)
        new_top = Entry(first.slot, key1, tag).pack() + top[56:-8] + top_tail
        sealed, tag = KEYS.seal_node(TREE, 2, key2, new_top)
        put_slot(file, base.top.slot, sealed)
        root = replace(base, top=Entry(base.top.slot, key2, tag))
        put_slot(file, stored.slot, KEYS.seal_root(stored.slot, OTHER_R, root.pack()))
        return file, Record(1, 1, OTHER_R)

    def lost(about: str, file: bytearray, which: Record, unreadable: list[int]) -> Vector:
        expect = success(which, size, good, nodes=2, unreadable=unreadable)
        return vector(about, file, opened_at(which, expect))

    below_first = list(range(73))
    data = leaf[:56]
    entry = Entry.parse(data, base.end)
    hole = replace(HOLE, tag=b"\1" * 16).pack()
    for name, about, bad in (
        ("reserved", "a reserved byte is 1", leaf[:-1] + b"\1"),
        ("slot-3", "an entry lies in a root slot", leaf[:56] + replace(entry, slot=3).pack()
         + leaf[112:]),
        ("slot-end", "an entry lies at `end`", leaf[:56] + replace(entry, slot=base.end).pack()
         + leaf[112:]),
        ("hole-with-tag", "an entry has slot 0 but a tag", leaf[:56] + hole + leaf[112:]),
    ):  # fmt: skip
        yield (
            f"tree-{name}",
            lost(f"the first leaf is authentic, but {about}", *rebuilt(bad), below_first),
        )
    yield (
        "tree-wrong-level",
        lost(
            "the first leaf was sealed as a node of level 2", *rebuilt(leaf, level=2), below_first
        ),
    )
    yield (
        "tree-wrong-kind",
        lost("the first leaf was sealed as a data node", *rebuilt(leaf, kind=om.DATA), below_first),
    )
    yield (
        "tree-top-reserved",
        lost("a reserved byte of the top node is 1", *rebuilt(leaf, top_tail=b"\0" * 7 + b"\1"),
             list(range(74))),
    )  # fmt: skip
    file = bytearray(model.file)
    file[first.slot * NODE + 4095] ^= 0x80
    yield "tree-leaf-flipped", lost("one bit of the first leaf is another", file, record(model),
                                    below_first)  # fmt: skip
    file = bytearray(model.file)
    other = Entry.parse(top[56:112], base.end)
    one, two = get_slot(file, first.slot), get_slot(file, other.slot)
    put_slot(file, first.slot, two)
    put_slot(file, other.slot, one)
    yield "tree-leaves-swapped", lost("two leaves lie in each other's slot", file, record(model),
                                      list(range(74)))  # fmt: skip
    file = bytearray(model.file)
    file[entry.slot * NODE] ^= 1
    yield "data-flipped", lost("one bit of data node 0 is another", file, record(model), [0])


# What an attacker may do to root slots (2.3, 4)


def attack_vectors() -> Iterator[tuple[str, Vector]]:
    model = ObjectModel(KEYS, random=seeded(b"attacks"))
    model.write(0, format_vectors.plaintext("old", 100))
    first = model.commit()
    one = bytearray(model.file)
    model.write(0, format_vectors.plaintext("new", 100))
    second = model.commit()
    two = bytearray(model.file)
    old = success(first, 100, [(0, 100, "old")], nodes=1, next_counter=3)
    new = success(second, 100, [(0, 100, "new")], nodes=1)
    yield (
        "not-active",
        vector(
            "two roots; an object that is not active opens at the recorded one and at no other",
            two,
            opened_at(first, old),
            opened_at(second, new),
            opened_at(replace(second, counter=3), DAMAGED),
            opened_at(replace(second, epoch=2), DAMAGED),
            opened_at(replace(second, r=first.r), DAMAGED),
        ),
    )
    yield (
        "active",
        vector(
            "an active object opens at the newest root of its active epoch, else at the recorded",
            two,
            recovered(first, 1, new),
            recovered(second, 1, new),
            recovered(first, 2, old),
            recovered(None, 1, new),
        ),
    )
    file = bytearray(two)
    put_slot(file, 0, two[NODE : 2 * NODE])
    put_slot(file, 1, two[:NODE])
    yield (
        "root-slots-swapped",
        vector(
            "two roots lie in each other's slot: the slot index is authenticated",
            file,
            opened_at(first, DAMAGED),
            opened_at(second, DAMAGED),
            recovered(None, 1, DAMAGED),
        ),
    )
    file = bytearray(two)
    put_slot(file, 3, two[NODE : 2 * NODE])
    put_slot(file, 1, bytes(NODE))
    yield (
        "root-moved",
        vector(
            "the newest root was moved to a slot that was empty",
            file,
            opened_at(second, DAMAGED),
            recovered(first, 1, {**old, "next_counter": 2}),
        ),
    )
    file = bytearray(one)
    file.extend(bytes(len(two) - len(one)))
    yield (
        "replayed-file",
        vector(
            "the backing file is an older version of itself: not what is recorded",
            file,
            opened_at(second, DAMAGED),
            recovered(second, 1, DAMAGED),
        ),
    )
    file = bytearray(two)
    put_slot(file, 1, one[:NODE])
    yield (
        "replayed-root",
        vector(
            "the older root was written over the newest: it counts only in its own slot",
            file,
            opened_at(second, DAMAGED),
            recovered(second, 1, DAMAGED),
        ),
    )
    later = ObjectModel(KEYS, epoch=2, random=seeded(b"abandoned"), base=model.base)
    later.write(0, format_vectors.plaintext("abandoned", 100))
    abandoned = later.commit()
    yield (
        "root-of-other-epoch",
        vector(
            "a root of a later mount, which metadata never heard of, is not taken; its counter is",
            later.file,
            recovered(first, 1, {**new, "next_counter": 4}),
            opened_at(second, {**new, "next_counter": 4}),
            recovered(second, 2, success(abandoned, 100, [(0, 100, "abandoned")], nodes=1)),
        ),
    )
    for name, offset, about in (
        ("magic", 0, "the magic"),
        ("r", 8, "R"),
        ("tag", 40, "the tag"),
        ("first-byte", 56, "the first byte of the ciphertext"),
        ("last-byte", 4095, "the last byte of the ciphertext"),
    ):
        file = bytearray(two)
        file[NODE + offset] ^= 1
        yield (
            f"root-flipped-{name}",
            vector(
                f"one bit of {about} of the newest root is another",
                file,
                opened_at(second, DAMAGED),
                recovered(first, 1, {**old, "next_counter": 2}),
            ),
        )
    other = replace(KEYS, object_id=bytes(range(0xB0, 0xC0)))
    yield (
        "other-object",
        vector(
            "the backing file of another object", two, opened_at(second, DAMAGED), keys=other,
        ),
    )  # fmt: skip
    other = replace(KEYS, volume_id=bytes(16))
    yield (
        "other-volume",
        vector(
            "the same P with another volume id", two, opened_at(second, DAMAGED), keys=other,
        ),
    )  # fmt: skip
    last = root_of(model).delta[0].slot
    for name, about, file, reads in (
        ("truncated-in-last-node", "cut in the middle of its last slot",
         two[: last * NODE + NODE // 2], False),
        ("truncated-before-last-node", "cut before its last slot", two[: last * NODE], False),
        ("extended", "4 KiB and one byte longer than its end", two + b"x" * (NODE + 1), True),
    ):  # fmt: skip
        yield (
            f"file-{name}",
            vector(
                f"the backing file is {about}",
                file,
                opened_at(second, new if reads else {**new, "unreadable": [0]}),
                recovered(first, 1, new if reads else old),
                recovered(None, 1, new if reads else old),
            ),
        )
    for name, length in (("one-root", NODE), ("half-root", NODE // 2), ("nothing", 0)):
        expect = {**old, "next_counter": 2, "unreadable": [0]} if length == NODE else DAMAGED
        yield (
            f"file-truncated-to-{name}",
            vector(
                f"the backing file is cut to {length} bytes",
                two[:length],
                opened_at(second, DAMAGED),
                opened_at(first, expect),
                recovered(None, 1, DAMAGED),
            ),
        )


# What a crash may leave (3, 4)


def crash_vectors() -> Iterator[tuple[str, Vector]]:
    model = ObjectModel(KEYS, random=seeded(b"crashes"))
    model.write(0, format_vectors.plaintext("old", 2 * NODE))
    first = model.commit()
    before = bytearray(model.file)
    model.write(NODE, format_vectors.plaintext("new", 2 * NODE))
    second = model.commit()
    after = bytearray(model.file)
    before.extend(bytes(len(after) - len(before)))
    old = success(first, 2 * NODE, [(0, 2 * NODE, "old")], nodes=2)
    new_data = [(0, 2 * NODE, "old"), (NODE, 2 * NODE, "new")]
    new = success(second, 3 * NODE, new_data, nodes=3)
    assert model.base
    slot = model.base.stored.slot

    for sectors in (1, 7):
        file = bytearray(after)
        cut = slot * NODE + sectors * 512
        file[cut : (slot + 1) * NODE] = before[cut : (slot + 1) * NODE]
        yield (
            f"torn-root-{sectors}",
            vector(
                f"of the newest root only the first {512 * sectors} bytes were written",
                file,
                recovered(first, 1, old),
                recovered(None, 1, old),
                opened_at(second, DAMAGED),
            ),
        )
    for index in (1, 2):
        file = bytearray(after)
        cut = root_of(model).delta[index].slot * NODE + 512
        file[cut : cut + NODE - 512] = bytes(NODE - 512)
        expect_second = {**new, "unreadable": [index]}
        yield (
            f"torn-delta-node-{index}",
            vector(
                f"the newest root is whole, data node {index} of its delta is not: back to the "
                "recorded root; but if the newest is the recorded one, it is damaged and stays",
                file,
                recovered(first, 1, {**old, "next_counter": 3}),
                recovered(None, 1, {**old, "next_counter": 3}),
                recovered(second, 1, expect_second),
                opened_at(second, expect_second),
            ),
        )
    file = bytearray(after)
    cut = root_of(model).delta[0].slot * NODE
    file[cut : cut + NODE] = bytes(NODE)
    yield (
        "torn-old-delta-node",
        vector(
            "a node of the delta that both roots have is gone: recovery falls back, but not on the "
            "older root for object 0, whose delta does not verify either",
            file,
            recovered(first, 1, {**old, "next_counter": 3, "unreadable": [0]}),
            recovered(None, 1, DAMAGED),
        ),
    )

    model.write(4 * NODE, format_vectors.plaintext("third", NODE))
    third = model.commit()
    data = [*new_data, (4 * NODE, NODE, "third")]
    yield (
        "two-later-roots",
        vector(
            "two commits after the record: the newest counts",
            model.file,
            recovered(first, 1, success(third, 5 * NODE, data, nodes=4)),
        ),
    )
    file = bytearray(model.file)
    cut = root_of(model).delta[4].slot * NODE
    file[cut : cut + NODE] = bytes(NODE)
    yield (
        "two-later-roots-newest-torn",
        vector(
            "two commits after the record, the newest not whole: the one before counts",
            file,
            recovered(first, 1, {**new, "next_counter": 4}),
            recovered(None, 1, {**new, "next_counter": 4}),
        ),
    )


def all_vectors() -> Iterator[tuple[str, Vector]]:
    for family in (size_vectors, change_vectors, refusal_vectors, tree_vectors, attack_vectors,
                   crash_vectors):  # fmt: skip
        yield from family()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in all_vectors():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"scenario": name, **content}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else format_vectors.FOLDER)
