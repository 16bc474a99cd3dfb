"""`encfsd top`: what a mount is doing, drawn from two answers of its control socket.

`render` and `line` are pure: two snapshots and what came before in, lines out. `Screen` is all
there is of a terminal. Plain ANSI, because a view of one page needs neither curses nor a library:
each line is drawn over the old one and nothing is cleared first, so nothing flickers over a slow
link.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

from encfsd import stats
from encfsd.options import format_size
from encfsd.stats import Json, format_count, format_time

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.:-=+*#"
HISTORY = 512  # samples that are kept: as many as the widest terminal shows
Clock = Callable[[], float]
Picture = Callable[[tuple[int, ...], str], list[str]]  # size and ramp in, lines out
_FIRST_SECONDS = 0.3  # before there is something to see
_LABEL = 12
_COLUMNS = (("per s", 9), ("failed/s", 10), ("p50", 10), ("p99", 10))
# Columns of a line where there is no terminal: 80 with the time.
_STAMP_WIDTH = 19
_LINE = (
    ("req/s", 8),
    ("read/s", 10),
    ("written/s", 10),
    ("list", 6),
    ("misses/s", 9),
    ("dirty", 10),
    ("queue", 8),
)
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class Snapshot:
    """Counters, and when they were asked for, in seconds."""

    time: float
    counters: Json


@dataclass(frozen=True)
class Sample:
    """What one interval adds to the history."""

    occupancy: float  # 0 to 1; more if malloc helped out
    misses: float  # per second


# ---- what happened between two snapshots ----


class Interval:
    """The time between two snapshots of one mount."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.seconds = max(after.time - before.time, 1e-3)
        self.before, self.after = before.counters, after.counters

    def rate(self, *path: str) -> float:
        """Return how much the counter at `path` grew per second."""
        return self.grown(*path) / self.seconds

    def grown(self, *path: str) -> int:
        """Return how much the counter at `path` grew."""
        return max(int(_at(self.after, path)) - int(_at(self.before, path)), 0)

    def histogram(self, *path: str) -> list[list[int]]:
        """Return what was added to the histogram at `path`."""
        old = dict(_at(self.before, path) or ())
        new = _at(self.after, path) or ()
        added = [[start, number - old.get(start, 0)] for start, number in new]
        return [bucket for bucket in added if bucket[1] > 0]

    def kinds(self, name: str) -> int:
        """Return how much a counter of all kinds of nodes grew."""
        return sum(self.grown("pool", kind, name) for kind in stats.KINDS)

    def sample(self) -> Sample:
        """Return what is kept of this interval."""
        pool = self.after["pool"]
        occupancy = pool["in_use"] / max(pool["capacity"], 1)
        return Sample(occupancy, self.kinds("misses") / self.seconds)


def _at(counters: Json, path: Sequence[str]) -> Any:
    found: Any = counters
    for name in path:
        found = found.get(name) if found else None
    return found or 0


# ---- lines ----


def spark(values: Sequence[float], width: int, most: float, ramp: str = BLOCKS) -> str:
    """Return the last `width` values as a row of bars of which `most` is the highest."""
    shown = values[-width:] if width > 0 else []
    top = len(ramp) - 1
    bars = "".join(ramp[min(round(v / most * top), top) if most > 0 else 0] for v in shown)
    return bars.rjust(max(width, 0))


def render(
    interval: Interval, history: Sequence[Sample], title: str, size: tuple[int, ...], ramp: str
) -> list[str]:
    """Return what is on a screen of `size` (columns, lines): no line too long, none too many."""
    width, height = size
    lines = [*_head(interval, title), *_pool(interval, history, width, ramp)]
    lines += [*_volume(interval), "", *_requests(interval)]
    return [line[:width].rstrip() for line in lines[: max(height, 1)]]


def _row(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _head(interval: Interval, title: str) -> list[str]:
    now = interval.after
    state = "failed" if now["failed"] else "ro" if now["read_only"] else "rw"
    fast_path = now["fast_path"]
    slow = "" if fast_path == stats.FAST_PATH else f"; fast path {fast_path}"
    return [f"encfsd top  {title}", f"{state}, sealing with {now['crypto']}{slow}; q ends", ""]


def _pool(interval: Interval, history: Sequence[Sample], width: int, ramp: str) -> list[str]:
    pool = interval.after["pool"]
    room = width - _LABEL - 26
    misses = [sample.misses for sample in history]
    occupancy = [sample.occupancy for sample in history]
    live = sum(pool[kind]["misses_live"] for kind in stats.KINDS)
    lines = [
        _row(
            "free list",
            f"{format_size(pool['capacity_bytes'])}, {pool['strategy']}, when full: "
            f"{pool['overflow']}" + (f"; {pool['draining']} draining" if pool["draining"] else ""),
        ),
        _row("  in use", f"{spark(occupancy, room, 1.0, ramp)}  {_last(occupancy):4.0%} of it"),
        _row(
            "  misses",
            f"{spark(misses, room, max(misses, default=0.0), ramp)}  {_per_second(_last(misses))}"
            f", {format_count(live)} live",
        ),
        _row(
            "  hit rate",
            "   ".join(f"{kind} {_hit_rate(interval, kind)}" for kind in stats.KINDS)
            + f"   evictions {_per_second(interval.kinds('evictions') / interval.seconds)}",
        ),
    ]
    depth = sum(queue["depth"] for queue in pool["queue"].values())
    waits = [
        bucket
        for name in stats.CLASSES
        for bucket in interval.histogram("pool", "queue", name, "wait")
    ]
    waited = f"waited {_per_second(sum(number for _, number in waits) / interval.seconds)}"
    return [*lines, _row("queue", f"{depth} waiting   {waited}   {_times(sorted(waits))}")]


def _volume(interval: Interval) -> list[str]:
    now = interval.after
    return [
        _row(
            "dirty",
            f"{format_size(now['dirty_bytes'])}   groups "
            f"{_per_second(interval.rate('groups'))}   single files "
            f"{_per_second(interval.rate('solo_commits'))}",
        ),
        _row(
            "throughput",
            f"read {_speed(interval.rate('bytes_read'))}   "
            f"written {_speed(interval.rate('bytes_written'))}",
        ),
    ]


def _requests(interval: Interval) -> list[str]:
    titles = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
    rows = [f"{'requests':<20}{titles}"]
    counted = {name: _answered(interval, name) for name in interval.after["opcodes"]}
    for name, number in sorted(counted.items(), key=lambda item: -item[1]):
        if number:
            latency = interval.histogram("opcodes", name, "latency")
            cells = (
                _number(number / interval.seconds),
                _number(interval.rate("opcodes", name, "failed")),
                format_time(stats.percentile(latency, 500)),
                format_time(stats.percentile(latency, 990)),
            )
            shown = "".join(
                f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
            )
            rows.append(f"  {name:<18}{shown}")
    return rows if len(rows) > 1 else [*rows, "  none"]


def heading() -> str:
    """Return what stands above the lines of `line`."""
    return _cells("time", [name for name, _ in _LINE])


def line(interval: Interval, stamp: str) -> str:
    """Return what is said each second where there is no terminal; `stamp` says when."""
    pool, sample = interval.after["pool"], interval.sample()
    requests = sum(_answered(interval, name) for name in interval.after["opcodes"])
    depth = sum(queue["depth"] for queue in pool["queue"].values())
    return _cells(
        stamp,
        [
            _number(requests / interval.seconds),
            format_size(round(interval.rate("bytes_read"))),
            format_size(round(interval.rate("bytes_written"))),
            f"{sample.occupancy:.0%}",
            _number(sample.misses),
            format_size(interval.after["dirty_bytes"]),
            format_count(depth),
        ],
    )


def _cells(first: str, cells: Sequence[str]) -> str:
    return f"{first:<{_STAMP_WIDTH}}" + "".join(
        f"{cell:>{width}}" for cell, (_, width) in zip(cells, _LINE, strict=True)
    )


def _answered(interval: Interval, opcode: str) -> int:
    return sum(interval.grown("opcodes", opcode, how) for how in ("native", "forwarded"))


def _hit_rate(interval: Interval, kind: str) -> str:
    takes = interval.grown("pool", kind, "takes")
    return f"{interval.grown('pool', kind, 'hits') / takes:.1%}" if takes else "-"


def _times(histogram: list[list[int]]) -> str:
    return "   ".join(
        f"{name} {format_time(stats.percentile(histogram, permille)) if histogram else '-'}"
        for name, permille in (("p50", 500), ("p99", 990))
    )


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0


def _number(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < 9.95 else format_count(round(rate))


def _per_second(rate: float) -> str:
    return f"{_number(rate)}/s"


def _speed(rate: float) -> str:
    return f"{format_size(round(rate))}/s"


# ---- the terminal ----


class Screen:
    """The terminal while it is ours; a context manager that gives it back as it was."""

    def __init__(self, output: TextIO, keys: int | None) -> None:
        """`keys`: the terminal to read keys from, if there is one."""
        self._output = output
        self._keys = keys
        self._modes: list[Any] = []
        self._handlers: dict[int, Any] = {}
        encoding = (output.encoding or "").lower().replace("-", "")
        self.ramp = BLOCKS if encoding == "utf8" else ASCII

    def __enter__(self) -> Self:
        self._resized, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSADRAIN)
        handlers: dict[int, Any] = {
            signal.SIGWINCH: self._note_size,
            signal.SIGTERM: _end,
            signal.SIGTSTP: signal.SIG_IGN,  # else the shell would get the terminal as it is
        }
        for number, handler in handlers.items():
            self._handlers[number] = signal.signal(number, handler)
        self._output.write(_ENTER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._resized)
        os.close(self._wake)
        with contextlib.suppress(OSError):  # the terminal may have gone
            self._output.write(_LEAVE)
            self._output.flush()
        if self._keys is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)

    def _note_size(self, _: int, __: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"r")

    def draw(self, picture: Picture) -> None:
        """Show these lines and nothing else."""
        lines = picture(tuple(shutil.get_terminal_size()), self.ramp)
        text = f"{_REST_OF_LINE}\r\n".join(lines)
        self._output.write(f"{_HOME}{text}{_REST_OF_SCREEN}")
        self._output.flush()

    def wait(self, due: float, clock: Clock, picture: Picture) -> bool:
        """Draw anew at each change of size until `due`; False if the user wants to end before."""
        watched = [self._resized] if self._keys is None else [self._resized, self._keys]
        while (left := due - clock()) > 0:
            ready = select.select(watched, [], [], left)[0]
            if self._resized in ready:
                os.read(self._resized, 4096)
                self.draw(picture)
            if (
                self._keys is not None
                and self._keys in ready
                and self._ends(os.read(self._keys, 64))
            ):
                return False
        return True

    @staticmethod
    def _ends(pressed: bytes) -> bool:
        return not pressed or b"q" in pressed.lower()


def _end(_: int, __: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def is_terminal(output: TextIO) -> bool:
    """Say whether there is a terminal that can be drawn on."""
    return output.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def watch(ask: Callable[[], Json], title: str, seconds: float) -> None:
    """Draw until the user ends it. `ask` returns counters, and raises what else ends the view."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    clock = time.monotonic
    history: tuple[Sample, ...] = ()
    with contextlib.suppress(KeyboardInterrupt), Screen(sys.stdout, keys) as screen:
        before = Snapshot(clock(), ask())
        picture: Picture = lambda _, __: [f"encfsd top  {title}"]  # noqa: E731
        due = clock() + min(seconds, _FIRST_SECONDS)
        while screen.wait(due, clock, picture):
            after = Snapshot(clock(), ask())
            interval = Interval(before, after)
            history = (*history, interval.sample())[-HISTORY:]
            picture = functools.partial(render, interval, history, title)
            screen.draw(picture)
            before, due = after, after.time + seconds


def report(ask: Callable[[], Json], tell: Callable[[str], None], seconds: float) -> None:
    """Tell a heading, then a line an interval until `ask` raises or the user interrupts."""
    with contextlib.suppress(KeyboardInterrupt):
        before = Snapshot(time.monotonic(), ask())
        tell(heading())
        while True:
            time.sleep(seconds)
            after = Snapshot(time.monotonic(), ask())
            tell(line(Interval(before, after), time.strftime("%Y-%m-%dT%H:%M:%S")))
            before = after
