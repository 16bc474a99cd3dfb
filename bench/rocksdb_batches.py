"""WriteBatches of 50 puts of 1,025 bytes, as in the report that this project started from.

    rocksdb_batches.py DIRECTORY BATCHES

Prints a JSON list: the mean time of a batch in microseconds, 20 batches at a time. Without sync,
and long enough that compaction decides how long a batch takes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from demo import BATCH, options, puts
from rocksdict import Rdict

TOGETHER = 20


def main() -> None:
    """Fill a new database."""
    database = Rdict(str(Path(sys.argv[1])), options())
    means = []
    spent = 0.0
    for number in range(int(sys.argv[2])):
        batch = puts(number * BATCH, (number + 1) * BATCH)
        before = time.perf_counter()
        database.write(batch)
        spent += time.perf_counter() - before
        if (number + 1) % TOGETHER == 0:
            means.append(round(spent / TOGETHER * 1e6, 1))
            spent = 0.0
    database.close()
    print(json.dumps(means))


if __name__ == "__main__":
    main()
