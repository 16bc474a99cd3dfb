"""The service manager's notification socket, spoken without a library: sd_notify(3).

Outside of systemd, where NOTIFY_SOCKET is not set, every call does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from types import TracebackType
from typing import Self


class Notifier:
    """Sends state changes to the service manager; a context manager. Never blocks, never fails."""

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Take the variables out of `environment`, so that no child can speak for us."""
        if environment is None:
            environment = os.environ
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "")
        self._socket: socket.socket | None = None
        # Seconds between two signs of life: half of what is allowed. None: nobody watches.
        self.watchdog_seconds: float | None = None
        if not address.startswith(("/", "@")):
            return
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if watchdog.isdecimal() and int(watchdog) > 0 and watched in ("", str(os.getpid())):
            self.watchdog_seconds = int(watchdog) / 2e6

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(f"STATUS={text}")

    def ready(self, text: str) -> None:
        """Say that the service can be used."""
        self._send("READY=1", f"STATUS={text}")

    def stopping(self, text: str) -> None:
        """Say that the service is ending."""
        self._send("STOPPING=1", f"STATUS={text}")

    def extend_timeout(self, seconds: float) -> None:
        """Ask for that much time from now on, for a start or stop that takes longer."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Give a sign of life."""
        self._send("WATCHDOG=1")
