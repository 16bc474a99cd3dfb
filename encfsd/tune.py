"""Changing a mount while it is used: what `encfsd tune` asks for, and what it says was done."""

from __future__ import annotations

from encfsd.control import Json
from encfsd.errors import UsageError
from encfsd.options import format_size, parse_size

FREE_LIST = "free-list"


def size_of(assignment: str) -> str:
    """Return SIZE of ``free-list=SIZE``; UsageError if it is anything else.

    A percentage is one of the memory that the daemon may use, so the daemon computes it.
    """
    name, equals, size = assignment.partition("=")
    if name != FREE_LIST or not equals:
        raise UsageError(assignment, f"what can be changed is {FREE_LIST}=SIZE")
    try:
        parse_size(size, 0)
    except UsageError as error:
        raise UsageError(assignment, error.detail) from None
    return size


def outcome(before: Json, after: Json) -> str:
    """Say how the free list changed; both are the pool's counters."""
    old, new = before["capacity_bytes"], after["capacity_bytes"]
    if new == old:
        text = f"free list: {format_size(new)} as before"
    else:
        how = "grown" if new > old else "shrunk"
        text = f"free list {how} from {format_size(old)} to {format_size(new)}"
    draining = after["draining"]
    if draining:
        size = format_size(draining * (old // max(before["capacity"], 1)))
        text += f"; {draining} nodes ({size}) beyond that are in use and go as they are given back"
    return text
