"""One mount from unlocking to the last commit: a trio program around pyfuse3.

    open the volume -> mount -> transport -> pyfuse3 on the transport's socket -> serve
    -> unmounted (by anybody, or by us after a signal) -> close the volume -> exit code

Whatever blocks runs in a worker thread; requests never do (see requests.py). Serving ends when the
transport reports that the kernel has ended the connection. Only a program that keeps files open
after a signal is cut off: then pyfuse3's loop is ended first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pyfuse3
import trio
from outcome import Outcome
from outcome import acapture as outcome_of

from encfsd import config, control, mounting, options, process, stats, tune, volume
from encfsd.errors import (
    EncfsdError,
    FilesOpen,
    InternalError,
    NoFuseDevice,
    NoPermission,
    NotMounted,
    from_oserror,
)
from encfsd.fuse_ops import Operations
from encfsd.keys import Secret
from encfsd.native import check, ffi, lib
from encfsd.options import MountSettings
from encfsd.process import Report
from encfsd.progress import Progress
from encfsd.requests import Requests
from encfsd.source import Source
from encfsd.systemd import Notifier
from encfsd.volume import Volume

# Handlers at a time. Many may sleep in fsync while the WRITEs that they wait for must be served.
_MIN_TASKS, _MAX_TASKS = 8, 1000
_GRACE_SECONDS = 5.0  # for programs with open files, once the mount is out of the tree
_LOG_SECONDS = 1.0
_EXTEND_SECONDS = 30.0
# All of them unmount in order; a terminal that is closed sends the last one.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SWITCH_SECONDS = 0.0005  # a busy worker thread must not hold up requests for Python's 5 ms

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Transport:
    """The native transport of one mount."""

    def __init__(self, opened: Volume, fuse_fd: int, *, fast_path: bool) -> None:
        """Take over `fuse_fd`; OSError says why not, and the mount is dead then."""
        handle, session = ffi.new("struct transport **"), ffi.new("int *")
        options = ffi.new("struct transport_options *")
        options.volume = opened.handle
        options.fast_path = fast_path
        check(lib.transport_start(handle, fuse_fd, options, session))
        self.fast_path = fast_path
        self._handle = handle[0]
        self.session_fd = int(session[0])
        self.done_fd = int(lib.transport_done_fd(self._handle))
        self.fuse_fd = int(lib.transport_fuse_fd(self._handle))

    def negotiated(self) -> Any:
        """Return the struct transport_init."""
        init = ffi.new("struct transport_init *")
        lib.transport_init_info(self._handle, init)
        return init

    def counters(self) -> stats.Json:
        """Return what was counted, by opcode."""
        return stats.of_transport(self._handle)

    def stop(self) -> None:
        """End the threads; a connection that is still there is aborted."""
        lib.transport_stop(self._handle)


def _kinds(error: BaseException) -> str:
    """Name what went wrong without its text, which may hold a path."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_kinds(inner) for inner in error.exceptions)
    return type(error).__name__


def _log_lines(opened: Volume) -> None:
    """Pass on what the data plane has to say. Never while the volume is being closed."""
    for level, line in opened.log_lines():
        _log.log(level, "%s", line)


class Daemon:
    """Serves one mount."""

    def __init__(self, settings: MountSettings, report: Report, notifier: Notifier) -> None:
        """`report` is called once: when the mount is usable, or with what prevents it."""
        self._settings = settings
        self._point = settings.mount_point
        self._report = report
        self._notifier = notifier
        self._failure: EncfsdError | None = None
        self._serving = False
        self._tuning = trio.Lock()  # also held while the volume is closed
        self._origins = dict(settings.origins)
        self._transport: _Transport | None = None
        self._fast_path = stats.FAST_PATH if settings.flags.fast_path else stats.NOT_WANTED
        self._opcodes: stats.Json = {}  # of a transport that has ended

    async def run(self, source: Source, secret: Secret) -> EncfsdError | None:
        """Open the volume in the locked `source`, serve until unmounted, close; return what failed.

        Raises EncfsdError if the volume cannot be opened.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        process.promise_to_flush()
        self._notifier.status("Unlocking the volume")
        opened = await self._in_thread(functools.partial(self._open, source, secret))
        try:
            server = control.Server(
                self._point,
                functools.partial(self._counters, opened),
                functools.partial(self._tune, opened),
            )
        except EncfsdError as error:
            self._fail(error)
            await self._close(opened)
            return self._failure
        # Signals are received until the end: one that came during the last commit must not kill it.
        with (
            server,
            trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals,
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve)
                nursery.start_soon(self._obey_signals, signals, nursery)
                if self._notifier.watchdog_seconds is not None:
                    nursery.start_soon(self._give_signs_of_life, self._notifier.watchdog_seconds)
                await self._mount_and_serve(opened)
                server.refuse_stats()
                await self._close(opened)
                await server.end(self._failure)
                nursery.cancel_scope.cancel()
        return self._failure

    def _fail(self, error: EncfsdError) -> None:
        """Keep the first thing that went wrong; whoever runs the daemon tells it."""
        self._failure = self._failure or error

    # ---- the volume ----

    def _open(self, source: Source, secret: Secret) -> Volume:
        settings = self._settings
        with secret, Progress(sys.stderr, "preallocating") as progress:
            opened = volume.open_to_serve(
                source,
                settings.volume,
                secret,
                read_only=settings.flags.read_only,
                free_list=settings.free_list,
                progress=progress.update,
            )
        if opened.recovered or opened.orphans:
            _log.info(
                "recovered after an unclean stop: %d files adopted, %d orphans removed",
                opened.recovered,
                opened.orphans,
            )
        return opened

    async def _close(self, opened: Volume) -> None:
        self._notifier.stopping("Making the last changes durable")
        try:
            async with self._tuning:
                _log_lines(opened)
                counters = self._counters(opened)
                await self._in_thread(opened.close)
        except EncfsdError as error:
            self._fail(error)
        else:
            _log.info("closed, everything is durable; %s", stats.summary(counters))

    def _counters(self, opened: Volume) -> stats.Json:
        opcodes = self._opcodes if self._transport is None else self._transport.counters()
        counted = stats.of_volume(opened.handle)
        limits = config.in_effect(self._origins, counted["pool"]["capacity_bytes"])
        return {**counted, "fast_path": self._fast_path, "opcodes": opcodes, "limits": limits}

    async def _tune(self, opened: Volume, size: str) -> control.Json:
        """Resize the free list, off the event loop: touching so much memory takes long."""
        async with self._tuning:
            if opened.handle == ffi.NULL:
                return {"error": "the volume is being closed"}
            try:
                return await trio.to_thread.run_sync(self._resize, opened, size)
            except EncfsdError as error:
                return {"exit_code": int(error.exit_code), "message": str(error)}

    def _resize(self, opened: Volume, size: str) -> control.Json:
        name = tune.FREE_LIST
        before = stats.of_volume(opened.handle)["pool"]
        opened.resize_free_list(options.free_list_size(size, name), f"{name}={size}")
        after = stats.of_volume(opened.handle)["pool"]
        self._origins[config.FREE_LIST] = "encfsd tune"
        message = tune.outcome(before, after)
        _log.info("%s", message)
        return {"exit_code": 0, "message": message}

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        """Run something long in a thread; keep the service manager patient meanwhile."""
        outcome: Outcome[_T]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._extend)
            # Caught, because a nursery would wrap what escapes from it.
            outcome = await outcome_of(trio.to_thread.run_sync, function)
            nursery.cancel_scope.cancel()
        return outcome.unwrap()

    async def _extend(self) -> None:
        while True:
            self._notifier.extend_timeout(_EXTEND_SECONDS)
            await trio.sleep(_EXTEND_SECONDS / 3)

    # ---- the mount ----

    async def _mount_and_serve(self, opened: Volume) -> None:
        """Return when nothing is mounted any more; failures are kept by `_fail`."""
        try:
            self._transport = transport = await trio.to_thread.run_sync(self._mount, opened)
            lib.volume_set_notify_fd(opened.handle, transport.fuse_fd)
            try:
                await self._serve(opened, transport)
            finally:
                lib.volume_set_notify_fd(opened.handle, -1)
                self._opcodes, self._transport = transport.counters(), None
                with trio.CancelScope(shield=True):
                    await self._in_thread(transport.stop)
        except EncfsdError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the volume must be closed
            self._fail(InternalError("event loop", _kinds(error)))
        with contextlib.suppress(EncfsdError):
            await trio.to_thread.run_sync(self._clear)

    def _mount(self, opened: Volume) -> _Transport:
        """Mount, with the fast path if it was not refused and can be had. Blocks."""
        flags, source = self._settings.flags, self._settings.volume.source
        if flags.fast_path:
            fuse_fd = mounting.mount(source, self._point, flags)
            try:
                return _Transport(opened, fuse_fd, fast_path=True)
            except OSError as error:
                _log.warning(
                    "no fast path (%s): every request goes through pyfuse3", error.strerror
                )
            # Mounted anew: the old mount allows READs that pyfuse3 cannot answer, and its INIT may
            # have been read already.
            self._clear()
            self._fast_path = stats.NOT_STARTED
            flags = replace(flags, fast_path=False)
        fuse_fd = mounting.mount(source, self._point, flags)
        try:
            return _Transport(opened, fuse_fd, fast_path=False)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                raise NoPermission("net.core.wmem_max", "it must be 256 KiB or more") from None
            raise

    def _clear(self) -> None:
        """Unmount what nobody serves any more, but nothing that was mounted here meanwhile."""
        entry = mounting.mounted_at(self._point)
        if entry is not None and entry.type == mounting.TYPE and mounting.is_dead(self._point):
            mounting.unmount(self._point, lazy=True)

    async def _serve(self, opened: Volume, transport: _Transport) -> None:
        requests = Requests(opened.handle)
        # libfuse closes the descriptor that it is given.
        session = f"/dev/fd/{os.dup(transport.session_fd)}"
        pyfuse3.init(Operations(requests), session, {"fsname=encfsd"})
        self._serving = True
        try:
            # Two nurseries: sleeping handlers cannot be cancelled, so what wakes them ends last.
            async with trio.open_nursery() as outer:
                outer.start_soon(requests.serve)
                async with trio.open_nursery() as inner:
                    inner.start_soon(self._end_with, transport)
                    inner.start_soon(self._announce, transport)
                    inner.start_soon(self._pass_on_log, opened)
                    await pyfuse3.main(min_tasks=_MIN_TASKS, max_tasks=_MAX_TASKS)
                    inner.cancel_scope.cancel()
                outer.cancel_scope.cancel()
        finally:
            self._serving = False
            pyfuse3.close(unmount=False)

    async def _end_with(self, transport: _Transport) -> None:
        await trio.lowlevel.wait_readable(transport.done_fd)
        pyfuse3.terminate()

    async def _announce(self, transport: _Transport) -> None:
        """Report readiness when the mount answers, not before."""
        try:
            await trio.to_thread.run_sync(os.statvfs, self._point, abandon_on_cancel=True)
        except OSError as error:
            init = transport.negotiated()
            if init.max_write == 0:
                version = f"{init.kernel_major}.{init.kernel_minor}"
                old = f"its FUSE protocol {version} is too old: Linux 6.1 or newer is needed"
                self._fail(NoFuseDevice("kernel", old))
            else:
                self._fail(from_oserror(self._point, error))
            pyfuse3.terminate()
            return
        init = transport.negotiated()
        _log.info(
            "mounted: FUSE %d.%d, %s, flags %#x, writes of up to %d KiB",
            init.kernel_major,
            init.kernel_minor,
            "fast path" if transport.fast_path else "all through pyfuse3",
            init.reply_flags,
            init.max_write >> 10,
        )
        command = mounting.tune(self._point)
        if command:
            _log.info("not permitted to raise limits of the mount; as root: %s", command)
        self._notifier.ready("Mounted")
        self._report(None)

    async def _obey_signals(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        """Unmount at the first signal; at the next one cut off programs with open files."""
        told = False
        async for _ in signals:
            if not self._serving:
                _log.info("there is nothing mounted any more; the last changes are being written")
            elif told:
                self._cut_off()
            else:
                told = True
                self._notifier.stopping("Unmounting")
                nursery.start_soon(self._unmount)

    def _cut_off(self) -> None:
        if self._serving:
            pyfuse3.terminate()

    async def _unmount(self) -> None:
        unmount = functools.partial(mounting.unmount, self._point)
        try:
            await self._in_thread(unmount)
        except NotMounted:
            pass
        except FilesOpen:
            _log.warning("files on the mount are still open: writing them back, then cutting off")
            await trio.to_thread.run_sync(mounting.write_back, self._point)
            with contextlib.suppress(EncfsdError):
                await trio.to_thread.run_sync(functools.partial(unmount, lazy=True))
            await trio.sleep(_GRACE_SECONDS)
            self._cut_off()
        except EncfsdError as error:
            _log.error("cannot unmount: %s", error)

    # ---- beside it ----

    async def _pass_on_log(self, opened: Volume) -> None:
        while True:
            _log_lines(opened)
            await trio.sleep(_LOG_SECONDS)

    async def _give_signs_of_life(self, seconds: float) -> None:
        while True:
            self._notifier.alive()
            await trio.sleep(seconds)
