"""The control socket, both ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.daemon.control import (
    ControlServer,
    Failed,
    GetStatus,
    Reload,
    Reloaded,
    Reply,
    Request,
    Stop,
    Stopping,
    ask,
)
from seedance.daemon.sockets import listen_unix
from seedance.errors import ResourceBroken


async def _answer(request: Request) -> Reply:
    match request:
        case Reload():
            return Reloaded(added=["acme"], changed=[], removed=[], bad_files=[])
        case Stop():
            return Stopping(7)
        case GetStatus():
            return Failed("cannot say")


@contextlib.contextmanager
def _served(where: str) -> Iterator[None]:
    """Run a server in a thread."""
    server = ControlServer(listen_unix(where, 0o600), _answer)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        await server.start()
        started.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
    assert not Path(where).exists()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """The path of a server's socket."""
    where = str(tmp_path / "control.sock")
    with _served(where):
        yield where


def test_each_request_gets_its_reply(path: str) -> None:
    assert ask(path, Stop()) == Stopping(7)
    assert ask(path, Reload()) == Reloaded(added=["acme"], changed=[], removed=[], bad_files=[])
    assert ask(path, GetStatus()) == Failed("cannot say")


def test_nonsense_is_answered_and_a_line_without_end_ends_the_connection(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(path)
        sock.sendall(b'{"request":"unheard of"}\n')
        assert sock.recv(1000).startswith(b'{"reply":"failed"')
        sock.sendall(bytes(200_000))
        with contextlib.suppress(ConnectionResetError):  # it closed with input unread
            assert sock.recv(1000) == b""
    assert ask(path, Stop()) == Stopping(7)


def test_an_open_connection_does_not_keep_the_server(tmp_path: Path) -> None:
    where = str(tmp_path / "control.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        with _served(where):
            sock.connect(where)
            sock.sendall(b'{"request":"stop"}\n')
            assert sock.recv(1000).startswith(b'{"reply":"stop"')
        assert sock.recv(1000) == b""


def test_where_nobody_listens_the_question_is_whether_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ResourceBroken, match="is it running\\?"):
        ask(str(tmp_path / "none"), GetStatus())


def test_an_answer_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    where = str(tmp_path / "sock")
    with listen_unix(where, 0o600) as listener:
        listener.setblocking(True)

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"what?\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ResourceBroken, match="cannot read the answer"):
            ask(where, GetStatus())
        thread.join()
