"""What is counted, in words and in numbers."""

import copy
import re
from pathlib import Path

from encfsd import stats
from encfsd.native import ffi, lib

KIND = dict.fromkeys(stats._KIND_COUNTERS, 7)
COUNTERS: stats.Json = {
    "crypto": "openssl",
    "read_only": False,
    "failed": False,
    "fast_path": stats.FAST_PATH,
    **dict.fromkeys(stats._VOLUME_COUNTERS, 3),
    "pool": {
        **dict.fromkeys(stats._POOL_COUNTERS, 7),
        "strategy": "pooling-cow",
        "overflow": "evict-only",
        "capacity": 100,
        "capacity_bytes": 409600,
        "queue": dict.fromkeys(stats.CLASSES, stats._queue(ffi.new("struct pool_queue_stats *"))),
        "data": KIND,
        "tree": KIND,
    },
    "opcodes": {},
}


def opcode(native: int, forwarded: int, failed: int, latency: dict[int, int]) -> stats.Json:
    """Return what is told of an opcode with these counts in buckets."""
    counted = ffi.new("struct transport_opcode *")
    counted.native, counted.forwarded, counted.failed = native, forwarded, failed
    for bucket, count in latency.items():
        counted.latency[bucket] = count
        counted.total_ns += count * lib.latency_bucket_ns(bucket)
    return stats._opcode(counted)


def test_percentiles_are_ends_of_buckets() -> None:
    start = lib.latency_bucket_ns
    told = opcode(990, 10, 3, {40: 500, 41: 490, 60: 9, 80: 1})
    assert (told["native"], told["forwarded"], told["failed"]) == (990, 10, 3)
    assert told["p50_ns"] == start(41)
    assert told["p99_ns"] == start(42)
    assert told["p999_ns"] == start(61)
    total = 500 * start(40) + 490 * start(41) + 9 * start(60) + start(80)
    assert told["mean_ns"] == total // 1000
    assert told["latency"] == [[start(40), 500], [start(41), 490], [start(60), 9], [start(80), 1]]


def test_the_last_bucket_has_no_end() -> None:
    last = lib.LATENCY_BUCKETS - 1
    assert opcode(1, 0, 0, {last: 1})["p50_ns"] == lib.latency_bucket_ns(last)


def test_an_opcode_without_latencies() -> None:
    told = opcode(5, 0, 0, {})
    assert (told["mean_ns"], told["p50_ns"], told["p999_ns"], told["latency"]) == (0, 0, 0, [])


def test_names_are_those_of_the_kernel() -> None:
    header = Path("/usr/include/linux/fuse.h").read_text()
    found = dict(re.findall(r"^\tFUSE_([A-Z0-9_]+)\s*= (\d+),", header, re.MULTILINE))
    names = {int(number): name for name, number in found.items() if "NOTIFY_" not in name}
    assert {n: name for n, name in names.items() if n < 64 and stats._OPCODES.get(n) != name} == {}


def test_the_table_says_whether_there_is_a_fast_path_and_what_never_happened() -> None:
    for fast_path in (stats.FAST_PATH, stats.NOT_WANTED, stats.NOT_STARTED):
        counters = {**COUNTERS, "fast_path": fast_path, "groups": 1, "solo_commits": 1}
        lines = stats.table(counters).splitlines()
        assert f"fast path          {fast_path}" in lines
        assert "commits            1 group, 1 single file" in lines
        idle = next(line for line in lines if line.startswith("  application"))
        assert idle.split() == ["application", "0", "0", "0", "0", "-", "-", "-", "-"]
    assert "3 groups, 3 single files" in stats.table(COUNTERS)


def test_the_table_fits_whatever_was_counted() -> None:
    counters = copy.deepcopy(COUNTERS)
    counters["opcodes"] = {
        name: opcode((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1, {127: 1})
        for name in (*stats._OPCODES.values(), "other")
    }
    counters["opcodes"]["READ"] |= {"mean_ns": 123_456_789, "p50_ns": 999, "p99_ns": 99_950}
    lines = stats.table(counters).splitlines()
    assert max(map(len, lines)) <= 80
    read = next(line for line in lines if line.startswith("  READ "))
    assert re.search(r" 123 ms +1\.0 us +100 us ", read), read


def test_numbers_and_times_for_people() -> None:
    assert [stats.format_count(n) for n in (0, 999_999, 1_234_567, 1 << 40)] == [
        "0",
        "999999",
        "1234k",
        "1099G",
    ]
    assert [stats.format_time(n) for n in (0, 850, 12_340, 5_000_000, 2_500_000_000)] == [
        "0.0 us",
        "0.8 us",
        "12.3 us",
        "5.0 ms",
        "2.5 s",
    ]


def test_the_summary_counts_both_ways() -> None:
    counters = copy.deepcopy(COUNTERS)
    counters["opcodes"] = {"READ": opcode(10, 0, 0, {}), "MKDIR": opcode(0, 4, 1, {})}
    assert stats.summary(counters).startswith(
        "10 requests answered natively, 4 forwarded; free list: 100 slots (400 KiB), "
    )
