"""What `encfsd top` and `encfsd tune` say, from counters to lines; the terminal, on a pty."""

import copy
import io
import os
import signal
import termios
import time
from pathlib import Path

import pytest

from encfsd import options, top, tune
from encfsd.errors import UsageError
from encfsd.native import ffi, lib
from encfsd.stats import CLASSES, FAST_PATH, NOT_STARTED, Json, _bucket_starts, _queue
from encfsd.top import ASCII, BLOCKS, Interval, Sample, Snapshot, heading, line, render, spark

POOL = {
    "strategy": "pooling",
    "overflow": "wait",
    "capacity": 1000,
    "capacity_bytes": 1000 * 4200,
    "draining": 0,
    "in_use": 250,
    "data": {"takes": 0, "hits": 0, "misses": 0, "misses_live": 0, "evictions": 0},
    "tree": {"takes": 0, "hits": 0, "misses": 0, "misses_live": 0, "evictions": 0},
    "queue": {name: {"depth": 0, "wait": []} for name in CLASSES},
}
BEFORE: Json = {
    "crypto": "openssl",
    "read_only": False,
    "failed": False,
    "fast_path": FAST_PATH,
    "dirty_bytes": 0,
    "groups": 3,
    "solo_commits": 0,
    "bytes_read": 0,
    "bytes_written": 0,
    "pool": POOL,
    "opcodes": {"READ": {"native": 10, "forwarded": 0, "failed": 1, "latency": [[1024, 10]]}},
}


def after() -> Json:
    """Return what is counted two seconds later."""
    counters = copy.deepcopy(BEFORE)
    counters["dirty_bytes"] = 3 << 20
    counters["groups"] = 5
    counters["bytes_read"] = 8 << 20
    counters["bytes_written"] = 1 << 20
    pool = counters["pool"]
    pool["draining"] = 12
    pool["data"] |= {"takes": 1000, "hits": 900, "misses": 100, "misses_live": 7, "evictions": 50}
    pool["queue"]["application"] = {"depth": 4, "wait": [[1 << 20, 6]]}
    read = {"native": 110, "forwarded": 0, "failed": 3, "latency": [[1024, 108], [1 << 20, 2]]}
    lookup = {"native": 1, "forwarded": 1, "failed": 0, "latency": [[512, 2]]}
    counters["opcodes"] = {"READ": read, "LOOKUP": lookup, "INIT": {"native": 0, "forwarded": 0}}
    return counters


def interval() -> Interval:
    return Interval(Snapshot(10.0, BEFORE), Snapshot(12.0, after()))


def test_a_screen_shows_what_happened_in_between() -> None:
    history = [Sample(0.0, 0.0), Sample(0.5, 25.0), interval().sample()]
    lines = render(interval(), history, "/mnt", (80, 24), ASCII)
    assert lines == [
        "encfsd top  /mnt",
        "rw, sealing with openssl; q ends",
        "",
        "free list   4.0 MiB, pooling, when full: wait; 12 draining",
        "  in use    " + "_=:".rjust(42) + "   25% of it",
        "  misses    " + "_=#".rjust(42) + "  50/s, 7 live",
        "  hit rate  data 90.0%   tree -   evictions 25/s",
        "queue       4 waiting   waited 3.0/s   p50 1.3 ms   p99 1.3 ms",
        "dirty       3.0 MiB   groups 1.0/s   single files 0/s",
        "throughput  read 4.0 MiB/s   written 512 KiB/s",
        "",
        "requests                per s  failed/s       p50       p99",
        "  READ                     50       1.0    1.3 us    1.3 ms",
        "  LOOKUP                  1.0         0    0.6 us    0.6 us",
    ]


def test_a_screen_shows_that_there_is_no_fast_path() -> None:
    slow = {**BEFORE, "fast_path": NOT_STARTED}
    lines = render(Interval(Snapshot(0.0, slow), Snapshot(1.0, slow)), [], "/mnt", (80, 24), ASCII)
    assert lines[1] == ("rw, sealing with openssl; fast path off: it could not be started; q ends")


def test_a_line_shows_the_same_in_short() -> None:
    assert [heading(), line(interval(), "2026-01-02T03:04:05")] == [
        "time                  req/s    read/s written/s  list misses/s     dirty   queue",
        "2026-01-02T03:04:05      51   4.0 MiB   512 KiB   25%       50   3.0 MiB       4",
    ]
    assert len(heading()) == 80


@pytest.mark.parametrize("size", [(80, 24), (40, 5), (200, 60), (10, 3), (1, 1)])
def test_a_screen_fits_whatever_was_counted(size: tuple[int, int]) -> None:
    most = (1 << 64) - 1
    counters = after()
    counters |= dict.fromkeys(("dirty_bytes", "groups", "bytes_read", "bytes_written"), most)
    for kind in ("data", "tree"):
        counters["pool"][kind] = dict.fromkeys(POOL["data"], most)  # type: ignore[call-overload]
    opcode = {"native": most, "forwarded": most, "failed": most, "latency": [[1 << 30, most]]}
    counters["opcodes"] = {f"COPY_FILE_RANGE{i}": opcode for i in range(40)}
    full = Interval(Snapshot(0.0, BEFORE), Snapshot(0.0, counters))
    lines = render(full, [full.sample()] * 600, "/mnt" * 30, size, BLOCKS)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]


def test_nothing_happened() -> None:
    quiet = Interval(Snapshot(0.0, BEFORE), Snapshot(1.0, BEFORE))
    lines = render(quiet, [], "/mnt", (80, 24), BLOCKS)
    assert lines[-1] == "  none"
    assert "data -" in lines[6]


def test_bars() -> None:
    assert spark([0, 1, 2, 4], 6, 4, ASCII) == "  _:=#"
    assert spark([0, 1, 2, 4], 2, 4, ASCII) == "=#"
    assert spark([5.0], 3, 1.0, BLOCKS) == "  █"
    assert spark([0.0], 1, 0.0, BLOCKS) == "▁"
    assert spark([1.0], 0, 1.0) == ""


# ---- tune ----


def test_what_can_be_tuned() -> None:
    assert tune.size_of("free-list=4G") == "4G"
    for wrong in ("free-list", "4G", "size=4G", "free-list=", "free-list=lots", "=4G"):
        with pytest.raises(UsageError):
            tune.size_of(wrong)


def test_what_tuning_did() -> None:
    small = {"capacity": 1000, "capacity_bytes": 4 << 20, "draining": 0}
    large = {"capacity": 4000, "capacity_bytes": 16 << 20, "draining": 0}
    assert tune.outcome(small, large) == "free list grown from 4.0 MiB to 16.0 MiB"
    assert tune.outcome(small, small) == "free list: 4.0 MiB as before"
    assert tune.outcome(large, small | {"draining": 500}) == (
        "free list shrunk from 16.0 MiB to 4.0 MiB; "
        "500 nodes (2.0 MiB) beyond that are in use and go as they are given back"
    )


# ---- names shared with C ----


def test_strategies_and_policies_are_in_the_order_of_the_enums() -> None:
    assert [
        options.POOL_STRATEGIES.index(name) for name in ("pooling", "pooling-cow", "malloc")
    ] == [
        lib.POOL_POOLING,
        lib.POOL_POOLING_COW,
        lib.POOL_MALLOC,
    ]
    assert [options.OVERFLOW_POLICIES.index(name) for name in ("malloc", "wait", "evict-only")] == [
        lib.POOL_OVERFLOW_MALLOC,
        lib.POOL_OVERFLOW_WAIT,
        lib.POOL_OVERFLOW_EVICT_ONLY,
    ]


def test_queues_have_the_buckets_of_latencies() -> None:
    assert [lib.latency_bucket_ns(i) for i in range(lib.LATENCY_BUCKETS)] == _bucket_starts()
    counted = ffi.new("struct pool_queue_stats *")
    counted.waits, counted.total_ns = 4, 4000
    counted.wait[40] = 4
    told = _queue(counted)
    start, end = lib.latency_bucket_ns(40), lib.latency_bucket_ns(41)
    assert (told["mean_ns"], told["p50_ns"], told["wait"]) == (1000, end, [[start, 4]])


# ---- the terminal ----


def test_a_terminal_is_given_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    sizes = iter([(80, 24), (40, 24)])
    monkeypatch.setattr("shutil.get_terminal_size", lambda: next(sizes))
    widths: list[int] = []

    def picture(size: tuple[int, ...], _: str) -> list[str]:
        widths.append(size[0])
        return ["one", "two"]

    with open(theirs, "r+b", buffering=0, closefd=False) as raw:
        output = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
        with top.Screen(output, theirs) as screen:
            assert not termios.tcgetattr(theirs)[3] & termios.ICANON
            screen.draw(picture)
            os.kill(os.getpid(), signal.SIGWINCH)
            assert screen.wait(time.monotonic(), time.monotonic, picture)
            os.write(ours, b"x")
            os.write(ours, b"q")
            assert not screen.wait(time.monotonic() + 60, time.monotonic, picture)
        output.detach()
    assert widths == [80, 40]
    assert termios.tcgetattr(theirs) == before
    shown = os.read(ours, 4096).decode()
    while not shown.endswith("\x1b[?1049l"):  # a terminal passes it on in parts
        shown += os.read(ours, 4096).decode()
    assert shown.startswith("\x1b[?1049h\x1b[?25l\x1b[Hone\x1b[K\r\r\ntwo\x1b[J")
    assert shown.endswith("\x1b[?25h\x1b[?1049l")
    os.close(ours)
    os.close(theirs)


def test_a_pipe_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as output:
        assert not top.is_terminal(output)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as output:
        monkeypatch.setenv("TERM", "xterm")
        assert top.is_terminal(output)
        monkeypatch.setenv("TERM", "dumb")
        assert not top.is_terminal(output)
    os.close(ours)
