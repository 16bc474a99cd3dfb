"""What a mount counts, as JSON and as a table: requests by opcode, the pool, commits."""

from __future__ import annotations

import functools
from typing import Any

from encfsd.native import ffi, lib
from encfsd.options import OVERFLOW_POLICIES, POOL_STRATEGIES, format_size

KINDS = ("data", "tree")  # enum pool_kind
# Whether hot requests are answered natively, and if not, why.
FAST_PATH, NOT_WANTED, NOT_STARTED = "on", "off, as asked for", "off: it could not be started"
CLASSES = ("commit", "application", "background")  # enum pool_class
_POOL_COUNTERS = (
    "capacity",
    "capacity_bytes",
    "max_bytes",
    "draining",
    "in_use",
    "high_water",
    "refused",
    "wiped",
)
_QUEUE_COUNTERS = ("depth", "high_water", "waits", "expired")
_KIND_COUNTERS = (
    "takes",
    "gives",
    "hits",
    "misses",
    "misses_live",
    "evictions",
    "in_use",
    "high_water",
    "bytes",
)
_VOLUME_COUNTERS = (
    "requests",
    "parked",
    "bytes_read",
    "bytes_written",
    "inodes_in_core",
    "dirty_bytes",
    "groups",
    "solo_commits",
    "objects_committed",
    "durable_mark",
    "damaged_reads",
)
# Columns of a row about an opcode, behind its name: 80 with that.
_WIDTHS = (9, 10, 8, 8, 8, 8, 9)
# enum fuse_opcode of linux/fuse.h.
_OPCODES = {
    1: "LOOKUP",
    2: "FORGET",
    3: "GETATTR",
    4: "SETATTR",
    5: "READLINK",
    6: "SYMLINK",
    8: "MKNOD",
    9: "MKDIR",
    10: "UNLINK",
    11: "RMDIR",
    12: "RENAME",
    13: "LINK",
    14: "OPEN",
    15: "READ",
    16: "WRITE",
    17: "STATFS",
    18: "RELEASE",
    20: "FSYNC",
    21: "SETXATTR",
    22: "GETXATTR",
    23: "LISTXATTR",
    24: "REMOVEXATTR",
    25: "FLUSH",
    26: "INIT",
    27: "OPENDIR",
    28: "READDIR",
    29: "RELEASEDIR",
    30: "FSYNCDIR",
    31: "GETLK",
    32: "SETLK",
    33: "SETLKW",
    34: "ACCESS",
    35: "CREATE",
    36: "INTERRUPT",
    37: "BMAP",
    38: "DESTROY",
    39: "IOCTL",
    40: "POLL",
    41: "NOTIFY_REPLY",
    42: "BATCH_FORGET",
    43: "FALLOCATE",
    44: "READDIRPLUS",
    45: "RENAME2",
    46: "LSEEK",
    47: "COPY_FILE_RANGE",
    48: "SETUPMAPPING",
    49: "REMOVEMAPPING",
    50: "SYNCFS",
    51: "TMPFILE",
    52: "STATX",
    53: "COPY_FILE_RANGE_64",
}
_OTHER = "other"  # opcodes that the transport does not tell apart
# Latencies that so many of a thousand requests do not exceed.
_PERMILLES = {"p50_ns": 500, "p99_ns": 990, "p999_ns": 999}
_LATENCY_TITLES = ("p50", "p99", "p99.9")
Json = dict[str, Any]


def _at_most(buckets: list[tuple[int, int]], permille: int) -> int:
    """Return a time that `permille` of all requests did not exceed, a quarter too large at most.

    A bucket is (the time below which it counts, how many).
    """
    left = sum(count for _, count in buckets) * permille
    for end, count in buckets:
        left -= count * 1000
        if left <= 0:
            return end
    return 0


@functools.cache
def _bucket_starts() -> list[int]:
    return [int(lib.latency_bucket_ns(i)) for i in range(lib.LATENCY_BUCKETS)]


@functools.cache
def _bucket_ends() -> dict[int, int]:
    """Return where each bucket ends, by its start; the last one has no end."""
    starts = _bucket_starts()
    return dict(zip(starts, [*starts[1:], starts[-1]], strict=True))


def _histogram(counts: Any) -> list[list[int]]:
    """Return [from so many ns on, how many] for each bucket that is not empty."""
    starts = _bucket_starts()
    return [[starts[i], int(count)] for i, count in enumerate(counts) if count]


def percentile(histogram: list[list[int]], permille: int) -> int:
    """Return a time that `permille` of what a histogram counts did not exceed."""
    ends = _bucket_ends()
    return _at_most([(ends[start], count) for start, count in histogram], permille)


def _percentiles(histogram: list[list[int]]) -> Json:
    return {name: percentile(histogram, permille) for name, permille in _PERMILLES.items()}


def _opcode(counted: Any) -> Json:
    """Return one struct transport_opcode; `latency`: its histogram."""
    latency = _histogram(counted.latency)
    answered = int(counted.native) + int(counted.forwarded)
    return {
        "native": int(counted.native),
        "forwarded": int(counted.forwarded),
        "failed": int(counted.failed),
        "mean_ns": int(counted.total_ns) // answered if answered else 0,
        **_percentiles(latency),
        "latency": latency,
    }


def of_transport(transport: Any) -> Json:
    """Return what a transport (a struct transport *) counted, by the names of the opcodes used."""
    counted = ffi.new("struct transport_opcode[]", lib.TRANSPORT_OPCODES)
    lib.transport_stats(transport, counted)
    return {
        _OPCODES.get(number, _OTHER if number == 0 else str(number)): _opcode(each)
        for number, each in enumerate(counted)
        if each.native or each.forwarded
    }


def of_volume(handle: Any) -> Json:
    """Return all counters of an open volume (a struct volume *)."""
    stats = ffi.new("struct volume_stats *")
    lib.volume_stats(handle, stats)
    pool = stats.pool
    return {
        "crypto": ffi.string(lib.seal_backend_name()).decode(),
        "read_only": bool(stats.read_only),
        "failed": bool(stats.failed),
        **{name: int(getattr(stats, name)) for name in _VOLUME_COUNTERS},
        "pool": {
            "strategy": POOL_STRATEGIES[pool.strategy],
            "overflow": OVERFLOW_POLICIES[pool.overflow],
            **{name: int(getattr(pool, name)) for name in _POOL_COUNTERS},
            "queue": _queues(handle),
            **{
                kind: {name: int(getattr(pool.kind[i], name)) for name in _KIND_COUNTERS}
                for i, kind in enumerate(KINDS)
            },
        },
    }


def _queues(handle: Any) -> Json:
    """Return who waits for the free list, by class."""
    counted = ffi.new("struct pool_queue_stats[]", len(CLASSES))
    lib.volume_queue_stats(handle, counted)
    return {name: _queue(counted[i]) for i, name in enumerate(CLASSES)}


def _queue(counted: Any) -> Json:
    wait = _histogram(counted.wait)
    return {
        **{name: int(getattr(counted, name)) for name in _QUEUE_COUNTERS},
        "mean_ns": int(counted.total_ns) // int(counted.waits) if counted.waits else 0,
        **_percentiles(wait),
        "wait": wait,
    }


def summary(counters: Json) -> str:
    """Return the line that the log gets at unmount."""
    pool = counters["pool"]
    kinds = "; ".join(
        f"{kind}: {pool[kind]['takes']} takes, {pool[kind]['gives']} gives, "
        f"{pool[kind]['hits']} hits, {pool[kind]['misses']} misses "
        f"({pool[kind]['misses_live']} live), {pool[kind]['evictions']} evictions"
        for kind in KINDS
    )
    opcodes = counters["opcodes"].values()
    native, forwarded = (sum(op[how] for op in opcodes) for how in ("native", "forwarded"))
    return (
        f"{native} requests answered natively, {forwarded} forwarded; "
        f"free list: {pool['capacity']} slots ({format_size(pool['capacity_bytes'])}), "
        f"high water {pool['high_water']}; {kinds}"
    )


def table(counters: Json) -> str:
    """Return the counters for people, within 80 columns."""
    pool = counters["pool"]
    state = "failed" if counters["failed"] else "ro" if counters["read_only"] else "rw"
    lines = [
        f"state              {state}, sealing with {counters['crypto']}",
        f"fast path          {counters['fast_path']}",
        f"requests           {counters['requests']} ({counters['parked']} had to wait)",
        f"inodes in core     {counters['inodes_in_core']}",
        f"dirty              {format_size(counters['dirty_bytes'])}",
        f"commits            {_commits(counters)}",
        f"damaged reads      {counters['damaged_reads']}",
        f"read               {format_size(counters['bytes_read'])}",
        f"written            {format_size(counters['bytes_written'])}",
        f"free list          {pool['capacity']} slots, {format_size(pool['capacity_bytes'])}",
        f"  can grow to      {format_size(pool['max_bytes'])}",
        f"  strategy         {pool['strategy']}; when it is full: {pool['overflow']}",
        f"  in use           {pool['in_use']}, at most {pool['high_water']} so far",
        f"  draining         {pool['draining']}",
        f"  refused          {pool['refused']}",
        "",
        *_queue_table(pool["queue"]),
        "",
        f"{'nodes':<18} {'data':>20} {'tree':>20}",
    ]
    for name in _KIND_COUNTERS:
        label = {"misses_live": "misses, live", "in_use": "in use", "high_water": "high water"}
        values = [pool[kind][name] for kind in KINDS]
        shown = [format_size(v) if name == "bytes" else str(v) for v in values]
        lines.append(f"  {label.get(name, name):<16} {shown[0]:>20} {shown[1]:>20}")
    return "\n".join([*lines, "", *_opcode_table(counters["opcodes"])])


def _commits(counters: Json) -> str:
    groups, files = counters["groups"], counters["solo_commits"]
    return (
        f"{groups} group{'' if groups == 1 else 's'}, "
        f"{files} single file{'' if files == 1 else 's'}"
    )


def _queue_table(queues: Json) -> list[str]:
    titles = ("waiting", "at most", "waited", "in vain", "mean", *_LATENCY_TITLES)
    rows = [["queue", *titles]]
    for name in CLASSES[1:]:  # commits never wait
        queue = queues[name]
        shown = [format_count(queue[key]) for key in _QUEUE_COUNTERS]
        waits = queue["waits"]
        times = [format_time(queue[k]) if waits else "-" for k in ("mean_ns", *_PERMILLES)]
        rows.append([f"  {name}", *shown, *times])
    return [f"{row[0]:<15}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows]


def _opcode_table(opcodes: Json) -> list[str]:
    columns = ("native", "forwarded", "failed", "mean_ns", *_PERMILLES)
    rows = [["requests", "native", "forwarded", "failed", "mean", *_LATENCY_TITLES]]
    for name, op in sorted(opcodes.items(), key=lambda item: -_answered(item[1])):
        shown = [
            format_time(op[key]) if key.endswith("_ns") else format_count(op[key])
            for key in columns
        ]
        rows.append([f"  {name}", *shown])
    return [
        f"{row[0]:<20}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], _WIDTHS, strict=True))
        for row in rows
    ]


def _answered(opcode: Json) -> int:
    return int(opcode["native"]) + int(opcode["forwarded"])


def format_count(number: int) -> str:
    """Return a number within seven characters."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 1_000_000:
            return f"{number}{unit}"
        number //= 1000
    return f"{number}P"


def format_time(nanoseconds: int) -> str:
    """Return a time for people: three digits, within seven characters."""
    value, unit = nanoseconds / 1000, "us"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.{0 if value >= 99.95 else 1}f} {unit}"
