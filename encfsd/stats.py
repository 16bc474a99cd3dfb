"""What a mount counts, as JSON and as a table: the pool by kind of node, commits, requests."""

from __future__ import annotations

from typing import Any

from encfsd.native import ffi, lib
from encfsd.options import format_size

KINDS = ("data", "tree")  # enum pool_kind
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
    "inodes_in_core",
    "dirty_bytes",
    "groups",
    "solo_commits",
    "objects_committed",
    "durable_mark",
    "damaged_reads",
)
Json = dict[str, Any]


def collect(handle: Any) -> Json:
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
            "capacity": int(pool.capacity),
            "capacity_bytes": int(pool.capacity_bytes),
            "in_use": int(pool.in_use),
            "high_water": int(pool.high_water),
            **{
                kind: {name: int(getattr(pool.kind[i], name)) for name in _KIND_COUNTERS}
                for i, kind in enumerate(KINDS)
            },
        },
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
    return (
        f"free list: {pool['capacity']} slots ({format_size(pool['capacity_bytes'])}), "
        f"high water {pool['high_water']}; {kinds}"
    )


def table(counters: Json) -> str:
    """Return the counters for people, within 80 columns."""
    pool = counters["pool"]
    state = "failed" if counters["failed"] else "ro" if counters["read_only"] else "rw"
    lines = [
        f"state              {state}, sealing with {counters['crypto']}",
        f"requests           {counters['requests']} ({counters['parked']} had to wait)",
        f"inodes in core     {counters['inodes_in_core']}",
        f"dirty              {format_size(counters['dirty_bytes'])}",
        f"commits            {counters['groups']} groups, {counters['solo_commits']} single files",
        f"damaged reads      {counters['damaged_reads']}",
        f"free list          {pool['capacity']} slots, {format_size(pool['capacity_bytes'])}",
        f"  in use           {pool['in_use']}, at most {pool['high_water']} so far",
        "",
        f"{'nodes':<18} {'data':>20} {'tree':>20}",
    ]
    for name in _KIND_COUNTERS:
        label = {"misses_live": "misses, live", "in_use": "in use", "high_water": "high water"}
        values = [pool[kind][name] for kind in KINDS]
        shown = [format_size(v) if name == "bytes" else str(v) for v in values]
        lines.append(f"  {label.get(name, name):<16} {shown[0]:>20} {shown[1]:>20}")
    return "\n".join(lines)
