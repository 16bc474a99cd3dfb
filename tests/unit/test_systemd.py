"""The service manager's side of the notify socket, and the unit file."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from encfsd.systemd import Notifier

UNIT = Path(__file__).parents[2] / "systemd" / "encfsd@.service"


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """Return what NOTIFY_SOCKET would be, and the socket behind it."""
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        if request.param == "path":
            server.bind(name)
            yield name, server
        else:
            server.bind("\0" + name)
            yield "@" + name, server


def test_messages(manager: tuple[str, socket.socket]) -> None:
    address, server = manager
    with Notifier({"NOTIFY_SOCKET": address}) as notifier:
        notifier.status("Unlocking")
        notifier.ready("Mounted")
        notifier.extend_timeout(1.5)
        notifier.alive()
        notifier.stopping("Unmounting")
    server.settimeout(10)
    assert [server.recv(4096) for _ in range(5)] == [
        b"STATUS=Unlocking",
        b"READY=1\nSTATUS=Mounted",
        b"EXTEND_TIMEOUT_USEC=1500000",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=Unmounting",
    ]


def test_children_do_not_inherit_the_socket() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    with Notifier(environment):
        assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_watchdog_of_this_process_only(variables: dict[str, str], seconds: float | None) -> None:
    with Notifier({"NOTIFY_SOCKET": "@x", **variables}) as notifier:
        assert notifier.watchdog_seconds == seconds


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    notifier.ready("Mounted")
    assert notifier.watchdog_seconds is None


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    with Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}) as notifier:
        notifier.ready("Mounted")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_verifies_clean(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # The command need not be installed where the tests run, but must exist for the check.
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/encfsd", sys.executable))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    result = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_unit_keeps_the_mount_visible() -> None:
    """These would give the daemon a mount namespace of its own, the last one forbids openat2(2)."""
    text = UNIT.read_text()
    settings = {line.partition("=")[0] for line in text.splitlines() if not line.startswith("#")}
    assert not settings & {
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "ProtectHome",
        "ProtectSystem",
        "ProtectKernelTunables",
        "ProtectControlGroups",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectProc",
        "ReadWritePaths",
        "ReadOnlyPaths",
        "InaccessiblePaths",
        "DynamicUser",
        "RestrictSUIDSGID",
    }
    assert {"Type", "LoadCredential", "ExecStop", "TimeoutStopSec"} <= settings
