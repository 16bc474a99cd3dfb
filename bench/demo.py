"""Show encfsd at work: RocksDB on an encrypted volume, and what an outsider sees of it.

Creates a volume in a temporary directory, mounts it with a free list, loads and compacts a RocksDB
database, looks at the backing directory and at the pool's counters, mounts again and checks every
key. Leaves nothing behind. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rocksdict import Options, Rdict, WriteBatch

ENCFSD = Path(sys.executable).with_name("encfsd")
MARKER = b"a-secret-that-must-not-be-found-"
BATCH = 50  # puts, as in the report that this project started from
VALUE_SIZE = 1025
TIMEOUT = 120  # seconds; no command of the demo takes nearly as long


def puts(first: int, end: int) -> WriteBatch:
    """Return a batch that puts records from `first` up to, but not including, `end`."""
    batch = WriteBatch(raw_mode=True)
    for record in range(first, end):
        batch.put(key_of(record), value_of(record))
    return batch


def say(text: str) -> None:
    """Print a step."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def encfsd(folder: Path, *arguments: str) -> str:
    """Run the command line in `folder`, as a user would, and return what it prints."""
    say(f"$ encfsd {' '.join(arguments)}")
    # The control socket lies in the folder too: who came by su or runs in a container has
    # no /run/user.
    done = subprocess.run(
        [ENCFSD, *arguments],
        check=True,
        timeout=TIMEOUT,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
    )
    return done.stdout


def key_of(number: int) -> bytes:
    """Return the 16-byte key of a record; hashed, so that puts are random inserts."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).hexdigest().encode()


def value_of(number: int) -> bytes:
    """Return the value of a record, which can be told again from its number."""
    return MARKER + hashlib.shake_128(number.to_bytes(8, "little")).digest(VALUE_SIZE - len(MARKER))


def options() -> Options:
    """RocksDB settings that make compaction start early."""
    chosen = Options(raw_mode=True)
    chosen.create_if_missing(True)
    chosen.set_write_buffer_size(4 << 20)
    chosen.set_target_file_size_base(4 << 20)
    chosen.set_max_bytes_for_level_base(16 << 20)
    return chosen


def load(path: Path, records: int) -> None:
    """Fill the database in batches of 50 puts, as the workload of the original report."""
    database = Rdict(str(path), options())
    slowest = 0.0
    start = time.monotonic()
    for first in range(0, records, BATCH):
        batch = puts(first, min(first + BATCH, records))
        before = time.monotonic()
        database.write(batch)
        slowest = max(slowest, time.monotonic() - before)
    database.compact_range(None, None)
    elapsed = time.monotonic() - start
    database.close()
    say(
        f"  {records} records of {VALUE_SIZE} bytes loaded and compacted in {elapsed:.1f} s, "
        f"slowest batch of {BATCH} puts {slowest * 1000:.1f} ms"
    )


def check(path: Path, records: int) -> None:
    """Read every record back."""
    database = Rdict(str(path), options())
    wrong = sum(database[key_of(number)] != value_of(number) for number in range(records))
    database.close()
    if wrong:
        sys.exit(f"{wrong} of {records} records are wrong")
    say(f"  all {records} records are there and right")


def entropy(data: bytes) -> float:
    """Return the Shannon entropy in bits a byte."""
    return -sum(
        n / len(data) * math.log2(n / len(data)) for n in collections.Counter(data).values()
    )


def look_from_outside(source: Path) -> None:
    """Show what somebody who holds the backing directory sees."""
    files = [path for path in source.rglob("*") if path.is_file()]
    objects = [path for path in files if path.parent.parent.name == "objects"]
    found = [path for path in files if MARKER in path.read_bytes()]
    if found:
        sys.exit(f"plaintext in {found[0]}")
    largest = max(objects, key=lambda path: path.stat().st_size)
    raw = largest.read_bytes()
    slots = [raw[at : at + 4096] for at in range(0, len(raw), 4096)]
    data = b"".join(slot for slot in slots if any(slot))  # what is free is a hole of the file
    say(f"  {len(objects)} objects with random names, for example {largest.relative_to(source)}:")
    start = data[4096 * 4 : 4096 * 4 + 32]
    say(f"  {start.hex(' ', 4)} ...   {entropy(data):.4f} bits a byte")
    say(f"  the marker that is in every value occurs in none of {len(files)} files")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--free-list", default="256M")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="encfsd-demo-") as temporary:
        base = Path(temporary)
        source, mount = base / "src", base / "mnt"
        mount.mkdir()
        passphrase = base / "passphrase"
        passphrase.touch(mode=0o600)
        passphrase.write_text(secrets.token_hex(16) + "\n")
        common = ("--passphrase-file=passphrase", "--state-dir=state")
        free_list = f"--free-list={arguments.free_list}"
        try:
            encfsd(base, "init", *common, "src")
            encfsd(base, "mount", free_list, *common, "src", "mnt")
            load(mount / "db", arguments.records)
            say(encfsd(base, "stats", "mnt"))
            encfsd(base, "umount", "mnt")
            say("What the holder of the backing directory sees:")
            look_from_outside(source)
            encfsd(base, "mount", free_list, *common, "src", "mnt")
            check(mount / "db", arguments.records)
            encfsd(base, "umount", "mnt")
            say(encfsd(base, "verify", *common, "src"))
        finally:
            if os.path.ismount(mount):
                subprocess.run(["umount", "-l", mount], check=False, timeout=TIMEOUT)


if __name__ == "__main__":
    main()
