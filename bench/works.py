"""What is measured: each work once on one place. mount.py calls them in turn for all candidates.

A figure is a time in microseconds, a speed in MiB/s or a size in bytes. Work made of small requests
is done twice, with client and daemon pinned to one CPU and free: to wake an idle virtual CPU takes
longer than most requests, and whether it has to be woken is a matter of luck.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from candidates import NO_FAST_PATH, SPINNING, Candidate, Role, encfsd
from place import FREE, PINNED, Place, drop_caches

HERE = Path(__file__).parent
DISK, TMPFS = "disk", "tmpfs"
KIB, MIB = 1 << 10, 1 << 20
STILL = "no spinning thread"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int
    read_mib: int  # of the file for random reads
    write_mib: int  # of the file for random writes
    sequential_mib: int
    operations: int  # of a loop, at most
    milliseconds: int  # of a loop, at most
    small_files: int
    tar_files: int
    listed_files: int
    puts: int  # of db_bench
    few_puts: int  # of db_bench where peers take part
    batches: int


FULL = Sizes(5, 256, 64, 128, 4000, 300, 1000, 20_000, 200_000, 200_000, 10_000, 800)
QUICK = Sizes(2, 64, 16, 32, 1000, 100, 200, 2000, 5000, 50_000, 5000, 200)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value. `way`: pinned, free, or "" where there is no choice."""

    what: str
    way: str
    unit: str
    value: float
    series: tuple[float, ...] = ()  # what the value is the mean of, where its course matters


Figures = Iterator[Figure]


def _microseconds(what: str, way: str, ns: float) -> Figure:
    return Figure(what, way, "us", ns / 1e3)


def _nothing(_place: Place, _size: Sizes) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Work:
    """Prepared once for each candidate, then measured in every round (from 0)."""

    name: str
    bases: tuple[str, ...]
    measure: Callable[[Place, Sizes, int], Figures]
    prepare: Callable[[Place, Sizes], None] = _nothing
    roles: frozenset[Role] = frozenset(Role)  # who takes part
    # Who of them does not, and why.
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    instead: tuple[Candidate, ...] = ()  # who is measured, if not everybody


# ---- one large file ----


def _fill_for_reads(place: Place, size: Sizes) -> None:
    place.drive("fill", place.directory / "large", size.read_mib)


def _clients(n: int) -> str:
    return "1 client" if n == 1 else f"{n} clients"


def _read_direct(place: Place, size: Sizes, _round: int) -> Figures:
    file, limits = place.directory / "large", (size.operations, size.milliseconds)
    for way in place.each_way():
        for clients in (1, 16):
            ns = place.drive("random-read", file, "direct", clients, *limits, 0, 1)["random read"]
            yield _microseconds(f"random 4 KiB read, O_DIRECT, {_clients(clients)}", way, ns)


def _read_cold(place: Place, size: Sizes, _round: int) -> Figures:
    """Each of the four reads a quarter of the file that nobody has read since the mount."""
    file, limits = place.directory / "large", (size.operations, size.milliseconds)
    kinds = [(way, clients) for way in (PINNED, FREE) for clients in (1, 16)]
    place.go_cold()
    for part, (way, clients) in enumerate(kinds):
        place.pin(way)
        answer = place.drive("random-read", file, "buffered", clients, *limits, part, len(kinds))
        what = f"random 4 KiB read, cold, {_clients(clients)}"
        yield _microseconds(what, way, answer["random read"])


def _sequential(place: Place, size: Sizes, n: int) -> Figures:
    place.pin(FREE)
    files = {block: place.directory / f"{block}-{n}" for block in (128 * KIB, MIB)}
    for block, file in files.items():
        ns = place.drive("sequential-write", file, size.sequential_mib, block)["sequential write"]
        yield Figure(f"sequential write, {block >> 10} KiB", "", "MiB/s", 1e9 / ns)
    place.go_cold()
    for block, file in files.items():
        ns = place.drive("sequential-read", file, block)["sequential read"]
        yield Figure(f"sequential read, {block >> 10} KiB", "", "MiB/s", 1e9 / ns)
    place.run("rm", *files.values())


def _fill_for_writes(place: Place, size: Sizes) -> None:
    place.drive("fill", place.directory / "large", size.write_mib)


def _write_random(place: Place, size: Sizes, _round: int) -> Figures:
    for way in place.each_way():
        answer = place.drive("random-write", place.directory / "large", size.operations)
        yield _microseconds("random 4 KiB write", way, answer["random write"])


def _append(place: Place, size: Sizes, n: int) -> Figures:
    for way in place.each_way():
        file = place.directory / f"log-{way}-{n}"
        ns = place.drive("append", file, size.operations, size.milliseconds)["append"]
        yield _microseconds("append 4 KiB + fdatasync", way, ns)


# ---- many files ----


def _small_files(place: Place, size: Sizes, n: int) -> Figures:
    for way in place.each_way():
        directory = place.directory / f"small-{way}-{n}"
        limit = size.milliseconds * 2
        for what, ns in place.drive("small-files", directory, size.small_files, limit).items():
            yield _microseconds(f"{what} a 1 KiB file", way, ns)


def _archive(path: Path, files: int) -> Path:
    """Make a tar file with the shape of a source tree: a hundred files a directory, 2 KiB each."""
    if not path.exists():
        chance = random.Random(files)
        with tarfile.open(path, "w") as archive:
            for i in range(files):
                entry = tarfile.TarInfo(f"tree/{i // 100:03}/file-{i:05}.c")
                entry.size = min(int(chance.expovariate(1 / 2048)), 32 * KIB)
                entry.mtime = 1_700_000_000 + i
                archive.addfile(entry, io.BytesIO(chance.randbytes(entry.size)))
    return path


def _untar(place: Place, size: Sizes, n: int) -> Figures:
    """Pinned the whole number of files, free a tenth of it: only the former has to reach anything.

    Half of them at a time, with the kernel's caches dropped in between, because passthrough_ll has
    a descriptor open for each inode that the kernel knows, and may have 20,000 on some machines.
    """
    for way in place.each_way():
        files = size.tar_files if way == PINNED else size.tar_files // 10
        archive = _archive(place.shared / f"{files // 2}.tar", files // 2)
        ns = 0.0
        for half in range(2):
            directory = place.directory / f"tree-{way}-{n}-{half}"
            place.run("mkdir", directory)
            drop_caches()
            archive.read_bytes()
            ns += place.drive("command", "tar", "-xf", archive, "-C", directory)["command"]
        yield _microseconds(f"untar, a file of {files:,}", way, ns / files)


def _fill_for_listing(place: Place, size: Sizes) -> None:
    place.drive("create-empty", place.directory / "many", size.listed_files)


def _list(place: Place, size: Sizes, _round: int) -> Figures:
    """List, which makes every inode known to the daemon."""
    place.pin(PINNED)
    place.go_cold()
    before = place.resident() if place.has_daemon else 0
    ns = place.drive("command", "ls", "-l", place.directory / "many")["command"]
    what = f"ls -l of {size.listed_files:,} files, cold, a file"
    yield _microseconds(what, PINNED, ns / size.listed_files)
    if place.has_daemon:
        grown = (place.resident() - before) / size.listed_files
        yield Figure("memory per known inode, with caches", "", "bytes", grown)


# ---- RocksDB ----

DB_BENCH = (
    "--key_size=16",
    "--value_size=100",
    "--sync=0",
    "--compression_type=none",
    "--seed=42",
)


def _db_bench(place: Place, puts: int, n: int) -> Figures:
    """Put and compact, with memtables and files so small that there is much to compact."""
    place.pin(FREE)
    db = place.directory / f"db-{n}"
    file_size = puts * 116 // 5
    output = place.run(
        "db_bench",
        "--benchmarks=fillrandom,overwrite,compact",
        f"--db={db}",
        f"--num={puts}",
        f"--write_buffer_size={file_size}",
        f"--target_file_size_base={file_size}",
        f"--max_bytes_for_level_base={file_size * 4}",
        *DB_BENCH,
    )
    for what, us in re.findall(r"^(\w+)\s*:\s*([0-9.]+) micros/op", output, re.MULTILINE):
        yield Figure(f"RocksDB {what}, {puts:,} puts", "", "us", float(us))
    place.run("rm", "-r", db)


def _many_puts(place: Place, size: Sizes, n: int) -> Figures:
    yield from _db_bench(place, size.puts, n)


def _few_puts(place: Place, size: Sizes, n: int) -> Figures:
    yield from _db_bench(place, size.few_puts, n)


def _batches(place: Place, size: Sizes, n: int) -> Figures:
    place.pin(FREE)
    db = place.directory / f"db-{n}"
    program = HERE / "rocksdb_batches.py"
    means = json.loads(place.run(sys.executable, program, db, str(size.batches)))
    what = "RocksDB batch of 50 puts"
    yield Figure(f"{what}, mean", "", "us", sum(means) / len(means), tuple(means))
    yield Figure(f"{what}, slowest 20", "", "us", max(means))
    place.run("rm", "-r", db)


# ---- a busy interpreter ----


def _beside_spinner(place: Place, size: Sizes, n: int) -> Figures:
    """Small requests on one CPU; on another, if the daemon has it, a Python thread that spins."""
    place.pin(PINNED)
    file, limits = place.directory / "large", (size.operations, size.milliseconds)
    answers = place.drive("random-read", file, "direct", 1, *limits, 0, 1)
    directory = place.directory / f"small-{n}"
    answers |= place.drive("small-files", directory, size.small_files, size.milliseconds)
    for what, ns in answers.items():
        yield _microseconds(f"beside a spinning thread: {what}", PINNED, ns)


NO_PEERS = frozenset(Role) - {Role.PEER}
PUTS_TAKE_MINUTES = {f"encfsd {NO_FAST_PATH}": "takes minutes; rocksdb-peers has it"}
LINKED_LIST = "finds inodes in a linked list: 200,000 of them take it minutes"

WORKS = (
    Work("random-read-direct", (TMPFS, DISK), _read_direct, _fill_for_reads),
    Work("random-read-cold", (DISK,), _read_cold, _fill_for_reads),
    Work("sequential", (TMPFS, DISK), _sequential),
    Work("random-write", (TMPFS, DISK), _write_random, _fill_for_writes),
    Work("append", (DISK,), _append),
    # A put is a write(2). Where each is a request, as many puts as it takes to tell encfsd from the
    # raw directory would take minutes.
    Work("rocksdb", (DISK, TMPFS), _many_puts, roles=NO_PEERS, left_out=PUTS_TAKE_MINUTES),
    Work("rocksdb-peers", (DISK, TMPFS), _few_puts, roles=frozenset({Role.OURS, Role.PEER})),
    Work("batches", (DISK, TMPFS), _batches),
    Work("small-files", (TMPFS, DISK), _small_files),
    Work("untar", (DISK,), _untar),
    Work(
        "list",
        (DISK,),
        _list,
        _fill_for_listing,
        left_out={
            "passthrough_ll": LINKED_LIST,
            f"encfsd {NO_FAST_PATH}": "takes minutes to create and list 200,000 files",
            "cryfs": "takes minutes to create 200,000 files",
        },
    ),
    Work(
        "spinning",
        (TMPFS,),
        _beside_spinner,
        _fill_for_reads,
        instead=(encfsd("encfsd", program=SPINNING), encfsd(STILL)),
    ),
)
