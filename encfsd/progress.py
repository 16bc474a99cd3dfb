"""A progress bar with the time that is left, on a terminal; nothing anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 30
_INTERVAL = 0.1  # seconds between two drawings


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress:
    """Draws on `stream`; a context manager that wipes the bar at the end."""

    def __init__(
        self, stream: TextIO, label: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._label = label
        self._clock = clock
        self._shown = stream.isatty()
        self._start = self._drawn = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()
        self._shown = False  # whoever reports later, as a pool that grows, draws nothing

    def clear(self) -> None:
        """Remove the bar, so that other lines can be printed."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def update(self, done: int, total: int) -> None:
        """Draw the bar, if it is time for that."""
        if not self._shown or (now := self._clock()) - self._drawn < _INTERVAL:
            return
        self._drawn = now
        share = min(done / total, 1.0) if total else 1.0
        left = "?" if share == 0 else _duration((now - self._start) * (1 - share) / share)
        bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH, ".")
        self._stream.write(f"\r\x1b[K{self._label} [{bar}] {share:4.0%}, {left} left")
        self._stream.flush()
