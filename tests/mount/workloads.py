"""Real applications as crash tests: each does durable steps one by one, and can check them later.

    python workloads.py NAME write FOLDER ACKNOWLEDGED STEPS
    python workloads.py NAME check FOLDER ACKNOWLEDGED

`write` makes step after step durable by the application's own means and then appends the step's
number to the file ACKNOWLEDGED, which lies outside the file system under test. `check` lets the
application recover and fails if an acknowledged step is missing or anything is wrong. A step that
was made but not acknowledged may be there or not.
"""

import argparse
import hashlib
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path


def payload(step: int, size: int = 3000) -> bytes:
    """Return contents that can be told again from the step's number."""
    return hashlib.shake_128(step.to_bytes(8, "little")).digest(size + step % 977)


def acknowledged(path: Path) -> int:
    """Return how many steps were acknowledged: they are numbered from 0 without gaps."""
    lines = path.read_text().split()
    if lines != [str(number) for number in range(len(lines))]:
        raise AssertionError("the list of acknowledged steps has gaps")
    return len(lines)


def require(condition: bool, what: str) -> None:
    """Fail the check if something is not as it must be."""
    if not condition:
        raise AssertionError(what)


# SQLite


def _sqlite(folder: Path, journal: str, mmap: int) -> sqlite3.Connection:
    connection = sqlite3.connect(folder / "test.db", isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={journal}")
    # Only EXTRA syncs the directory after a commit has removed the journal.
    connection.execute("PRAGMA synchronous=EXTRA")
    connection.execute(f"PRAGMA mmap_size={mmap}")
    connection.execute("PRAGMA wal_autocheckpoint=50")
    return connection


def _sqlite_write(journal: str, mmap: int) -> Callable[[Path, int], Iterator[int]]:
    def write(folder: Path, steps: int) -> Iterator[int]:
        connection = _sqlite(folder, journal, mmap)
        connection.execute("CREATE TABLE IF NOT EXISTS t(step INTEGER PRIMARY KEY, data BLOB)")
        for step in range(steps):
            connection.execute("BEGIN")
            connection.execute("INSERT INTO t VALUES(?, ?)", (step, payload(step)))
            if step % 10 == 9:
                connection.execute("DELETE FROM t WHERE step % 7 = 3 AND step < ?", (step - 20,))
            connection.execute("COMMIT")
            yield step

    return write


def _sqlite_check(journal: str, mmap: int) -> Callable[[Path, int], None]:
    def check(folder: Path, steps: int) -> None:
        connection = _sqlite(folder, journal, mmap)
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        require(verdict == "ok", f"integrity_check: {verdict}")
        if steps == 0:
            return
        rows = dict(connection.execute("SELECT step, data FROM t"))
        for step in range(steps):
            kept = step in rows
            require(kept or step % 7 == 3, f"step {step} is missing")
            require(not kept or rows[step] == payload(step), f"step {step} is wrong")

    return check


# RocksDB


def _rocksdb(folder: Path) -> "object":
    import rocksdict  # noqa: PLC0415 - only this workload needs it

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(64 << 10)
    options.set_target_file_size_base(64 << 10)
    options.set_max_bytes_for_level_base(256 << 10)
    return rocksdict.Rdict(str(folder / "rocksdb"), options)


def _rocksdb_write(folder: Path, steps: int) -> Iterator[int]:
    import rocksdict  # noqa: PLC0415

    database = _rocksdb(folder)
    synced = rocksdict.WriteOptions()
    synced.sync = True
    for step in range(steps):
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.put(b"step-%08d" % step, payload(step))
        batch.put(b"last", b"%d" % step)
        database.write(batch, synced)  # type: ignore[attr-defined]
        yield step


def _rocksdb_check(folder: Path, steps: int) -> None:
    database = _rocksdb(folder)
    for step in range(steps):
        key = b"step-%08d" % step
        require(database[key] == payload(step), f"step {step}")  # type: ignore[index]
    if steps:
        require(int(database[b"last"]) >= steps - 1, "an older state")  # type: ignore[index]


# LMDB


def _lmdb_write(folder: Path, steps: int) -> Iterator[int]:
    import lmdb  # noqa: PLC0415

    with lmdb.open(str(folder / "lmdb"), map_size=64 << 20) as environment:
        for step in range(steps):
            with environment.begin(write=True) as transaction:
                transaction.put(b"step-%08d" % step, payload(step))
                transaction.put(b"last", b"%d" % step)
            yield step


def _lmdb_check(folder: Path, steps: int) -> None:
    import lmdb  # noqa: PLC0415

    if steps == 0:
        return
    with (
        lmdb.open(str(folder / "lmdb"), map_size=64 << 20) as environment,
        environment.begin() as transaction,
    ):
        for step in range(steps):
            require(transaction.get(b"step-%08d" % step) == payload(step), f"step {step}")
        last = int(transaction.get(b"last") or -1)
        require(transaction.stat()["entries"] == last + 2, "the number of entries")


# git

GIT = ("git", "-c", "core.fsync=all", "-c", "core.fsyncMethod=fsync", "-c", "gc.auto=0")
GIT_ENVIRONMENT = {
    **os.environ,
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": "/nonexistent",
    "GIT_AUTHOR_NAME": "t",
    "GIT_AUTHOR_EMAIL": "t@example.org",
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@example.org",
}


def git(folder: Path, *arguments: str) -> str:
    """Run git in a work tree and return what it prints."""
    done = subprocess.run(
        [*GIT, "-C", str(folder), *arguments],
        check=True,
        env=GIT_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return done.stdout


def _git_write(folder: Path, steps: int) -> Iterator[int]:
    tree = folder / "repository"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    for step in range(steps):
        (tree / f"file-{step % 17}").write_bytes(payload(step))
        git(tree, "add", ".")
        git(tree, "commit", "-q", "-m", f"step {step}")
        # git syncs no directories: the rename that moves the branch might be lost.
        fsync_folder(tree / ".git" / "refs" / "heads")
        yield step


def _git_check(folder: Path, steps: int) -> None:
    tree = folder / "repository"
    if steps == 0:
        return
    # A process that is killed leaves its lock files; git asks the user to remove them.
    for lock in (tree / ".git").rglob("*.lock"):
        lock.unlink()
    git(tree, "fsck", "--full", "--strict")
    subjects = git(tree, "log", "--format=%s").splitlines()
    require(len(subjects) >= steps, f"{len(subjects)} commits of {steps}")
    for distance, subject in enumerate(subjects):
        step = len(subjects) - 1 - distance
        require(subject == f"step {step}", f"commit {distance} is {subject!r}")
        name = f"main~{distance}:file-{step % 17}" if distance else f"main:file-{step % 17}"
        if step < steps and step % 5 == 0:
            blob = subprocess.run(
                [*GIT, "-C", str(tree), "cat-file", "blob", name],
                check=True,
                env=GIT_ENVIRONMENT,
                capture_output=True,
            ).stdout
            require(blob == payload(step), f"contents of step {step}")


# Plain files, as careful programs write them


def fsync_folder(folder: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def _files_write(folder: Path, steps: int) -> Iterator[int]:
    """Write, fsync, rename over the old file, fsync the directory; append to a log."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for step in range(steps):
        with (folder / "new").open("wb") as new:
            new.write(payload(step))
            new.flush()
            os.fsync(new.fileno())
        (folder / "new").rename(folder / f"file-{step % 7}")
        fsync_folder(folder)
        os.write(log, b"%08d\n" % step)
        os.fdatasync(log)
        yield step


def _files_check(folder: Path, steps: int) -> None:
    if steps == 0:
        return
    lines = (folder / "log").read_bytes().split(b"\n")[:-1]
    require(len(lines) >= steps, f"{len(lines)} lines of {steps}")
    for number, line in enumerate(lines):
        require(line == b"%08d" % number, f"line {number} is {line!r}")
    for slot in range(min(7, steps)):
        newest = steps - 1 - (steps - 1 - slot) % 7
        found = (folder / f"file-{slot}").read_bytes()
        allowed = {payload(newest), payload(newest + 7)}
        require(found in allowed, f"file-{slot} is neither of step {newest} nor of the next")


WORKLOADS: dict[str, tuple[Callable[[Path, int], Iterator[int]], Callable[[Path, int], None]]] = {
    "sqlite-rollback": (_sqlite_write("DELETE", 0), _sqlite_check("DELETE", 0)),
    "sqlite-wal": (_sqlite_write("WAL", 0), _sqlite_check("WAL", 0)),
    "sqlite-mmap": (_sqlite_write("PERSIST", 1 << 30), _sqlite_check("PERSIST", 1 << 30)),
    "rocksdb": (_rocksdb_write, _rocksdb_check),
    "lmdb": (_lmdb_write, _lmdb_check),
    "git": (_git_write, _git_check),
    "files": (_files_write, _files_check),
}


def main() -> None:
    """Run one workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("acknowledged", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    write, check = WORKLOADS[arguments.name]
    if arguments.action == "check":
        check(arguments.folder, acknowledged(arguments.acknowledged))
        return
    with arguments.acknowledged.open("a") as log:
        for step in write(arguments.folder, arguments.steps):
            log.write(f"{step}\n")
            log.flush()


if __name__ == "__main__":
    main()
