"""The life of a mount: start, use, the ways to end it, and what is left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from encfsd.errors import Exit
from tests.mount import harness
from tests.mount.harness import ENCFSD, NOBODY, Mount, Volume, device_of, run, unprivileged, way

ROOT = os.geteuid() == 0


def python(code: str, cwd: Path) -> str:
    """Run Python on a mount, in a process that can be killed."""
    return run([sys.executable, "-I", "-c", code], cwd=cwd).stdout


def mount_entry(point: Path) -> tuple[str, str, str, str]:
    """Return options, type, source and super options of the mount at `point`."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == str(point).replace(" ", "\\040"):
            kind, source, options = right.split(" ")
            return left.split()[5], kind, source, options
    raise AssertionError(f"nothing is mounted at {point}")


RAISED = {"read_ahead_kb": "1024", "strict_limit": "0", "max_ratio": "20"}


def bdi(point: Path) -> dict[str, str]:
    """Return the kernel's limits of a mount that matter."""
    folder = Path("/sys/class/bdi", device_of(point) or "")
    return {name: (folder / name).read_text().strip() for name in RAISED}


def digest(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- start ----


def test_it_shows_as_what_it_is_and_keeps_what_is_written(volume: Volume) -> None:
    with volume.mounted("-o", "noatime"):
        options, kind, source, super_options = mount_entry(volume.point)
        assert kind == "fuse.encfsd"
        assert source == str(volume.source)
        assert {"rw", "nosuid", "nodev", "noatime"} <= set(options.split(","))
        largest = 1 << 20 if harness.fast_path else 128 << 10
        assert {"default_permissions", f"max_read={largest}"} <= set(super_options.split(","))
        assert "allow_other" not in super_options
        if ROOT:
            python("open('a', 'w')", volume.point)
            assert bdi(volume.point) == RAISED
        python("open('a', 'w').write('kept'); import os; os.mkdir('d')", volume.point)
    assert not list(volume.point.iterdir())
    with volume.mounted():
        assert python("print(open('a').read(), __import__('os').listdir('d'))", volume.point) == (
            "kept []\n"
        )
    assert b"kept" not in b"".join(data for data, _ in digest(volume.source).values())


def test_names_with_commas_and_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a, b=c"
    folder.mkdir()
    volume = Volume(folder)
    volume.init()
    with volume.mounted():
        assert mount_entry(volume.point)[2] == str(volume.source).replace(" ", "\\040")
        python("open('x', 'w')", volume.point)


def test_read_only_writes_nothing_at_all(volume: Volume) -> None:
    with volume.mounted():
        python("open('a', 'w').write('old')", volume.point)
    before = digest(volume.source), digest(volume.state_dir)
    with volume.mounted("-o", "ro"):
        assert python("print(open('a').read())", volume.point) == "old\n"
        failed = run(["touch", "b"], cwd=volume.point, check=False)
        assert "Read-only file system" in failed.stderr
    assert (digest(volume.source), digest(volume.state_dir)) == before


def test_mount_returns_when_usable_and_umount_when_the_daemon_is_gone(volume: Volume) -> None:
    log = volume.log
    volume.encfsd(
        "mount",
        *volume.unlock,
        *way(),
        f"--log-file={log}",
        volume.source,
        volume.point,
        timeout=60,
    )
    try:
        python("open('a', 'w').write('x' * 100000)", volume.point)
        counters = json.loads(volume.encfsd("stats", "--json", volume.point).stdout)
        assert counters["requests"] > 0
        assert counters["pool"]["capacity"] > 0
        table = volume.encfsd("stats", volume.point).stdout
        assert max(map(len, table.splitlines())) <= 80
        assert re.search(r"^ +misses, live +0 +0$", table, re.MULTILINE)
        created = counters["opcodes"]["CREATE"]
        assert (created["native"], created["forwarded"]) == (
            (1, 0) if harness.fast_path else (0, 1)
        )
        assert created["failed"] == 0
        assert re.search(r"^  CREATE +[01] +[01] +0( +\d+(\.\d)? [mu]?s){4}$", table, re.MULTILINE)
    finally:
        done = volume.encfsd("umount", volume.point, check=False)
        if device_of(volume.point) is not None:
            run(["umount", "-l", volume.point], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pattern = f"{volume.source} {volume.point}"
    assert run(["pgrep", "-f", pattern], check=False).stdout == ""
    ended = r"everything is durable; (\d+) requests answered natively, \d+ forwarded; free list: "
    found = re.search(ended, log.read_text())
    assert found is not None
    assert (int(found[1]) > 0) == harness.fast_path
    assert str(volume.point) not in log.read_text()


@pytest.mark.parametrize("foreground", [True, False], ids=["foreground", "background"])
def test_a_failed_start_has_its_code_and_leaves_no_mount(
    passphrase_volume: Volume, foreground: bool
) -> None:
    volume = passphrase_volume
    volume.passphrase_file.write_text("wrong\n")
    how = ["-f"] if foreground else []
    result = volume.encfsd("mount", *how, *volume.unlock, volume.source, volume.point, check=False)
    assert result.returncode == Exit.UNLOCK_FAILED
    assert result.stderr.count("cannot be unlocked") == 1
    assert device_of(volume.point) is None


def test_a_volume_that_lost_its_objects_is_refused(volume: Volume) -> None:
    with volume.mounted():
        (volume.point / "file").write_bytes(bytes(5000))
    shutil.rmtree(volume.source / "objects")
    before = digest(volume.source)
    for command in (["mount"], ["mount", "-o", "ro"], ["verify"]):
        places = [volume.source, volume.point][: 1 if command == ["verify"] else 2]
        refused = volume.encfsd(*command, *volume.unlock, *places, check=False)
        assert refused.returncode == Exit.BACKING_GONE
        assert 'a part of it is missing (the directory "objects", which holds' in refused.stderr
        assert device_of(volume.point) is None
    assert digest(volume.source) == before


def test_the_log_tells_warnings_of_the_data_plane_from_news(volume: Volume) -> None:
    log = volume.log.with_name("log")
    (volume.source / "ballast").unlink(missing_ok=True)
    (volume.source / "ballast").mkdir()
    with volume.mounted(f"--log-file={log}"):
        pass
    lines = log.read_text().splitlines()
    assert [line for line in lines if ' WARNING the file "ballast" in the source' in line]
    assert [line for line in lines if " INFO mounted: " in line]


def test_bad_mount_points_are_refused_before_the_passphrase(volume: Volume, tmp_path: Path) -> None:
    state = volume.unlock[1]
    missing = tmp_path / "missing"
    codes = {
        missing: Exit.MOUNT_POINT_MISSING,
        volume.passphrase_file: Exit.MOUNT_POINT_MISSING,
        tmp_path: Exit.MOUNT_POINT_NOT_EMPTY,
        Path("/proc"): Exit.ALREADY_MOUNTED,
    }
    for point, code in codes.items():
        result = volume.encfsd("mount", state, volume.source, point, check=False)
        assert result.returncode == code, result.stderr
    file = volume.encfsd("mount", state, volume.source, volume.passphrase_file, check=False)
    assert "mount point is not a directory; choose an empty directory" in file.stderr
    assert f"mkdir -p {missing}" in (
        volume.encfsd("mount", state, volume.source, missing, check=False).stderr
    )


def test_a_second_mount_is_refused(volume: Volume, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with volume.mounted():
        command = ["mount", "-f", *volume.unlock]
        result = volume.encfsd(*command, volume.source, other, check=False)
        assert result.returncode == Exit.VOLUME_IN_USE, result.stderr
        again = volume.encfsd("mount", *volume.unlock, volume.source, volume.point, check=False)
        assert again.returncode == Exit.ALREADY_MOUNTED
        assert "in use             yes" in volume.encfsd("info", volume.source).stdout


def test_a_mount_waits_for_one_that_is_ending(volume: Volume) -> None:
    with volume.mounted() as first:
        python("open('a', 'wb').write(bytes(8 << 20))", volume.point)
        run(["umount", volume.point])  # the daemon is still committing
        with volume.mounted():
            assert python("print(len(open('a', 'rb').read()))", volume.point) == f"{8 << 20}\n"
        assert first.process.wait(30) == 0


# ---- use ----


def test_truncating_opens(volume: Volume) -> None:
    code = """
import os
for i, text in enumerate(('a long first text', 'short', '')):
    with open('f', 'w') as file:
        assert os.fstat(file.fileno()).st_size == 0
        file.write(text)
    assert open('f').read() == text
fd = os.open('f', os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
assert os.fstat(fd).st_size == 0
"""
    with volume.mounted():
        python(code, volume.point)
        python(code, volume.point)


def test_attributes(volume: Volume) -> None:
    code = """
import os, stat
open('f', 'w').write('x')
for ns in (-1, 0, 123456789, -86400_000_000_000 * 365 * 20 + 7, 2**62):
    os.utime('f', ns=(ns, ns + 1))
    found = os.stat('f')
    assert (found.st_atime_ns, found.st_mtime_ns) == (ns, ns + 1), (ns, found)
os.umask(0o027)
os.close(os.open('masked', os.O_CREAT | os.O_WRONLY, 0o666))
assert stat.S_IMODE(os.stat('masked').st_mode) == 0o640
os.mkdir('d', 0o777)
assert stat.S_IMODE(os.stat('d').st_mode) == 0o750
os.mknod('n', stat.S_IFCHR | 0o600, os.makedev(5, 300))
assert os.stat('n').st_rdev == os.makedev(5, 300)
os.symlink('to/where', 'l')
assert os.readlink('l') == 'to/where'
os.link('f', 'd/g')
assert os.stat('f').st_nlink == 2 and os.stat('f').st_ino == os.stat('d/g').st_ino
os.truncate('f', 1 << 40)
assert os.stat('f').st_size == 1 << 40
os.chown('f', 1, 2)
assert (os.stat('f').st_uid, os.stat('f').st_gid) == (1, 2)
"""
    if not ROOT:
        pytest.skip("device nodes and chown need root")
    with volume.mounted():
        python(code, volume.point)


def test_extended_attributes(volume: Volume) -> None:
    code = """
import errno, os
open('f', 'w')
os.setxattr('f', 'user.a', bytes(range(256)), os.XATTR_CREATE)
os.setxattr('f', 'user.b', b'')
assert os.getxattr('f', 'user.a') == bytes(range(256))
assert os.getxattr('f', 'user.b') == b''
assert sorted(os.listxattr('f')) == ['user.a', 'user.b']
for name, flag, code in (('user.a', os.XATTR_CREATE, errno.EEXIST),
                         ('user.c', os.XATTR_REPLACE, errno.ENODATA)):
    try:
        os.setxattr('f', name, b'x', flag)
    except OSError as error:
        assert error.errno == code, error
    else:
        raise AssertionError(name)
os.removexattr('f', 'user.a')
assert os.listxattr('f') == ['user.b']
"""
    with volume.mounted():
        python(code, volume.point)


def test_large_directory(volume: Volume) -> None:
    code = """
import os
names = {('n%d-' % i) + 'x' * (i % 240) for i in range(3000)}
os.mkdir('d')
for name in names:
    os.close(os.open('d/' + name, os.O_CREAT | os.O_WRONLY))
assert set(os.listdir('d')) == names and len(os.listdir('d')) == 3000
seen = []
for entry in os.scandir('d'):          # removing while reading
    seen.append(entry.name)
    os.unlink(entry.path)
assert sorted(seen) == sorted(names)
os.rmdir('d')
try:
    os.stat('d')
except FileNotFoundError:
    pass
os.mkdir('d')                          # the kernel remembered that it was gone
assert os.listdir('d') == []
"""
    with volume.mounted():
        python(code, volume.point)


def test_direct_and_mapped_io(volume: Volume) -> None:
    code = """
import mmap, os
data = os.urandom(5 << 20)
fd = os.open('f', os.O_RDWR | os.O_CREAT)
assert os.write(fd, data) == len(data)
os.fsync(fd)
direct = os.open('f', os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 4 << 20)
assert os.preadv(direct, [buffer], 1 << 20) == 4 << 20
assert buffer[:] == data[1 << 20:]
shared = mmap.mmap(fd, 0)
shared[12345:12350] = b'patch'
shared.flush()
assert os.pread(fd, 5, 12345) == b'patch'
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
assert os.pread(fd, 5, 12345) == b'patch'
assert os.pread(fd, 100, len(data) - 10) == data[-10:]
"""
    with volume.mounted():
        python(code, volume.point)


# ---- end ----


def test_signals_unmount(volume: Volume) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with volume.mounted() as mount:
            python(f"open('f{number}', 'w').write('x')", volume.point)
            mount.process.send_signal(number)
            assert mount.wait(30) == 0, mount.log.read_text()
            assert device_of(volume.point) is None
    with volume.mounted():
        assert python("print(len(__import__('os').listdir()))", volume.point) == "2\n"


@pytest.fixture
def holder(volume: Volume) -> Iterator[tuple[Mount, "subprocess.Popen[bytes]"]]:
    """Return a mount, and a process that keeps a dirty file on it open."""
    code = "f = open('held', 'w'); f.write('dirty'); f.flush(); print(flush=True); input()"
    with volume.mounted() as mount:
        process = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                'cd "$0" && exec "$1" -I -c "$2"',
                volume.point,
                sys.executable,
                code,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"\n"
        yield mount, process
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def test_umount_leaves_a_busy_mount_alone(
    volume: Volume, holder: tuple[Mount, "subprocess.Popen[bytes]"]
) -> None:
    result = volume.encfsd("umount", volume.point, check=False)
    assert result.returncode == Exit.VOLUME_IN_USE
    assert "open" in result.stderr
    assert python("print(open('held').read())", volume.point) == "dirty\n"
    holder[1].kill()
    holder[1].wait(30)
    volume.umount(holder[0])


def test_a_signal_cuts_off_open_files_but_loses_nothing(
    volume: Volume, holder: tuple[Mount, "subprocess.Popen[bytes]"]
) -> None:
    mount, _ = holder
    mount.process.send_signal(signal.SIGTERM)
    assert mount.wait(60) == 0, mount.log.read_text()
    with volume.mounted():
        assert python("print(open('held').read())", volume.point) == "dirty\n"


def test_a_crash_leaves_a_dead_mount_that_the_next_mount_clears(volume: Volume) -> None:
    with volume.mounted() as mount:
        python("import os; f = open('f', 'w'); f.write('x'); f.flush(); os.fsync(f)", volume.point)
        mount.process.kill()
        mount.process.wait(30)
        assert "not connected" in run(["ls", volume.point], check=False).stderr
        gone = volume.encfsd("stats", volume.point, check=False)
        assert gone.returncode == Exit.NOT_MOUNTED
        log = f"--log-file={volume.log}"
        cleared = volume.encfsd("mount", *volume.unlock, *way(), log, volume.source, volume.point)
        try:
            assert "clearing a dead mount" in cleared.stderr
            assert python("print(open('f').read())", volume.point) == "x\n"
        finally:
            volume.encfsd("umount", volume.point)


def test_umount_clears_a_dead_mount(volume: Volume) -> None:
    with volume.mounted() as mount:
        mount.process.kill()
        mount.process.wait(30)
        volume.encfsd("umount", volume.point)
        assert device_of(volume.point) is None
        result = volume.encfsd("umount", volume.point, check=False)
        assert result.returncode == Exit.NOT_MOUNTED


@pytest.mark.skipif(not ROOT, reason="aborting a connection needs root")
def test_an_aborted_connection_ends_the_daemon_in_order(volume: Volume, tmp_path: Path) -> None:
    connections = tmp_path / "connections"
    connections.mkdir()
    with volume.mounted() as mount:
        python("import os; f = open('f', 'w'); f.write('x'); f.flush(); os.fsync(f)", volume.point)
        device = device_of(volume.point)
        assert device is not None
        run(["mount", "-t", "fusectl", "fusectl", connections])
        try:
            (connections / device.partition(":")[2] / "abort").write_text("1")
        finally:
            run(["umount", connections])
        assert mount.wait(30) == 0, mount.log.read_text()
    with volume.mounted():
        assert python("print(open('f').read())", volume.point) == "x\n"


# ---- around it ----


def test_a_mount_mends_the_header(volume: Volume) -> None:
    copies = [volume.source / name for name in ("volume.header", "volume.header.bak")]
    good = copies[0].read_bytes()
    copies[0].unlink()
    with volume.mounted("-o", "ro"):
        assert not copies[0].exists()
    with volume.mounted() as mount:
        assert [copy.read_bytes() for copy in copies] == [good, good]
        assert "mending the volume header" in mount.log.read_text()
        python("open('f', 'w')", volume.point)


def test_damage_is_found_by_its_path_and_never_read(volume: Volume) -> None:
    with volume.mounted():
        code = "for name in ('a\\nb', 'other'): open(name, 'wb').write(b'x' * 200000)"
        python(code, volume.point)
    assert volume.encfsd("verify", *volume.unlock, volume.source).stdout.endswith(": sound\n")
    victim = max((volume.source / "objects").rglob("*"), key=lambda path: path.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[4 * 4096 + 100] ^= 1  # the first slot behind the roots
    victim.write_bytes(raw)
    result = volume.encfsd("verify", *volume.unlock, volume.source, check=False)
    assert result.returncode == Exit.DAMAGED_CONTENTS
    damaged = [line for line in result.stdout.splitlines() if line.startswith("damaged: ")]
    assert len(damaged) == 1
    assert re.fullmatch(r"damaged: /(a\\nb|other): 4096 bytes from \d+", damaged[0])
    with volume.mounted():
        code = """
import errno
seen = []
for name in ('a\\nb', 'other'):
    try:
        seen.append(open(name, 'rb').read() == b'x' * 200000)
    except OSError as error:
        seen.append(errno.errorcode[error.errno])
print(sorted(map(str, seen)))
"""
        assert python(code, volume.point) == "['EIO', 'True']\n"
        assert python(code, volume.point) == "['EIO', 'True']\n"
        counters = json.loads(volume.encfsd("stats", "--json", volume.point).stdout)
        assert counters["damaged_reads"] >= 2
    told = [line for line in volume.log.read_text().splitlines() if "DAMAGED: inode" in line]
    assert len(told) == 1
    assert "encfsd verify" in told[0]


def test_the_service_manager_is_told(
    volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        with volume.mounted() as mount:
            told: list[bytes] = []
            while not told or b"READY=1" not in told[-1]:
                told.append(manager.recv(4096))
            assert told[0] == b"STATUS=Unlocking the volume"
            assert any(message.startswith(b"EXTEND_TIMEOUT_USEC=") for message in told)
            while manager.recv(4096) != b"WATCHDOG=1":
                pass
            # Read while it happens: a queue that is full takes no more.
            command = [*ENCFSD, "umount", str(volume.point)]
            with subprocess.Popen(command, start_new_session=True) as umount:
                while not manager.recv(4096).startswith(b"STOPPING=1"):
                    pass
            assert (umount.returncode, mount.wait()) == (0, 0)


@pytest.mark.skipif(not ROOT, reason="becomes another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_an_ordinary_user_mounts_through_the_helper() -> None:
    device = Path("/dev/fuse")
    mode = device.stat().st_mode
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        home = Path(folder)
        user = unprivileged(home)
        if user is None:
            pytest.skip("no Python that an ordinary user may run")
        prefix = [*user[0], user[1]]
        (home / "mnt").mkdir()
        (home / "key").touch(mode=0o600)
        (home / "key").write_bytes(b"\xff" * 64)
        for path in home.iterdir():
            os.chown(path, NOBODY, NOBODY)
        unlock = [f"--key-file={home}/key", f"--state-dir={home}/state"]
        encfsd = [*prefix, "-m", "encfsd.cli"]
        device.chmod(0o666)  # as udev makes it
        try:
            run([*encfsd, "init", *unlock, home / "src"], cwd=home)
            unlock.append(f"--log-file={home}/log")
            run([*encfsd, "mount", *unlock, *way(), home / "src", home / "mnt"], cwd=home)
            told = re.search(r"not permitted .* as root: (.*)", (home / "log").read_text())
            assert told is not None
            run(["/bin/sh", "-c", told[1]])
            assert bdi(home / "mnt") == RAISED
            assert mount_entry(home / "mnt")[3].startswith(f"rw,user_id={NOBODY},")
            run([*prefix, "-c", f"open('{home}/mnt/f', 'wb').write(bytes(3 << 20))"])
            foreign = run(["cat", home / "mnt" / "f"], check=False)
            assert "Permission denied" in foreign.stderr  # not even root, without allow_other
            counters = run([*encfsd, "stats", "--json", home / "mnt"], cwd=home).stdout
            assert json.loads(counters)["requests"] > 0
            # Root too, though only that user knows its XDG_RUNTIME_DIR.
            counters = run([*ENCFSD, "stats", "--json", home / "mnt"]).stdout
            assert json.loads(counters)["requests"] > 0
            assert "8.0 MiB" in run([*ENCFSD, "tune", home / "mnt", "free-list=8M"]).stdout
            run([*encfsd, "umount", home / "mnt"], cwd=home)
            assert device_of(home / "mnt") is None
            run([*encfsd, "mount", *unlock, *way(), home / "src", home / "mnt"], cwd=home)
            run([*ENCFSD, "umount", home / "mnt"])
            assert device_of(home / "mnt") is None
            assert (home / "log").read_text().count("everything is durable") == 2
        finally:
            if device_of(home / "mnt") is not None:
                run(["umount", "-l", home / "mnt"], check=False)
            device.chmod(mode)


def test_secrets_are_not_in_reach_of_other_processes(passphrase_volume: Volume) -> None:
    volume = passphrase_volume
    with volume.mounted() as mount:
        limits = Path(f"/proc/{mount.pid}/limits").read_text()
        assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
        # The files of a process that is not dumpable belong to root, whoever runs it.
        environment = Path(f"/proc/{mount.pid}/environ").read_bytes() if ROOT else b""
        assert b"passphrase" not in environment
        command = Path(f"/proc/{mount.pid}/cmdline").read_bytes()
        assert b"battery staple" not in command
