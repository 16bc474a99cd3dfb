"""From the event loop to the C volume and back: one request, one C call, one answer.

A request that needs no waiting is answered by the call itself. Any other is *parked*: a C thread
works on it while the task that made it sleeps. One task, `Requests.serve`, waits for the eventfd
that announces answers, and wakes the sleepers by the ticket that their request carries.

A parked request belongs to C: struct, names and buffer must stay where they are until the answer.
Hence a sleeping task cannot be cancelled, and its frame keeps everything alive.
"""

from __future__ import annotations

import itertools
from typing import Any

import trio
from trio.lowlevel import Abort, Task

from encfsd.native import ffi, lib

_REQUEST = ffi.typeof("struct request *")
_ZEROS = bytes(ffi.sizeof("struct request"))
# More than this many requests are seldom in flight, and a spare one is 300 bytes.
_MAX_SPARE = 64

# A buffer that C fills before anybody reads it.
new_buffer = ffi.new_allocator(should_clear_after_alloc=False)


class Requests:
    """Makes, starts and completes the requests of one volume. Not thread-safe: event loop only."""

    def __init__(self, volume: Any) -> None:
        """`volume` is a struct volume * that stays open as long as this object is used."""
        self._volume = volume
        self._spare: list[Any] = []
        self._tickets = itertools.count(1)
        self._sleeping: dict[int, Task] = {}

    def new(self, op: int, ino: int) -> Any:
        """Return a zeroed struct request *; give it to `run`, and to `recycle` when done."""
        if self._spare:
            request = self._spare.pop()
            ffi.buffer(request)[:] = _ZEROS
        else:
            request = ffi.new(_REQUEST)
        request.op = op
        request.ino = ino
        return request

    async def run(self, request: Any) -> int:
        """Carry out a request; return its result, a negative errno for a failure.

        The caller keeps whatever the request points to alive. Cannot be cancelled.
        """
        ticket = next(self._tickets)
        request.ticket = ticket
        if lib.request_start(self._volume, request) == lib.REQUEST_PARKED:
            # No await lies between the call and the sleep, so the answer cannot be missed.
            self._sleeping[ticket] = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(lambda _: Abort.FAILED)
        return int(request.result)

    def recycle(self, request: Any) -> None:
        """Take back a request that is answered and read; nobody may use it any more."""
        if len(self._spare) < _MAX_SPARE:
            self._spare.append(request)

    def forget(self, ino: int, lookups: int) -> None:
        """Tell the volume that the kernel has dropped `lookups` references to an inode."""
        lib.request_forget(self._volume, ino, lookups)

    def note_writer(self, ino: int, change: int) -> None:
        """Tell the volume of an open (1) or closed (-1) file that may be written through."""
        lib.request_note_writer(self._volume, ino, change)

    async def serve(self) -> None:
        """Wake tasks whose requests are answered; runs until cancelled, after the last request."""
        fd = lib.request_completion_fd(self._volume)
        while True:
            await trio.lowlevel.wait_readable(fd)
            while (request := lib.request_next_completed(self._volume)) != ffi.NULL:
                trio.lowlevel.reschedule(self._sleeping.pop(request.ticket))
