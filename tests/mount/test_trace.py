"""What the daemon opens for writing, seen from its system calls."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.mount.harness import ENCFSD, Volume, run

SCRIPT = Path(__file__).with_name("workloads.py")
FOR_WRITING = re.compile(r"\bO_(?:WRONLY|RDWR|CREAT|TMPFILE)\b")


def opened_for_writing(trace: str) -> set[str]:
    """Return the names as given to calls that succeeded; relative ones lie in source or state."""
    names = set()
    for line in trace.splitlines():
        named = re.search(r'"((?:[^"\\]|\\.)*)"', line)
        if named and FOR_WRITING.search(line) and re.search(r"= \d+$", line):
            names.add(named[1])
    return names


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_nothing_is_written_outside_source_and_state(tmp_path: Path) -> None:
    """No temporary file of SQLite or Python, whatever is done: it would hold names in the clear."""
    trace = tmp_path / "trace"
    tracer = ("strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat", "-o", trace)
    plain = Volume(tmp_path, key_file=True)
    plain.init()
    traced = object.__new__(Volume)
    traced.__dict__.update(plain.__dict__)
    traced._encfsd = tuple(str(word) for word in (*tracer, *ENCFSD))
    log = tmp_path / "acknowledged"
    log.touch()
    with traced.mounted("--free-list=16M", start=60) as mount:
        run([sys.executable, SCRIPT, "sqlite-rollback", "write", mount.point, log, "40"])
        # Enough names for SQLite to sort and to spill, if it ever did.
        names = "import os,sys; [open(f'{sys.argv[1]}/n{i}','w').close() for i in range(2000)]"
        run([sys.executable, "-c", names, mount.point], timeout=120)
        run(["sh", "-c", f"ls -l {mount.point} | wc -l; rm {mount.point}/n1*"], timeout=120)
        plain.encfsd("umount", mount.point)
        mount.wait()
    allowed = re.compile(
        r"/dev/(?:fuse|null|tty)|/proc/self/.*|/sys/.*"
        r"|meta|ballast|lock|objects(?:/.*)?|volume\.header.*|[0-9a-f]{32}\.state.*"
    )
    opened = opened_for_writing(trace.read_text(errors="replace"))
    assert {"meta", "ballast"} < opened, "the trace shows nothing"
    assert sorted(name for name in opened if not allowed.fullmatch(name)) == []
