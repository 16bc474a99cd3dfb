"""The same work on a mounted volume and on a plain directory of the same disk, in turn.

RocksDB (db_bench), a thousand small files, large files in sequence and at random. These figures
are recorded only: the targets for the mount come with the native fast path.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from samples import Sample

ENCFSD = Path(sys.executable).with_name("encfsd")
TIMEOUT = 300  # seconds, for anything that touches the mount
ROUNDS = 5
SMALL_FILES = 500
REQUEST = 1 << 20
NODE = 4096
RANDOM_OPERATIONS = 2000

Figures = Iterator[tuple[str, str, float]]


def encfsd(*arguments: str | Path) -> None:
    """Run a command quietly."""
    command = [ENCFSD, *arguments]
    subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def mounted(disk: Path) -> Iterator[Path]:
    """Mount a new volume; unmount it and remove everything afterwards."""
    with tempfile.TemporaryDirectory(prefix="mount-", dir=disk) as temporary:
        base = Path(temporary)
        source, mount = base / "src", base / "mnt"
        mount.mkdir()
        passphrase = base / "passphrase"
        passphrase.touch(mode=0o600)
        passphrase.write_text(secrets.token_hex(16) + "\n")
        common = ("--passphrase-file", passphrase, "--state-dir", base / "state")
        encfsd("init", *common, source)
        encfsd("mount", "--free-list=256M", *common, source, mount)
        try:
            yield mount
            encfsd("umount", mount)
        finally:
            if os.path.ismount(mount):
                subprocess.run(["umount", "-l", mount], check=False, timeout=TIMEOUT)


def seconds(work: Callable[[], object]) -> float:
    """Time one piece of work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def small_files(directory: Path) -> Figures:
    """Create, stat, read and unlink files of 1 KiB."""
    content = secrets.token_bytes(1024)
    names = [directory / f"file-{i}" for i in range(SMALL_FILES)]
    steps: tuple[tuple[str, Callable[[Path], object]], ...] = (
        ("create", lambda name: name.write_bytes(content)),
        ("stat", os.stat),
        ("read", Path.read_bytes),
        ("unlink", Path.unlink),
    )
    for what, step in steps:

        def each(step: Callable[[Path], object] = step) -> None:
            for name in names:
                step(name)

        yield f"mount: {what} a file of 1 KiB", "us", seconds(each) / SMALL_FILES * 1e6


def large_file(directory: Path, mib: int) -> Figures:
    """Write and read a file in sequence, then at random, each write with fsync at its end."""
    block, path = secrets.token_bytes(REQUEST), directory / "large"
    offsets = [random.randrange(mib * REQUEST // NODE) * NODE for _ in range(RANDOM_OPERATIONS)]
    fd = os.open(path, os.O_RDWR | os.O_CREAT)

    def drop() -> None:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write() -> None:
        for _ in range(mib):
            os.write(fd, block)
        os.fsync(fd)

    def read() -> None:
        for i in range(mib):
            os.pread(fd, REQUEST, i * REQUEST)

    def write_random() -> None:
        for offset in offsets:
            os.pwrite(fd, block[:NODE], offset)
        os.fsync(fd)

    def read_random() -> None:
        for offset in offsets:
            os.pread(fd, NODE, offset)

    try:
        yield "mount: sequential write", "MiB/s", mib / seconds(write)
        drop()
        yield "mount: sequential read", "MiB/s", mib / seconds(read)
        yield "mount: random write", "us", seconds(write_random) / RANDOM_OPERATIONS * 1e6
        drop()
        yield "mount: random read", "us", seconds(read_random) / RANDOM_OPERATIONS * 1e6
    finally:
        os.close(fd)
        path.unlink()


def rocksdb(directory: Path, records: int) -> Figures:
    """Run db_bench's fill and overwrite."""
    db = directory / "rocksdb"
    command = [
        "db_bench",
        "--benchmarks=fillrandom,overwrite",
        f"--db={db}",
        f"--num={records}",
        "--value_size=1024",
        "--compression_type=none",
        "--write_buffer_size=16777216",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    figures = re.findall(r"^(\w+)\s*:\s*([0-9.]+) micros/op", done.stdout, re.MULTILINE)
    for what, micros in figures:
        yield f"mount: RocksDB {what}", "us", float(micros)
    shutil.rmtree(db)


def work(directory: Path, mib: int, records: int) -> Figures:
    """Do everything once in a new directory."""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        place = Path(temporary)
        yield from small_files(place)
        yield from large_file(place, mib)
        if shutil.which("db_bench"):
            yield from rocksdb(place, records)


def measure(disk: Path, mib: int, records: int) -> Iterator[Sample]:
    """Yield the samples of both sides, round by round."""
    with mounted(disk) as mount, tempfile.TemporaryDirectory(prefix="raw-", dir=disk) as raw:
        for n in range(ROUNDS):
            sides = [("raw", Path(raw)), ("encfsd", mount)]
            for side, directory in sides if n % 2 else sides[::-1]:
                for question, unit, value in work(directory, mib, records):
                    yield Sample(question, side, n, unit, value)
