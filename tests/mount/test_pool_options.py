"""What an operator can choose about the free list and the limits, on real mounts."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from encfsd import options
from encfsd.config import FREE_LIST
from encfsd.control import Client, Json
from encfsd.errors import Exit
from tests.mount.harness import ENCFSD, Mount, Volume, device_of, run, unprivileged

ROOT = os.geteuid() == 0
# Writes files of 4 MiB over and over, and checks what it reads back, until `stop` exists.
WRITER = """
import hashlib, os
rounds = 0
while not os.path.exists('stop') or rounds < 2:
    data = os.urandom(1 << 20) * 4
    with open(f'f{rounds % 2}', 'wb', 0) as file:
        file.write(data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(f'f{rounds % 2}', 'rb') as file:
        assert hashlib.sha256(file.read()).digest() == hashlib.sha256(data).digest()
    rounds += 1
    print(rounds, flush=True)
"""


def ask(volume: Volume, command: str, **arguments: str) -> Json:
    """Ask the daemon without a process for that; the mount itself is not touched."""
    with Client(str(volume.point)) as client:
        client.send(command, **arguments)
        answer = client.receive(60)
    assert answer is not None
    return answer


def counters(volume: Volume) -> Json:
    return ask(volume, "stats")


def use(volume: Volume) -> None:
    run(["touch", "stop"], cwd=volume.point)
    run([sys.executable, "-I", "-c", WRITER], cwd=volume.point)


# ---- options of mount ----


@pytest.mark.parametrize(
    ("strategy", "overflow"),
    [("pooling", "wait"), ("pooling-cow", "evict-only"), ("malloc", "malloc")],
)
def test_each_strategy_and_policy_serves(volume: Volume, strategy: str, overflow: str) -> None:
    chosen = [f"--pool-strategy={strategy}", f"--free-list-overflow={overflow}"]
    with volume.mounted("--free-list=3M", *chosen):
        use(volume)
        pool = counters(volume)["pool"]
        assert (pool["strategy"], pool["overflow"]) == (strategy, overflow)
        assert pool["capacity_bytes"] <= 3 << 20 < pool["max_bytes"]
        if overflow != "malloc":
            assert pool["high_water"] <= pool["capacity"]
            assert pool["data"]["misses"] + pool["tree"]["misses"] == 0
        table = volume.encfsd("stats", volume.point).stdout
        assert f"  strategy         {strategy}; when it is full: {overflow}\n" in table
        assert max(map(len, table.splitlines())) <= 80
    volume.encfsd("verify", *volume.unlock, volume.source)


def test_what_a_strategy_cannot_do_is_logged_once(volume: Volume) -> None:
    wanted = ["--pool-strategy=malloc", "--free-list-prefault", "--free-list-hugepages"]
    with volume.mounted("--free-list=8M", *wanted):
        counters(volume)
    lines = [line for line in volume.log.read_text().splitlines() if "free list: " in line]
    assert len([line for line in lines if "malloc" in line]) == 1, lines


def test_a_prefaulted_list_is_in_memory_when_the_mount_is_ready(volume: Volume) -> None:
    with volume.mounted(
        "--free-list=96M", "--free-list-prefault", "--free-list-hugepages"
    ) as mount:
        status = Path(f"/proc/{mount.pid}/status").read_text()
        resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])
        assert resident > 96 << 10


def test_prefaulting_shows_progress_on_a_terminal(volume: Volume) -> None:
    ours, theirs = pty.openpty()
    options = ["--free-list=64M", "--free-list-prefault", f"--log-file={volume.log}"]
    command = [*ENCFSD, "mount", *volume.unlock, *options, str(volume.source), str(volume.point)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert process.wait(60) == 0
        shown = read_some(ours)
        assert shown.endswith("\r\x1b[K"), shown  # what was drawn is wiped
    finally:
        os.close(ours)
        volume.encfsd("umount", volume.point, check=False)
    assert device_of(volume.point) is None


def test_prefaulting_reports_how_much_is_done(volume: Volume) -> None:
    code = """
import sys
from pathlib import Path
from encfsd import secrets_input, volume
from encfsd.options import FreeListSettings, VolumeSettings
from encfsd.source import Source
volume.setup_crypto('openssl')
steps = []
secret = secrets_input.from_key_file(sys.argv[2])
settings = VolumeSettings(sys.argv[1], Path(sys.argv[3]))
with secret, Source(settings.source) as source:
    source.lock(read_only=False)
    free_list = FreeListSettings(size=32 << 20, prefault=True)
    opened = volume.open_to_serve(source, settings, secret, read_only=False, free_list=free_list,
                                  progress=lambda *step: steps.append(step))
    size = opened.stats().pool.capacity_bytes
    opened.close()
assert len(steps) > 1 and steps == sorted(steps), steps
assert {total for _, total in steps} == {size} and steps[-1] == (size, size), (steps, size)
"""
    key = volume.state_dir.parent / "key"
    run([sys.executable, "-c", code, volume.source, key, volume.state_dir])


@contextmanager
def little_locked_memory(volume: Volume) -> Iterator[None]:
    """Run commands of this volume with a limit of 1 MiB, and without the right to exceed it."""
    before = volume._encfsd
    lose = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"] if ROOT else []
    volume._encfsd = ("prlimit", f"--memlock={1 << 20}", *lose, *before)
    try:
        yield
    finally:
        volume._encfsd = before


def test_a_list_that_cannot_be_locked_names_the_limit(volume: Volume) -> None:
    command = ["mount", *volume.unlock, "--free-list=64M", "--free-list-lock"]
    with little_locked_memory(volume):
        result = volume.encfsd(*command, volume.source, volume.point, check=False)
        assert result.returncode == Exit.MEMORY_NOT_LOCKED, result.stderr
        assert device_of(volume.point) is None
        for part in ("RLIMIT_MEMLOCK allows 1.0 MiB", "takes 64.0 MiB", "ulimit -l"):
            assert part in result.stderr
        for part in ("LimitMEMLOCK=", "CAP_IPC_LOCK"):
            assert part in result.stderr
        with volume.mounted("--free-list=4M"):
            run(["touch", "a"], cwd=volume.point)


@pytest.mark.skipif(not ROOT, reason="needs CAP_IPC_LOCK")
def test_a_locked_list_stays_in_memory_and_grows_locked(volume: Volume) -> None:
    with volume.mounted("--free-list=16M", "--free-list-lock") as mount:
        assert 15 << 10 < locked_kib(mount) < 24 << 10
        volume.encfsd("tune", volume.point, "free-list=32M")
        assert 31 << 10 < locked_kib(mount) < 40 << 10
    malloc = ["--free-list-lock", "--pool-strategy=malloc"]
    refused = volume.encfsd("mount", *malloc, volume.source, volume.point, check=False)
    assert refused.returncode == Exit.USAGE
    assert "not with --pool-strategy=malloc" in refused.stderr


def locked_kib(mount: Mount) -> int:
    status = Path(f"/proc/{mount.pid}/status").read_text()
    return int(re.findall(r"VmLck:\s+(\d+) kB", status)[0])


# ---- tune ----


def test_tuning_under_load(volume: Volume) -> None:
    with volume.mounted("--free-list=16M", "--free-list-overflow=wait"):
        command = [sys.executable, "-I", "-c", WRITER]
        enter = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', str(volume.point)]
        writer = subprocess.Popen([*enter, *command], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        try:
            sizes = {"64M": "grown", "3M": "shrunk", "32M": "grown", "8M": "shrunk"}
            for size, how in sizes.items():
                assert writer.stdout.readline()
                told = ask(volume, "tune", **{"free-list": size})["message"]
                assert re.fullmatch(rf"free list {how} from \S+ MiB to \S+ MiB(; .*)?", told), told
                assert counters(volume)["pool"]["capacity_bytes"] <= options.parse_size(size, 0)
            run(["touch", "stop"], cwd=volume.point)
            writer.communicate(timeout=60)
            assert writer.returncode == 0
        finally:
            writer.kill()
            writer.wait()
        volume.encfsd("tune", volume.point, "free-list=4M")
        deadline = time.monotonic() + 60
        while counters(volume)["pool"]["draining"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = counters(volume)["limits"][FREE_LIST]
        assert found["origin"] == "encfsd tune" and 3 << 20 < int(found["value"]) <= 4 << 20
        again = volume.encfsd("tune", volume.point, "free-list=4M").stdout
        assert again == "free list: 4.0 MiB as before\n"
    assert volume.log.read_text().count("free list shrunk") == 3
    volume.encfsd("verify", *volume.unlock, volume.source)


def test_unmounting_waits_for_tuning_or_refuses_it(volume: Volume) -> None:
    with volume.mounted("--free-list=8M", "--free-list-prefault"):
        run(["touch", "a"], cwd=volume.point)
        with Client(str(volume.point)) as client:
            client.send("tune", **{"free-list": "512M"})
            volume.encfsd("umount", volume.point)
            answer = client.receive(60)
    assert answer is not None
    if "error" not in answer:
        assert answer["exit_code"] == 0
        assert "grown from 8.0 MiB to 512 MiB" in volume.log.read_text()


def test_sizes_that_are_refused_say_why(volume: Volume) -> None:
    config = volume.state_dir.parent / "limits.toml"
    config.touch(mode=0o600)
    config.write_text('[rlimit]\nAS = "8G"\n')  # of which half is reserved
    with volume.mounted("--free-list=8M", f"--config={config}"):

        def refused(size: str) -> tuple[int, str]:
            answer = ask(volume, "tune", **{"free-list": size})
            return answer["exit_code"], answer["message"]

        before = counters(volume)["pool"]["capacity"]
        code, message = refused("100T")
        assert code == Exit.FREE_LIST_TOO_LARGE
        assert "is all this process may use" in message
        if options.memory_limit() > 5 << 30:
            code, message = refused("4.1G")
            assert code == Exit.FREE_LIST_TOO_LARGE
            assert "address space was reserved at mount for 4.0 GiB" in message
        assert refused("lots")[0] == Exit.USAGE
        result = volume.encfsd("tune", volume.point, "free-list=1M", check=False)
        assert result.returncode == Exit.USAGE
        assert "less than the reserve that commits need" in result.stderr
        assert counters(volume)["pool"]["capacity"] == before
        least = re.findall(r"; (\d+K) is the least", result.stderr)[0]
        assert ask(volume, "tune", **{"free-list": least})["exit_code"] == 0
        reserve = counters(volume)["pool"]["capacity"]
        assert ask(volume, "tune", **{"free-list": "8M"})["exit_code"] == 0
        assert ask(volume, "tune", **{"free-list": "0"})["exit_code"] == 0
        assert counters(volume)["pool"]["capacity"] == reserve
        run(["touch", "a"], cwd=volume.point)
    command = ["mount", *volume.unlock, "--free-list=1M", str(volume.source), str(volume.point)]
    small = volume.encfsd(*command, check=False)
    assert small.returncode == Exit.USAGE
    assert "--free-list=1M: not valid (less than the reserve that commits need)" in small.stderr
    least = re.findall(r"; (\d+K) is the least", small.stderr)[0]
    with volume.mounted(f"--free-list={least}"):
        pass
    gone = volume.encfsd("tune", volume.point, "free-list=8M", check=False)
    assert gone.returncode == Exit.NOT_MOUNTED


@pytest.mark.skipif(not ROOT, reason="needs another user")
def test_only_who_mounted_and_root_may_tune(volume: Volume, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    user = unprivileged(home)
    if user is None:
        pytest.skip("no Python in reach of an ordinary user")
    become, python = user
    with volume.mounted("--free-list=8M", "-o", "allow_other"):
        command = [*become, python, "-m", "encfsd.cli", "tune", str(volume.point), "free-list=16M"]
        result = run(command, cwd=home, check=False)
        assert result.returncode == Exit.NO_PERMISSION, result.stderr
        assert "belongs to another user" in result.stderr
        assert counters(volume)["pool"]["capacity_bytes"] <= 8 << 20


# ---- top ----


def read_some(terminal: int, until: str = "", seconds: float = 30.0) -> str:
    """Return what a terminal shows, until that contains `until` or nobody writes any more."""
    shown = b""
    deadline = time.monotonic() + seconds
    while not until or until not in shown.decode(errors="replace"):
        if not select.select([terminal], [], [], deadline - time.monotonic())[0]:
            raise AssertionError(f"no {until!r} in {shown!r}")
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # nobody has it open any more
            break
    return shown.decode()


def test_top_without_a_terminal_and_without_a_mount(volume: Volume) -> None:
    with volume.mounted("--free-list=8M"):
        command = [*ENCFSD, "top", "--interval=0.2", str(volume.point)]
        top = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert top.stdout is not None
        form = (
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d +\S+ +\S+ [KM]?i?B +\S+ [KM]?i?B +\d+% +\S+"
            r" +\S+ [KM]?i?B +\d+\n"
        )
        assert top.stdout.readline().startswith("time ")
        for _ in range(2):
            assert re.fullmatch(form, top.stdout.readline())
    _, message = top.communicate(timeout=30)
    assert top.returncode == Exit.NOT_MOUNTED
    assert message.startswith(f"encfsd: {volume.point}: ") and len(message.splitlines()) == 1


def test_top_is_ended_by_an_interrupt(volume: Volume) -> None:
    with volume.mounted("--free-list=8M"):
        command = [*ENCFSD, "top", "--interval=0.2", str(volume.point)]
        top = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert top.stdout is not None and top.stdout.readline()
        top.send_signal(signal.SIGINT)
        top.communicate(timeout=30)
        assert top.returncode == 0
        refused = volume.encfsd("top", "--interval=0", volume.point, check=False)
        assert refused.returncode == Exit.USAGE


@pytest.mark.parametrize("end", ["q", "\x03", "crash"], ids=["q", "interrupt", "crash"])
def test_top_on_a_terminal_gives_it_back(volume: Volume, end: str) -> None:
    with volume.mounted("--free-list=8M") as mount:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        before = termios.tcgetattr(theirs)
        top = subprocess.Popen(
            ["setsid", "--ctty", *ENCFSD, "top", "--interval=0.2", str(volume.point)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
        )
        shown = read_some(ours, "throughput")
        assert shown.startswith("\x1b[?1049h\x1b[?25l")
        run(["touch", "a"], cwd=volume.point)
        read_some(ours, "requests")
        if end == "crash":
            mount.process.kill()
        else:
            os.write(ours, end.encode())
        top.wait(30)
        assert termios.tcgetattr(theirs) == before
        os.close(theirs)
        rest = read_some(ours)
        os.close(ours)
        screen, left, message = rest.rpartition("\x1b[?25h\x1b[?1049l")
        assert left and all(len(line) < 200 for line in screen.splitlines())
        if end == "crash":
            assert top.returncode == Exit.NOT_MOUNTED
            assert "its daemon is gone" in message
            mount.kill()
        else:
            assert (top.returncode, message) == (0, "")


# ---- limits ----


def test_limits_and_where_they_come_from(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FREE_LIST, "12M")
    config = volume.state_dir.parent / "limits.toml"
    config.touch(mode=0o600)
    config.write_text(
        '[rlimit]\nNOFILE = "1000:1100"\nMEMLOCK = { value = "2M" }\n'
        "CORE = { passthrough = true }\n"
        f"{FREE_LIST} = {{ passthrough = true }}\n"
    )
    chosen = f"--config={config}"
    planned = volume.encfsd("info", chosen, volume.source).stdout
    assert re.search(rf"^  NOFILE +1000:1100 +{config}$", planned, re.MULTILINE), planned
    with volume.mounted(chosen) as mount:
        limits = counters(volume)["limits"]
        assert limits["NOFILE"] == {"value": "1000:1100", "origin": str(config)}
        assert limits["MEMLOCK"] == {"value": str(2 << 20), "origin": str(config)}
        assert limits["CORE"]["origin"] == "inherited"
        assert limits[FREE_LIST]["origin"] == "environment"
        assert 11 << 20 < int(limits[FREE_LIST]["value"]) <= 12 << 20
        kernel = Path(f"/proc/{mount.pid}/limits").read_text()
        assert re.search(r"^Max open files +1000 +1100 ", kernel, re.MULTILINE)
        shown = volume.encfsd("info", volume.source).stdout
        assert f"limits of the mount at {volume.point}:" in shown
        assert re.search(rf"^  {FREE_LIST} +12\.0 MiB +environment$", shown, re.MULTILINE), shown
    with volume.mounted(chosen, "--free-list=8M"):
        found = counters(volume)["limits"][FREE_LIST]
        assert found["origin"] == "command line" and int(found["value"]) <= 8 << 20
    with volume.mounted():
        limits = counters(volume)["limits"]
        assert limits[FREE_LIST]["origin"] == limits["NOFILE"]["origin"] == "default"
        assert limits["CORE"] == {"value": "0", "origin": "default"}


def test_a_bad_configuration_is_refused_before_the_secret(volume: Volume) -> None:
    config = volume.state_dir.parent / "limits.toml"
    config.write_text('[rlimit]\nNOFILES = "1"\n')
    config.chmod(0o600)
    command = ["mount", f"--config={config}", str(volume.source), str(volume.point)]
    result = volume.encfsd(*command, check=False)
    assert result.returncode == Exit.USAGE
    assert f"{config}: not usable as configuration ([rlimit] NOFILES: unknown" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = volume.encfsd("info", f"--config={config}", volume.source, check=False)
    assert result.returncode == Exit.USAGE and "volume id" in result.stdout
    assert device_of(volume.point) is None
