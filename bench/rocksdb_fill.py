"""Fill a new RocksDB database on a mount in batches of 50 puts, and count misses meanwhile.

    rocksdb_fill.py MNT DIRECTORY BATCHES

RocksDB alone writes in pieces so large that they need no nodes. So a neighbour on the same mount
overwrites pages of a file at random, as a database does that changes its pages in place: each makes
a node dirty until the next group. That comes between the batches and not into their time.

Prints JSON: `points`, one for each 50 batches (MiB put, microseconds of a batch, misses of the free
list so far), and what RocksDB says of its compactions. Without sync. What the counters cost is not
in the time of a batch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator

from demo import BATCH, VALUE_SIZE, key_of, options, puts
from rocksdict import Rdict

from encfsd.control import Client

TOGETHER = 50
ANSWER = 20.0  # seconds that the daemon may take for one
KINDS = ("data", "tree")
PAGE = mmap.PAGESIZE
NEIGHBOUR = 128 << 20  # bytes of its file
PAGES_A_BATCH = 4


def misses(mount: str) -> int:
    """Return what `encfsd stats --json` tells, without starting a program for it."""
    with Client(mount) as client:
        client.send("stats")
        counters = client.receive(ANSWER)
    if counters is None:
        sys.exit(f"{mount}: no answer")
    return sum(int(counters["pool"][kind]["misses"]) for kind in KINDS)


def figure(pattern: str, text: str) -> float:
    """Return a figure of RocksDB's report."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        sys.exit(f"RocksDB does not report {pattern}")
    return float(found[1])


@contextlib.contextmanager
def neighbour(path: str) -> Iterator[Callable[[], None]]:
    """Make its file; return what overwrites a few pages."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, 1 << 20) as memory:
            for start in range(0, NEIGHBOUR, len(memory)):
                os.pwrite(file, memory, start)
            os.fsync(file)
        chance = random.Random(0)
        with mmap.mmap(-1, PAGE) as page:

            def overwrite() -> None:
                for _ in range(PAGES_A_BATCH):
                    os.pwrite(file, page, chance.randrange(NEIGHBOUR // PAGE) * PAGE)

            yield overwrite
    finally:
        os.close(file)


def main() -> None:
    """Fill it."""
    mount, directory, batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with neighbour(f"{directory}.pages") as overwrite:
        print(json.dumps(fill(mount, directory, batches, overwrite)))


def fill(
    mount: str, directory: str, batches: int, overwrite: Callable[[], None]
) -> dict[str, object]:
    """Put all batches; return what was found out."""
    database = Rdict(directory, options())
    record_size = len(key_of(0)) + VALUE_SIZE
    points = []
    spent = all_spent = 0.0
    for number in range(batches):
        batch = puts(number * BATCH, (number + 1) * BATCH)
        before = time.perf_counter()
        database.write(batch)
        spent += time.perf_counter() - before
        overwrite()
        if (number + 1) % TOGETHER == 0:
            mib = (number + 1) * BATCH * record_size / (1 << 20)
            us = spent / TOGETHER * 1e6
            points.append({"mib": round(mib, 2), "us": round(us, 1), "misses": misses(mount)})
            all_spent += spent
            spent = 0.0
    report = database.property_value("rocksdb.stats") or ""
    database.close()
    return {
        "points": points,
        "misses": misses(mount),
        "batches_s": all_spent,
        "compaction_s": figure(r"^Cumulative compaction: .*?([0-9.]+) seconds", report),
        "write_amplification": figure(r"^ Sum " + r"\s+\S+" * 10 + r"\s+([0-9.]+)", report),
    }


if __name__ == "__main__":
    main()
