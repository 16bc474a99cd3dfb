"""The control socket: who may ask, what is answered, how it ends."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from encfsd import control, mounting
from encfsd.errors import NoPermission, NotMounted, VolumeInUse

POINT = "/some/mount point"


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setattr(control, "run_directory", lambda _: folder)
    return folder


def ask(*lines: bytes) -> list[object]:
    """Send lines to the socket one after another; return the answers."""
    answers: list[object] = []
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(control.socket_path(POINT, os.geteuid())))
        file = client.makefile("rb")
        for line in lines:
            client.sendall(line)
            answer = file.readline()
            answers.append(json.loads(answer) if answer else None)
        file.close()
    return answers


async def tune(size: str) -> control.Json:
    return {"exit_code": 0, "message": size}


def with_server(stats: Callable[[], control.Json], client: Callable[[], object]) -> object:
    """Run `client` in a thread while a server answers; then end the server with a failure."""
    result: list[object] = []

    async def main() -> None:
        with control.Server(POINT, stats, tune) as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve)
                result.append(await trio.to_thread.run_sync(client))
                await server.end(VolumeInUse("src"))
                nursery.cancel_scope.cancel()

    trio.run(main)
    return result[0]


def test_answers(run_directory: Path) -> None:
    answers = with_server(
        lambda: {"requests": 7},
        lambda: ask(
            b'{"command":"stats"}\n',
            b'{"command":"tune","free-list":"4G"}\n',
            b"nonsense\n",
            b"[1]\n",
            b'{"command":"fly"}\n',
        ),
    )
    assert answers == [
        {"requests": 7},
        {"exit_code": 0, "message": "4G"},
        {"error": "not a command"},
        {"error": "not a command"},
        {"error": "unknown command"},
    ]
    assert list(run_directory.iterdir()) == []


def test_a_line_without_end_is_cut_off() -> None:
    assert with_server(dict, lambda: ask(b"x" * 5000)) == [None]


def test_a_failing_answer_ends_the_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> control.Json:
        raise RuntimeError("secret")

    stats = b'{"command":"stats"}\n'
    answers = with_server(fail, lambda: [ask(stats), ask(b'{"command":"fly"}\n')])
    assert answers == [[None], [{"error": "unknown command"}]]
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_who_waits_is_told_the_end() -> None:
    async def main() -> None:
        answers: list[object] = []
        with control.Server(POINT, dict, tune) as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve)

                async def wait() -> None:
                    answers.extend(
                        await trio.to_thread.run_sync(lambda: ask(b'{"command":"wait"}\n'))
                    )

                async with trio.open_nursery() as waiters:
                    waiters.start_soon(wait)
                    while not server._waiting:
                        await trio.lowlevel.checkpoint()
                    await server.end(VolumeInUse("src"))
                nursery.cancel_scope.cancel()
        assert answers == [{"exit_code": 34, "message": str(VolumeInUse("src"))}]

    trio.run(main)


def test_others_are_answered_while_something_is_tuned() -> None:
    async def main() -> None:
        asked = trio.Event()

        def stats() -> control.Json:
            asked.set()
            return {}

        async def long(size: str) -> control.Json:
            await asked.wait()
            return await tune(size)

        answers: list[object] = []

        async def question(line: bytes) -> None:
            answers.extend(await trio.to_thread.run_sync(ask, line))

        with control.Server(POINT, stats, long) as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve)
                async with trio.open_nursery() as clients:
                    clients.start_soon(question, b'{"command":"tune","free-list":"1G"}\n')
                    while not server._waiting:
                        await trio.lowlevel.checkpoint()
                    clients.start_soon(question, b'{"command":"stats"}\n')
                nursery.cancel_scope.cancel()
        assert {} in answers
        assert {"exit_code": 0, "message": "1G"} in answers

    trio.run(main)


def test_nobody_there() -> None:
    with pytest.raises(NotMounted):
        control.Client(POINT)


def test_a_socket_goes_only_if_nobody_listens() -> None:
    path = control.socket_path(POINT, os.geteuid())
    with control.listen(POINT):
        control.remove_stale_socket(POINT, os.geteuid())
        assert path.exists()
    control.remove_stale_socket(POINT, os.geteuid())
    assert not path.exists()
    control.remove_stale_socket(POINT, os.geteuid())


def test_the_socket_of_a_successor_is_left_alone() -> None:
    async def main() -> None:
        with control.Server(POINT, dict, tune):
            successor = control.Server(POINT, dict, tune)
        assert control.socket_path(POINT, os.geteuid()).exists()
        with successor:
            pass
        assert not control.socket_path(POINT, os.geteuid()).exists()

    trio.run(main)


def test_a_directory_that_others_may_enter_is_refused(run_directory: Path) -> None:
    run_directory.mkdir(mode=0o755)
    with pytest.raises(NoPermission, match="others may enter"):
        control.listen(POINT)
    run_directory.rmdir()
    run_directory.symlink_to("/tmp")
    with pytest.raises(NoPermission):
        control.listen(POINT)


def test_the_directory_is_private(run_directory: Path) -> None:
    control.listen(POINT).close()
    assert run_directory.stat().st_mode & 0o777 == 0o700


# ---- what somebody else may have put there ----


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_links_are_not_followed(run_directory: Path, tmp_path: Path) -> None:
    run_directory.mkdir(mode=0o700)
    with listening(tmp_path / "other"):
        control.socket_path(POINT, os.geteuid()).symlink_to(tmp_path / "other")
        with pytest.raises(NotMounted):
            control.Client(POINT)
        run_directory.rename(tmp_path / "real")
        run_directory.symlink_to(tmp_path / "real")
        control.remove_stale_socket(POINT, os.geteuid())
        assert (tmp_path / "real" / control.socket_path(POINT, 0).name).is_symlink()


def test_a_directory_in_which_others_write_is_not_used(run_directory: Path) -> None:
    with control.listen(POINT):
        control.Client(POINT).__exit__(None, None, None)
        run_directory.chmod(0o770)
        with pytest.raises(NotMounted):
            control.Client(POINT)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_socket_of_another_user_is_not_used(run_directory: Path) -> None:
    entry = mounting.MountEntry(POINT, "0:1", mounting.TYPE, "/src", 12345)
    with control.listen(POINT):
        os.chown(run_directory, 12345, -1)
        with pytest.raises(NotMounted):
            control._connect(POINT, entry, 12345)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks for sockets of others")
def test_where_root_looks(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = tmp_path / "unix"
    lines = ["Num Path", "0: 2 0 0 1 1 7 /a b/name", "0: 2 0 0 1 1 8 name", "0: 3 0 0 1 3 9"]
    sockets.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(control, "_SOCKETS", sockets)
    assert list(control._directories("name", 0)) == [run_directory]
    assert list(control._directories("name", 7)) == [run_directory, Path("/a b")]


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense",
        b"[1]",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":"' + b"x" * (1 << 20) + b'"}',
        b"1" * 10_000,
    ],
    ids=["text", "list", "deep", "long", "large"],
)
def test_what_is_no_answer(run_directory: Path, answer: bytes) -> None:
    with replying(run_directory, answer) as client, pytest.raises(ValueError, match=r"."):
        client.receive(10)


def test_an_answer_does_nothing_to_a_terminal(run_directory: Path) -> None:
    with replying(run_directory, b'{"a\\u001b":["\\u001b[2J", 1, {"b": "c\\nd"}]}') as client:
        assert client.receive(10) == {"a\\x1b": ["\\x1b[2J", 1, {"b": "c\\nd"}]}


def test_an_answer_that_drips_in_is_not_waited_for(run_directory: Path) -> None:
    with replying(run_directory, b" " * 1000, pause=0.02) as client, pytest.raises(TimeoutError):
        client.receive(0.2)


@contextlib.contextmanager
def replying(run_directory: Path, answer: bytes, *, pause: float = 0) -> Iterator[control.Client]:
    """Connect to a daemon that gives one answer, byte by byte if it pauses."""

    def reply() -> None:
        pieces = [bytes([byte]) for byte in answer] if pause else [answer + b"\n"]
        with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)

    run_directory.mkdir(mode=0o700)
    with listening(control.socket_path(POINT, os.geteuid())) as server:
        thread = threading.Thread(target=reply)
        thread.start()
        with control.Client(POINT) as client:
            yield client
        thread.join()
