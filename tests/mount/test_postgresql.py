"""PostgreSQL on a mount: initdb, pgbench, an immediate stop and a killed daemon, recovery.

PostgreSQL refuses to run as root, so root mounts with allow_other and it runs as another user.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Mount, Volume, run

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
OPTIONS = ("--free-list=64M", "-o", "allow_other")
SUM = "SELECT sum(abalance) FROM pgbench_accounts"
HISTORY = "SELECT coalesce(sum(delta), 0) FROM pgbench_history"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="switches users"),
    pytest.mark.timeout(600),
]


def _user() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


class Cluster:
    """A PostgreSQL cluster on a mount, reached through a socket outside of it."""

    def __init__(self, mount: Mount, sockets: Path) -> None:
        self.data = mount.point / "pg"
        self.sockets = sockets

    def tool(
        self, name: str, *arguments: str, timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs as its user."""
        command = ["setpriv", f"--reuid={_user()}", f"--regid={_user()}", "--clear-groups"]
        return run(
            [*command, _BINARIES[-1] / name, *arguments],
            timeout=timeout,
            check=check,
            cwd=Path("/"),
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": "/nonexistent"},
        )

    def create(self) -> None:
        """Make the cluster; every setting that matters for durability is the default."""
        run(["install", "-d", "-m", "700", "-o", _user(), self.data])
        self.tool("initdb", "-D", str(self.data), "-A", "trust", "--no-instructions")

    def start(self) -> None:
        """Start the server, which recovers if it must, and wait until it answers."""
        options = f"-c listen_addresses= -c unix_socket_directories={self.sockets}"
        log = self.sockets / "log"
        arguments = ("-w", "-t", "90", "-l", str(log), "-o", options, "start")
        self.tool("pg_ctl", "-D", str(self.data), *arguments)

    def stop(self, mode: str) -> None:
        """Stop the server; mode immediate leaves recovery to the next start."""
        self.tool("pg_ctl", "-D", str(self.data), "-w", "-m", mode, "stop")

    def query(self, sql: str) -> str:
        """Return the one value of a query."""
        done = self.tool("psql", "-h", str(self.sockets), "-d", "postgres", "-Atqc", sql)
        return done.stdout.strip()

    def bench(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run pgbench on the cluster."""
        return self.tool("pgbench", "-h", str(self.sockets), *arguments, "postgres", check=check)

    def check(self) -> None:
        """Demand that balances and history agree, in every index and with checksums of pages."""
        assert self.query(SUM) == self.query(HISTORY)
        self.query("CREATE EXTENSION IF NOT EXISTS amcheck")
        self.query(
            "SELECT bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam "
            "WHERE a.amname = 'btree' AND c.relkind = 'i'"
        )


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Return a folder for sockets and logs that PostgreSQL's user may write to."""
    folder = Path("/tmp") / f"pg-{os.getpid()}"  # short: it holds a socket
    folder.mkdir()
    shutil.chown(folder, _user())
    yield folder
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / ".s.PGSQL.5432.lock").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def volume() -> Iterator[Volume]:
    """Return a volume in a folder that PostgreSQL's user may pass through: not so pytest's own."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        Path(folder).chmod(0o755)
        fresh = Volume(Path(folder), key_file=True)
        fresh.init()
        yield fresh


def test_pgbench_immediate_stop_and_killed_daemon(volume: Volume, sockets: Path) -> None:
    """Balances and history agree after an immediate stop, and after kill -9 of the daemon."""
    with volume.mounted(*OPTIONS, lifetime=500) as mount:
        cluster = Cluster(mount, sockets)
        cluster.create()
        cluster.start()
        cluster.bench("-i", "-q", "-s", "1")
        cluster.bench("-n", "-c", "4", "-j", "2", "-T", "5")
        cluster.stop("immediate")
        cluster.start()
        cluster.check()
        cluster.stop("fast")

    committed = sockets / "committed"
    with volume.mounted(*OPTIONS, lifetime=500) as mount:
        cluster = Cluster(mount, sockets)
        cluster.start()
        cluster.check()
        with committed.open("w") as output:
            client = subprocess.Popen(
                [_BINARIES[-1] / "pgbench", "-h", sockets, "-U", _user(), "-n", "-c", "4",
                 "-T", "60", "-P", "1", "postgres"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            time.sleep(3)
            before = int(cluster.query("SELECT count(*) FROM pgbench_history"))
            server = _server(sockets)
            mount.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            client.wait(30)
        _end_server(sockets, server)

    with volume.mounted(*OPTIONS, lifetime=500) as mount:
        cluster = Cluster(mount, sockets)
        cluster.start()
        cluster.check()
        assert int(cluster.query("SELECT count(*) FROM pgbench_history")) >= before > 0
        cluster.stop("fast")
    volume.encfsd("verify", *volume.unlock, volume.source)


def _server(sockets: Path) -> int | None:
    """Return the process id of the server that is running."""
    lock = sockets / ".s.PGSQL.5432.lock"
    return int(lock.read_text().split()[0]) if lock.exists() else None


def _end_server(sockets: Path, pid: int | None) -> None:
    """Kill what is left of a server whose file system is gone, and its marks."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
    # Until init has reaped it the next server takes it for a running one, however it ended.
    deadline = time.monotonic() + 60
    while Path("/proc", str(pid)).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    lock = sockets / ".s.PGSQL.5432.lock"
    for leftover in (lock, sockets / ".s.PGSQL.5432"):
        leftover.unlink(missing_ok=True)
