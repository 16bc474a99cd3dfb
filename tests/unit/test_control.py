"""The control socket: who may ask, what is answered, how it ends."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from encfsd import control
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
