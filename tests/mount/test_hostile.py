"""What a hostile host, a crash, a small limit or a careless user does to a mount."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mount.harness import ENCFSD, Mount, Volume, device_of, run, way

NAMES = ("plain", "dir/seven", "dir/esc\x1b[31m\nname", "tiny")


def python(code: str, cwd: Path, *arguments: str, timeout: float = 60.0) -> str:
    """Run Python on a mount, in a process that can be killed."""
    command = [sys.executable, "-I", "-c", code, *arguments]
    return run(command, cwd=cwd, timeout=timeout).stdout


FILL = """
import json, os, random, sys
names, content = json.loads(sys.argv[1]), random.Random(7)
os.mkdir("dir")
for name, size in zip(names, (4097, 70000, 30000, 100), strict=True):
    with open(name, "wb") as file:
        file.write(content.randbytes(size))
        os.fsync(file.fileno())
"""

SUMS = """
import hashlib, json, sys
sums = {}
for name in json.loads(sys.argv[1]):
    try:
        with open(name, "rb") as file:
            sums[name] = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        sums[name] = error.errno
print(json.dumps(sums))
"""


def sums(volume: Volume) -> dict[str, str | int]:
    """Return for each file the digest of its contents, or the errno of reading them."""
    answer: dict[str, str | int] = json.loads(python(SUMS, volume.point, json.dumps(NAMES)))
    return answer


def objects(volume: Volume) -> list[Path]:
    return sorted(path for path in volume.source.glob("objects/??/*") if path.is_file())


def filled(volume: Volume) -> dict[str, str | int]:
    with volume.mounted():
        python(FILL, volume.point, json.dumps(NAMES))
        return sums(volume)


# ---- the host ----


@pytest.mark.parametrize("attack", ["flip", "truncate", "swap", "fifo", "symlink", "delete"])
def test_a_file_is_right_or_eio_and_verify_names_it(volume: Volume, attack: str) -> None:
    good = filled(volume)
    first, second = objects(volume)[:2]
    if attack == "flip":
        damaged = bytearray(first.read_bytes())
        for at in range(0, len(damaged), 512):
            damaged[at] ^= 4
        first.write_bytes(damaged)
    elif attack == "truncate":
        os.truncate(first, first.stat().st_size - 4096)
    elif attack == "swap":
        middle = first.with_suffix(".t")
        first.rename(middle)
        second.rename(first)
        middle.rename(second)
    else:
        first.unlink()
        if attack == "fifo":
            os.mkfifo(first, 0o600)
        elif attack == "symlink":
            first.symlink_to(second)

    verified = volume.encfsd("verify", *volume.unlock, volume.source, check=False)
    assert verified.returncode == 60
    assert "Traceback" not in verified.stderr
    with volume.mounted():
        seen = sums(volume)
    bad = [name for name in NAMES if seen[name] != good[name]]
    assert len(bad) == (2 if attack == "swap" else 1)
    assert all(seen[name] == 5 for name in bad)
    lines = verified.stdout.splitlines()
    assert len(lines) == len(bad)
    for name in bad:
        shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
        assert any(f"/{shown}:" in line for line in lines), (shown, lines)
    assert verified.stdout.replace("\n", "").isprintable()


def test_an_old_copy_of_one_object_is_refused(volume: Volume) -> None:
    good = filled(volume)
    old = {path: path.read_bytes() for path in objects(volume)}
    with volume.mounted():
        python("open('plain', 'r+b').write(b'new')", volume.point)
        changed = sums(volume)
    assert [name for name in NAMES if changed[name] != good[name]] == ["plain"]
    for path, content in old.items():
        path.write_bytes(content)
    with volume.mounted():
        assert sums(volume) == {**good, "plain": 5}


def test_an_old_copy_of_everything_is_refused_until_it_is_named(volume: Volume) -> None:
    good = filled(volume)
    old = volume.source.with_name("old")
    shutil.copytree(volume.source, old)
    with volume.mounted():
        python("open('plain', 'r+b').write(b'new')", volume.point)
    shutil.rmtree(volume.source)
    shutil.copytree(old, volume.source)
    for options in (["--accept-root=" + 64 * "0"], ["--trust-first"], ["--crypto=auto"]):
        options += [*volume.unlock, str(volume.source), str(volume.point)]
        refused = volume.encfsd("mount", *options, check=False)
        assert refused.returncode in ((60,) if "accept" in options[0] else (51, 52))
        assert device_of(volume.point) is None
    root = refused.stderr.rpartition("--accept-root=")[2].split()[0]
    with volume.mounted(f"--accept-root={root}"):
        assert sums(volume) == good


@pytest.mark.parametrize("attack", ["source gone", "objects a file", "meta zeroed"])
def test_a_source_that_changes_below_a_mount(volume: Volume, attack: str) -> None:
    """No write is promised that cannot be kept, the daemon goes on, the end is clean."""
    filled(volume)
    folder = volume.source / "objects"
    with volume.mounted() as mount:
        run(["ls", volume.point])
        if attack == "source gone":
            shutil.rmtree(volume.source)
        elif attack == "objects a file":
            folder.rename(volume.source / "away")
            folder.touch()
        else:
            with (volume.source / "meta").open("r+b") as meta:
                meta.write(bytes((volume.source / "meta").stat().st_size))
        code = "import os; f = open('new', 'wb'); f.write(bytes(50000)); os.fsync(f.fileno())"
        lost = run([sys.executable, "-I", "-c", code], cwd=volume.point, check=False)
        assert lost.returncode == 1
        assert "[Errno " in lost.stderr
        assert mount.process.poll() is None
        ended = volume.encfsd("umount", volume.point, check=False)
        assert ended.returncode in (0, 44)
        assert mount.wait() == ended.returncode
        assert "Traceback" not in volume.log.read_text()


# ---- crashes and load ----

REWRITE = """
import os, random, sys, threading, time
end = time.monotonic() + float(sys.argv[1])

def rewrite(name):
    choose = random.Random(name)
    while time.monotonic() < end:
        file = f"{name}{choose.randrange(10)}"
        size = choose.choice((10, 5000, 9000, 300000))
        fd = os.open(file, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(size).encode().ljust(size, b"."), 0)
        os.fsync(fd)
        os.close(fd)
        if choose.random() < 0.1:
            os.unlink(file)

threads = [threading.Thread(target=rewrite, args=(name,)) for name in "ab"]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for file in os.listdir("."):
    with open(file, "rb") as stream:
        content = stream.read()
    assert content == str(len(content)).encode().ljust(len(content), b"."), file
"""


def test_files_that_shrink_and_grow_between_groups_stay_sound(volume: Volume) -> None:
    """Longer than five seconds, so that a periodic group falls between the solo commits."""
    with volume.mounted("--free-list=16M"):
        python(REWRITE, volume.point, "8")
    volume.encfsd("verify", *volume.unlock, volume.source)


LOAD = """
import os, sys, threading
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def note(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

def append(start):
    fd = os.open("append", os.O_WRONLY | os.O_CREAT)
    for n in range(start, 1 << 30):
        os.pwrite(fd, b"%015d\\n" % n, 16 * n)
        os.fdatasync(fd)
        note("append", n)

def replace(start):
    folder = os.open(".", os.O_RDONLY)
    for n in range(start, 1 << 30):
        with open("next", "wb") as file:
            file.write(b"%015d\\n" % n * 700)
        os.rename("next", "current")
        os.fsync(folder)
        note("replace", n)

def make(start):
    folder = os.open(".", os.O_RDONLY)
    for n in range(start, 1 << 30):
        os.mkdir(f"d{n}")
        if n > start:
            os.rmdir(f"d{n - 1}")
        os.fsync(folder)
        note("make", n)

def guarded(work, start):
    try:
        work(start)
    except OSError:
        pass

start = int(sys.argv[2])
for work in (append, replace, make):
    threading.Thread(target=guarded, args=(work, start)).start()
"""

CHECK = """
import os, sys
acked = {}
for line in open(sys.argv[1]):
    word, n = line.split()
    acked[word] = int(n)
start = int(sys.argv[2])
content = open("append", "rb").read()
for n in range(start, acked.get("append", start - 1) + 1):
    assert content[16 * n : 16 * n + 16] == b"%015d\\n" % n, ("append", n)
if "replace" in acked:
    content = open("current", "rb").read()
    assert content == content[:16] * 700, "a mixture"
    assert int(content[:15]) >= acked["replace"], "an old one"
if "make" in acked:
    last = max(int(name[1:]) for name in os.listdir(".") if name[0] == "d")
    assert last >= acked["make"], "a folder is lost"
"""


def test_what_fsync_acknowledged_survives_kill(volume: Volume, tmp_path: Path) -> None:
    moments = random.Random(os.urandom(8))
    for round_ in range(4):
        log, start = tmp_path / f"log{round_}", round_ * 1_000
        with volume.mounted() as mount:
            command = [sys.executable, "-I", "-c", LOAD, str(log), str(start)]
            shell = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', str(volume.point), *command]
            load = subprocess.Popen(shell, start_new_session=True)
            try:
                time.sleep(0.5 + moments.random())
                mount.kill()
                load.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(load.pid, signal.SIGKILL)
        log.touch()
        with volume.mounted():
            python(CHECK, volume.point, str(log), str(start))
    volume.encfsd("verify", *volume.unlock, volume.source)


# ---- users ----


@pytest.mark.parametrize("target", ["/dev/full", "closed"])
def test_output_that_cannot_be_written_is_no_internal_error(volume: Volume, target: str) -> None:
    redirect = '"$@" > /dev/full' if target == "/dev/full" else '"$@" >&-'
    command = ["/bin/sh", "-c", redirect, "sh", *ENCFSD, "info", str(volume.source)]
    assert "Traceback" not in run(command, check=False).stderr


def test_a_hangup_ends_no_mount_without_a_last_commit(volume: Volume) -> None:
    with volume.mounted() as mount:
        python("open('a', 'w').write('kept')", volume.point)
        mount.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert mount.process.poll() in (None, 0)
        mount.kill() if mount.process.poll() is None else mount.release()


SECOND_FSYNC = """
import os
fd = os.open("new", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"x" * 50000, 0)
try:
    os.fsync(fd)
    raise SystemExit("the store was not to be had")
except OSError:
    pass
try:
    os.fsync(fd)
    print("durable")
except OSError:
    print("failed")
"""


def test_after_a_failed_fsync_the_next_one_does_not_lie(volume: Volume) -> None:
    filled(volume)
    folder, away = volume.source / "objects", volume.source / "away"
    with volume.mounted() as mount:
        run(["ls", volume.point])
        folder.rename(away)
        folder.touch()
        said = python(SECOND_FSYNC, volume.point)
        folder.unlink()
        away.rename(folder)
        mount.kill()
    with volume.mounted():
        size = python("import os; print(os.path.getsize('new'))", volume.point)
    assert said.strip() == "failed" or int(size) == 50000


MANY_OPEN = """
import os, sys
fds = [os.open(f"o{n}", os.O_RDWR | os.O_CREAT) for n in range(300)]
for fd in fds:
    os.pwrite(fd, b"x" * 5000, 0)
for fd in fds:
    os.fsync(fd)
"""


def test_more_open_files_than_descriptors(volume: Volume) -> None:
    command = ["-f", *volume.unlock, *way(), str(volume.source), str(volume.point)]
    limited = ["/bin/sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", *ENCFSD, "mount", *command]
    mount = Mount(limited, volume.point, volume.log, lifetime=120.0, start=30.0)
    try:
        python(MANY_OPEN, volume.point)
        volume.encfsd("umount", volume.point)
        assert mount.wait() == 0
    finally:
        mount.release()
