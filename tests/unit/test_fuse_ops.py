"""Handlers against a volume that is not there: errors, cancellation, what pyfuse3 is told."""

import errno
import logging
from collections.abc import Callable
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FileHandleT, FUSEError, InodeT

from encfsd import requests as requests_module
from encfsd.fuse_ops import Operations
from encfsd.native import ffi, lib
from encfsd.requests import Requests

CTX: Any = None  # handlers that ignore the caller


class FakeLib:
    """Answers requests with `answer`, at once or when `complete` is called."""

    REQUEST_PARKED = lib.REQUEST_PARKED

    def __init__(self, answer: Callable[[Any], int], *, park: bool = False) -> None:
        self.answer = answer
        self.park = park
        self.parked: list[Any] = []
        self.completed: list[Any] = []
        self.forgotten: list[tuple[int, int]] = []
        self.writers: list[tuple[int, int]] = []
        self.wake, self.wait = trio.socket.socketpair()

    def request_start(self, _: Any, request: Any) -> int:
        if self.park:
            self.parked.append(request)
            return int(lib.REQUEST_PARKED)
        request.result = self.answer(request)
        return int(lib.REQUEST_DONE)

    def request_completion_fd(self, _: Any) -> int:
        return self.wait.fileno()

    def request_next_completed(self, _: Any) -> Any:
        return self.completed.pop(0) if self.completed else ffi.NULL

    def request_forget(self, _: Any, ino: int, lookups: int) -> None:
        self.forgotten.append((ino, lookups))

    def request_note_writer(self, _: Any, ino: int, change: int) -> None:
        self.writers.append((ino, change))

    async def complete(self) -> None:
        """Answer everything that is parked, the last first."""
        for request in reversed(self.parked):
            request.result = self.answer(request)
            self.completed.append(request)
        self.parked.clear()
        await self.wake.send(b"x")


def operations(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], int], *, park: bool = False
) -> tuple[Operations, Requests, FakeLib]:
    fake = FakeLib(answer, park=park)
    monkeypatch.setattr(requests_module, "lib", fake)
    made = Requests(None)
    return Operations(made), made, fake


def close(fake: FakeLib) -> None:
    fake.wake.close()
    fake.wait.close()


def test_attributes_of_any_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Any) -> int:
        assert (request.op, request.ino) == (lib.REQ_GETATTR, 7)
        request.attr.ino = 7
        request.attr.mode = 0o100644
        request.attr.size = 1 << 50
        request.attr.blocks = 8
        request.attr.nlink = 3
        request.attr.rdev = 0x12345678
        request.attr.atime, request.attr.mtime, request.attr.ctime = -1, -(10**18), 10**18 + 1
        return 0

    async def main() -> None:
        ops, _, fake = operations(monkeypatch, answer)
        entry = await ops.getattr(InodeT(7), CTX)
        assert (entry.st_ino, entry.st_mode, entry.st_size) == (7, 0o100644, 1 << 50)
        assert (entry.st_blocks, entry.st_nlink, entry.st_rdev) == (8, 3, 0x12345678)
        assert entry.st_atime_ns == -1
        assert entry.st_mtime_ns == -(10**18)
        assert entry.st_ctime_ns == 10**18 + 1
        assert entry.attr_timeout == entry.entry_timeout == 3600
        close(fake)

    trio.run(main)


def test_an_empty_file_is_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Any) -> int:
        request.attr.mode = {1: 0o100644, 2: 0o040755}[request.ino]
        return 0

    async def main() -> None:
        ops, _, fake = operations(monkeypatch, answer)
        assert (await ops.getattr(InodeT(1), CTX)).st_blocks == 1
        assert (await ops.getattr(InodeT(2), CTX)).st_blocks == 0
        close(fake)

    trio.run(main)


def test_negative_errno_becomes_a_fuse_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ops, _, fake = operations(monkeypatch, lambda _: -errno.ENOSPC)
        with pytest.raises(FUSEError) as caught:
            await ops.write(FileHandleT(5), 0, b"data")
        assert caught.value.errno == errno.ENOSPC
        close(fake)

    trio.run(main)


def test_an_absent_name_is_remembered_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ops, _, fake = operations(monkeypatch, lambda _: -errno.ENOENT)
        entry = await ops.lookup(pyfuse3.ROOT_INODE, pyfuse3.FileNameT(b"x"), CTX)
        assert (entry.st_ino, entry.entry_timeout) == (0, 3600)
        fake.answer = lambda _: -errno.EIO
        with pytest.raises(FUSEError) as caught:
            await ops.lookup(pyfuse3.ROOT_INODE, pyfuse3.FileNameT(b"x"), CTX)
        assert caught.value.errno == errno.EIO
        close(fake)

    trio.run(main)


def test_what_nobody_expects_becomes_eio_and_tells_no_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: Any) -> int:
        raise ValueError("secret-name")

    async def main() -> None:
        ops, _, fake = operations(monkeypatch, answer)
        with pytest.raises(FUSEError) as caught:
            await ops.lookup(InodeT(42), pyfuse3.FileNameT(b"secret-name"), CTX)
        assert caught.value.errno == errno.EIO
        close(fake)

    with caplog.at_level(logging.INFO):
        trio.run(main)
    assert "lookup of inode 42 failed: ValueError at answer:" in caplog.text
    assert "secret-name" not in caplog.text


def test_parked_requests_wake_the_task_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Any) -> int:
        data = bytes([request.ino]) * 4
        ffi.buffer(request.buffer, 4)[:] = data
        return 4

    async def main() -> None:
        ops, made, fake = operations(monkeypatch, answer, park=True)
        got: dict[int, bytes] = {}

        async def read(ino: int) -> None:
            got[ino] = bytes(await ops.read(FileHandleT(ino), 0, 4096))

        async with trio.open_nursery() as outer:
            outer.start_soon(made.serve)
            async with trio.open_nursery() as readers:
                for ino in (1, 2, 3):
                    readers.start_soon(read, ino)
                await trio.testing.wait_all_tasks_blocked()
                assert got == {}
                assert len(fake.parked) == 3
                await fake.complete()
            outer.cancel_scope.cancel()
        assert got == {ino: bytes([ino]) * 4 for ino in (1, 2, 3)}
        close(fake)

    trio.run(main)


def test_a_parked_request_cannot_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """C still writes to its buffer."""

    async def main() -> None:
        ops, made, fake = operations(monkeypatch, lambda _: 0, park=True)
        async with trio.open_nursery() as outer:
            outer.start_soon(made.serve)
            finished = []

            async def fsync() -> None:
                await ops.fsync(FileHandleT(9), datasync=True)
                finished.append(True)

            async with trio.open_nursery() as inner:
                inner.start_soon(fsync)
                await trio.testing.wait_all_tasks_blocked()
                inner.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    assert not finished
                    assert (fake.parked[0].op, fake.parked[0].flags) == (lib.REQ_FSYNC, 1)
                    await fake.complete()
            assert finished
            outer.cancel_scope.cancel()
        close(fake)

    trio.run(main)


def test_recycled_requests_carry_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def answer(request: Any) -> int:
        seen.append((request.op, request.name_len, request.offset, request.size))
        return 0

    async def main() -> None:
        ops, made, fake = operations(monkeypatch, answer)
        await ops.write(FileHandleT(5), 1000, b"data")
        await ops.fsync(FileHandleT(5), datasync=False)
        assert len(made._spare) == 1
        close(fake)

    trio.run(main)
    assert seen == [(lib.REQ_WRITE, 0, 1000, 4), (lib.REQ_FSYNC, 0, 0, 0)]


def test_writers_are_counted_by_their_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ops, _, fake = operations(monkeypatch, lambda _: 0)
        reader = await ops.open(InodeT(5), pyfuse3.FlagT(0), CTX)
        writer = await ops.open(InodeT(5), pyfuse3.FlagT(2), CTX)
        assert fake.writers == [(5, 1)]
        await ops.release(reader.fh)
        assert fake.writers == [(5, 1)]
        await ops.release(writer.fh)
        assert fake.writers == [(5, 1), (5, -1)]
        close(fake)

    trio.run(main)


@pytest.mark.parametrize("room", [0, 1, 3, 30, 200])
def test_entries_that_do_not_fit_are_forgotten(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    total = 150
    looked_up: list[int] = []
    reported: list[tuple[bytes, int]] = []

    def answer(request: Any) -> int:
        entries = ffi.cast("struct ns_dirent *", request.buffer)
        first = request.offset
        count: int = min(request.size, total - first)
        for i in range(count):
            number = first + i
            name = {0: b".", 1: b".."}.get(number, b"n%d" % number)
            ffi.buffer(entries + i)[:] = bytes(ffi.sizeof("struct ns_dirent"))
            entries[i].cookie = number + 1
            entries[i].attr.ino = 1000 + number
            entries[i].name_len = len(name)
            ffi.buffer(entries[i].name, len(name))[:] = name
            if number > 1:
                looked_up.append(1000 + number)
        return count

    def reply(_: object, name: bytes, entry: Any, cookie: int) -> bool:
        if len(reported) == room:
            return False
        assert entry.st_ino == 999 + cookie
        reported.append((name, cookie))
        return True

    async def main() -> None:
        ops, _, fake = operations(monkeypatch, answer)
        monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
        await ops.readdir(FileHandleT(1), 0, CTX)
        names = [name for name, _ in reported]
        assert len(names) == min(room, total)
        assert names[:3] == [b".", b"..", b"n2"][: len(names)]
        assert [cookie for _, cookie in reported] == list(range(1, len(names) + 1))
        held = {999 + cookie for _, cookie in reported[2:]}
        assert all(n == 1 for _, n in fake.forgotten)
        assert sorted(held | {ino for ino, _ in fake.forgotten}) == sorted(looked_up)
        assert len(held) + len(fake.forgotten) == len(looked_up)
        close(fake)

    trio.run(main)
