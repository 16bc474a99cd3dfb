"""The object vectors in tests/vectors/objects: what a file says, and how to read it.

A vector is one backing file and what must come of opening it:

* `volume_id`, `p`, `object_id`, `object_key`: keys; `roots` has the key and contents of each root
  slot that holds one, or why it does not.
* The backing file: `file_size` bytes, all zero but for `slots` (base64). Too large a file is not
  stored, but `made_by` the model: a seed for `object_model.seeded` and the operations; every file
  has its SHA-256 in `file_sha256`.
* `attempts`: ways of opening it. "open" has the record to open at; "recover" has the record and
  the `active_epoch`, or for object 0 no record and the least epoch. Each says what to `expect`:
  "damaged", or the name of the root that must be taken and the contents. `data` lists what is not
  zero as [offset, length, seed], the bytes being SHAKE-256(seed). `unreadable` lists the data nodes
  whose reading must fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.model.object_model import (
    NODE,
    Keys,
    ObjectModel,
    Record,
    nodes_for,
    seeded,
)

FOLDER = Path(__file__).parent.parent / "vectors" / "objects"
DAMAGED = "damaged"
WHOLE = 64 << 20  # objects up to this size are compared as a whole


def plaintext(seed: str, size: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(size)


@dataclass(frozen=True)
class Expected:
    """What an object that could be opened must be like."""

    root: str
    next_counter: int | None
    size: int
    nodes: int
    data: list[tuple[int, int, str]]
    unreadable: list[int]

    def extents(self) -> list[tuple[int, bytes]]:
        """Return (offset, bytes) of all data nodes as runs that do not touch, cut at the size."""
        node: dict[int, bytearray] = {}
        for offset, length, seed in self.data:
            content = plaintext(seed, length)
            for index in range(offset // NODE, nodes_for(offset + length)):
                a, b = max(offset, index * NODE), min(offset + length, (index + 1) * NODE)
                target = node.setdefault(index, bytearray(NODE))
                target[a - index * NODE : b - index * NODE] = content[a - offset : b - offset]
        runs: list[tuple[int, bytearray]] = []
        for index in sorted(node):
            if not runs or runs[-1][0] + len(runs[-1][1]) != index * NODE:
                runs.append((index * NODE, bytearray()))
            runs[-1][1].extend(node[index])
        return [(start, bytes(run[: self.size - start])) for start, run in runs]

    def contents(self) -> bytes:
        """Return all bytes of a small object."""
        assert self.size <= WHOLE
        contents = bytearray(self.size)
        for offset, run in self.extents():
            contents[offset : offset + len(run)] = run
        return bytes(contents)


@dataclass(frozen=True)
class Attempt:
    """One way of opening the file. `active_epoch` None: exactly at `record`."""

    record: Record | None
    active_epoch: int | None
    expect: Expected | None


@dataclass(frozen=True)
class Vector:
    """One scenario."""

    name: str
    keys: Keys
    raw: dict[str, Any]

    def file(self) -> bytes:
        """Return the backing file."""
        if "made_by" in self.raw:
            file = bytes(replay(self.keys, self.raw["made_by"]).file)
        else:
            image = bytearray(self.raw["file_size"])
            for slot, content in self.raw["slots"].items():
                part = base64.b64decode(content)
                image[int(slot) * NODE : int(slot) * NODE + len(part)] = part
            file = bytes(image)
        assert len(file) == self.raw["file_size"]
        assert hashlib.sha256(file).hexdigest() == self.raw["file_sha256"]
        return file

    def attempts(self) -> list[Attempt]:
        attempts = []
        for raw in self.raw["attempts"]:
            how = raw.get("open") or raw["recover"]
            record = how.get("record")
            expect = raw["expect"]
            attempts.append(
                Attempt(
                    record
                    and Record(record["epoch"], record["counter"], bytes.fromhex(record["r"])),
                    how.get("active_epoch"),
                    None if expect == DAMAGED else Expected(**expect),
                )
            )
        return attempts


def replay(keys: Keys, made_by: dict[str, Any]) -> ObjectModel:
    """Carry out the operations of a vector: [name, argument...]."""
    model = ObjectModel(keys, random=seeded(made_by["seed"].encode()))
    for name, *arguments in made_by["operations"]:
        match name:
            case "write":
                offset, length, seed = arguments
                model.write(offset, plaintext(seed, length))
            case "truncate":
                model.truncate(*arguments)
            case "punch":
                model.punch(*arguments)
            case "commit":
                model.commit()
            case "fold":
                model.commit(fold=True)
            case _:
                raise ValueError(name)
    return model


def load(path: Path) -> Vector:
    raw = json.loads(path.read_text())
    keys = Keys(*(bytes.fromhex(raw[name]) for name in ("volume_id", "p", "object_id")))
    return Vector(raw["scenario"], keys, raw)


def load_all() -> list[Vector]:
    vectors = [load(path) for path in sorted(FOLDER.glob("*.json"))]
    assert vectors, f"no vectors in {FOLDER}"
    return vectors
