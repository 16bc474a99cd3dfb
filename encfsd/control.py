"""The control socket of a running mount: what its daemon is asked, and by whom.

One JSON object a line, one answer a question. Commands: ``stats``; ``tune``, which is answered when
it is done; and ``wait``, which is answered when the volume is closed. The last two answer with an
exit code and a message. The socket lies in a directory of mode
0700 and its peer must be the same user or root; the client checks the server likewise. Root may
ask the daemon of any mount, and trusts neither what its user keeps in that directory nor what a
daemon of that user answers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio

from encfsd.errors import EncfsdError, NoPermission, NotMounted, printable
from encfsd.mounting import MountEntry, mounted_at

_PEER = struct.Struct("iII")  # struct ucred
_MAX_LINE = 4096
_MAX_ANSWER = 1 << 20
_ANSWER_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_SOCKETS = Path("/proc/net/unix")
_log = logging.getLogger(__name__)

Json = dict[str, Any]


def run_directory(uid: int) -> Path:
    """Return where the sockets of a user's mounts are."""
    if uid == 0:
        return Path("/run/encfsd")
    base = os.environ.get("XDG_RUNTIME_DIR", "") if uid == os.geteuid() else ""
    return (Path(base) if base.startswith("/") else Path(f"/run/user/{uid}")) / "encfsd"


def _socket_name(point: str) -> str:
    """Return the name of the socket. A digest, because socket paths are short."""
    return f"{hashlib.sha256(os.fsencode(point)).hexdigest()[:32]}.sock"


def socket_path(point: str, uid: int) -> Path:
    """Return the socket of the mount at `point`."""
    return run_directory(uid) / _socket_name(point)


def remove_stale_socket(point: str, uid: int) -> None:
    """Remove the socket that a daemon left behind when it was killed; never one that answers."""
    name = _socket_name(point)
    with contextlib.suppress(OSError), _opened(run_directory(uid), uid) as folder:
        try:
            _connect_in(folder, name, uid).close()
        except ConnectionRefusedError:
            os.unlink(name, dir_fd=folder)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(raw)
    return pid, uid


# The daemon's side


def listen(point: str) -> socket.socket:
    """Return a listening socket for the mount at `point`; raise NoPermission."""
    path = socket_path(point, os.geteuid())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NoPermission(path.parent, "it is not a directory of this user")
        if found.st_mode & 0o077:
            raise NoPermission(path.parent, "others may enter it")
        path.unlink(missing_ok=True)  # of a daemon that crashed, or that is just ending
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        server.bind(str(path))
        server.listen()
    except OSError as error:
        raise NoPermission(path, error.strerror or str(error)) from None
    return server


class Server:
    """Answers on the control socket until it is cancelled. A context manager that removes it."""

    def __init__(
        self, point: str, stats: Callable[[], Json], tune: Callable[[str], Awaitable[Json]]
    ) -> None:
        """`stats` and `tune` return the answers to the commands; `tune` gets a size."""
        self._socket = listen(point)
        self._path = socket_path(point, os.geteuid())
        self._inode = self._path.stat().st_ino
        self._stats = stats
        self._tune = tune
        self._ended = trio.Event()
        self._end: Json = {}
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
        # While we were ending, another volume may have been mounted here.
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def refuse_stats(self) -> None:
        """Call before the volume is closed: there is nothing to count any more."""
        self._stats = lambda: {"error": "the volume is being closed"}

    async def end(self, failure: EncfsdError | None) -> None:
        """Answer everybody who waits."""
        code = 0 if failure is None else int(failure.exit_code)
        self._end = {"exit_code": code, "message": "" if failure is None else str(failure)}
        self._ended.set()
        with trio.move_on_after(_ANSWER_SECONDS):
            while self._waiting:  # noqa: ASYNC110  once, at the very end
                await trio.sleep(_ANSWER_SECONDS / 100)

    async def serve(self) -> None:
        """Accept connections and answer on each."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        await trio.serve_listeners(self._talk, [listener])

    async def _talk(self, stream: trio.SocketStream) -> None:
        raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(raw)
        if uid not in (0, os.geteuid()):
            return
        try:
            await self._answer_all(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception as error:  # noqa: BLE001  a question must not end the mount
            _log.error("control socket: %s", type(error).__name__)

    async def _answer_all(self, stream: trio.SocketStream) -> None:
        received = bytearray()
        async for data in stream:
            received += data
            while b"\n" in received:
                line, _, received = received.partition(b"\n")
                self._waiting += 1
                try:
                    answer = await self._answer(bytes(line))
                    await stream.send_all(json.dumps(answer).encode() + b"\n")
                finally:
                    self._waiting -= 1
            if len(received) > _MAX_LINE:
                return

    async def _answer(self, line: bytes) -> Json:
        try:
            question = json.loads(line)
            command, size = question["command"], str(question.get("free-list", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            return {"error": "not a command"}
        if command == "stats":
            return self._stats()
        if command == "tune":
            return await self._tune(size)
        if command == "wait":
            await self._ended.wait()
            return self._end
        return {"error": "unknown command"}


# The commands' side


class Client:
    """A connection to the daemon of one mount; a context manager that closes it. Blocks."""

    def __init__(self, point: str) -> None:
        """Connect; NotMounted if there is no daemon of ours for this mount point."""
        entry = mounted_at(point)
        # The socket outlives the mount while the daemon finishes: then it can only be our own.
        self._socket = _connect(point, entry, os.geteuid() if entry is None else entry.user)
        self._unread = b""
        try:
            self._pidfd = os.pidfd_open(_peer(self._socket)[0])
        except OSError:  # gone already, or in a container whose processes are not seen from here
            self._socket.close()
            raise NotMounted(point, "its daemon cannot be seen from here") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
        os.close(self._pidfd)

    def send(self, command: str, **arguments: str) -> None:
        """Ask; the answer comes with `receive`. BrokenPipeError if the daemon has gone."""
        self._socket.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> Json | None:
        """Return the next answer, or None if the daemon has gone; TimeoutError after `timeout`.

        Its texts can do nothing to a terminal. ValueError if it is no answer; that it holds what
        was asked for is not checked.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._unread[:_MAX_ANSWER]:
            if len(self._unread) >= _MAX_ANSWER:
                raise ValueError("too long")
            if not self._receive_more(deadline):
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = _shown(json.loads(line))
        except RecursionError:
            raise ValueError("too deep") from None
        if not isinstance(answer, dict):
            raise ValueError("not an object")  # noqa: TRY004
        return answer

    def _receive_more(self, deadline: float | None) -> bool:
        """Add what is there to what has been received; False if the daemon has gone."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(_MAX_ANSWER)
        except ConnectionError:
            return False
        self._unread += data
        return bool(data)

    def wait_for_exit(self, timeout: float) -> bool:
        """Wait until the daemon's process is gone, at most `timeout` seconds."""
        return bool(select.select([self._pidfd], [], [], max(0.0, timeout))[0])


def _shown(value: Any) -> Any:
    """Return the same with every text in it made safe for a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): _shown(each) for name, each in value.items()}
    return value


def _connect(point: str, entry: MountEntry | None, uid: int) -> socket.socket:
    name = _socket_name(point)
    for directory in _directories(name, uid):
        try:
            with _opened(directory, uid) as folder:
                return _connect_in(folder, name, uid)
        except PermissionError:
            if os.geteuid() != 0:
                raise NoPermission(point, "the mount belongs to another user") from None
        except OSError:
            pass
    raise NotMounted(point, "no daemon answers for what is mounted there" if entry else "")


def _directories(name: str, uid: int) -> Iterator[Path]:
    """Return where the daemon of a mount of this user may have its socket.

    Only that user knows the XDG_RUNTIME_DIR it had; root takes the kernel's list of sockets.
    """
    yield run_directory(uid)
    if os.geteuid() == 0 and uid != 0:
        for line in _SOCKETS.read_bytes().splitlines():
            path = Path(os.fsdecode(line.split(maxsplit=7)[-1]))
            if path.is_absolute() and path.name == name:
                yield path.parent


@contextlib.contextmanager
def _opened(directory: Path, uid: int) -> Iterator[int]:
    """Open the directory of the sockets of a user; OSError if others may have put them there."""
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != uid or found.st_mode & 0o077:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        yield folder
    finally:
        os.close(folder)


def _connect_in(folder: int, name: str, uid: int) -> socket.socket:
    """Connect to a daemon of `uid` by the socket `name`, never by what a link there leads to.

    Raises OSError; ConnectionRefusedError if nobody listens.
    """
    node = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(f"/proc/self/fd/{node}")
        if _peer(connection)[1] != uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # noqa: TRY301
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(node)
    return connection
