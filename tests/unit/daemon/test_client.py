"""The small client against a server of the standard library and the daemon's own WebSocket."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from seedance.daemon.client import ApiRefused, Client
from seedance.daemon.protocol.handshake import accept_response_headers
from seedance.daemon.protocol.head import parse_head
from seedance.daemon.protocol.response import switching_head
from seedance.daemon.protocol.websocket import TextReceived, WebSocketServer, frame_text
from seedance.errors import RemoteProtocolError, ResourceBroken

MESSAGES = [{"role": "user", "content": "Hello"}]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as its class says."""

    answer = b""
    status = 200
    seen: ClassVar[list[dict[str, object]]] = []

    def do_GET(self) -> None:
        self._reply(json.dumps({"data": [{"id": "a model"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append({"authorization": self.headers["Authorization"], **json.loads(body)})
        self._reply(self.answer)

    def _reply(self, body: bytes) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Handler.status, Handler.seen = 200, []
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield "{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def _chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def test_a_chat_is_the_deltas_between_comments(address: str) -> None:
    Handler.answer = b": ping\n\n" + _chunk("Hel") + b": ping\n\n" + _chunk("lo") + b'data: {"choices":[]}\n\n'
    Handler.answer += b"data: [DONE]\n\n"
    client = Client(address, "sk-key")
    assert client.model() == "a model"
    assert list(client.chat(MESSAGES, model="m", max_tokens=3)) == ["Hel", "lo"]
    assert Handler.seen == [
        {"authorization": "Bearer sk-key", "messages": MESSAGES, "stream": True, "model": "m", "max_tokens": 3}
    ]


def test_an_error_in_mid_stream_and_a_stream_without_end_are_told(address: str) -> None:
    Handler.answer = _chunk("a") + b'data: {"error": {"message": "cannot go on"}}\n\n'
    stream = Client(address, "k").chat(MESSAGES)
    assert next(stream) == "a"
    with pytest.raises(ApiRefused, match="cannot go on"):
        next(stream)
    Handler.answer = _chunk("a")
    with pytest.raises(ResourceBroken, match="ended before"):
        list(Client(address, "k").chat(MESSAGES))


@pytest.mark.parametrize(
    ("body", "text"), [(b'{"error": {"message": "cannot, no"}}', "cannot, no"), (b"<html>", "<html>"), (b"[]", "[]")]
)
def test_a_refusal_is_told_in_the_servers_words(address: str, body: bytes, text: str) -> None:
    Handler.answer, Handler.status = body, 429
    with pytest.raises(ApiRefused) as refused:
        list(Client(address, "k").chat(MESSAGES))
    assert str(refused.value) == f"{text} (HTTP 429)"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nowhere/at/all"])
def test_without_a_server_the_question_is_whether_it_runs(address: str) -> None:
    with pytest.raises(ResourceBroken, match="is it running\\?"):
        Client(address, "k").model()


@contextlib.contextmanager
def _websocket_server(path: Path, serve: Callable[[socket.socket, WebSocketServer, bytes], None]) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                data = b""
                while (request := parse_head(data)) is None:
                    data += sock.recv(4096)
                headers = accept_response_headers(request, ("seedance.json.v1",))
                sock.sendall(switching_head(headers))
                server = WebSocketServer()
                message = None
                while message is None:
                    server.receive_data(sock.recv(65536))
                    message = next(
                        (event for event in server.events_received() if isinstance(event, TextReceived)), None
                    )
                text = message.text
                serve(sock, server, text.encode() if isinstance(text, str) else text)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"unix:{path}"
        thread.join(10)


def test_infer_reads_deltas_of_every_length_and_answers_pings(tmp_path: Path) -> None:
    texts = ["a", "b" * 1000, "c" * 70_000]
    asked: list[object] = []

    def serve(sock: socket.socket, server: WebSocketServer, message: bytes) -> None:
        asked.append(json.loads(message))
        sock.sendall(b"\x89\x02hi")
        server.receive_data(sock.recv(100))
        asked.append([type(event).__name__ for event in server.events_received()])
        for text in texts:
            sock.sendall(frame_text(json.dumps({"delta": text}).encode()))
        sock.sendall(frame_text(b'{"finish_reason": "length", "usage": {}}'))

    with _websocket_server(tmp_path / "s", serve) as address:
        assert "".join(Client(address, "k").infer("Once", max_tokens=3)) == "".join(texts)
    assert asked == [{"prompt": "Once", "stream": True, "max_tokens": 3}, ["PongReceived"]]


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (frame_text(b'{"error": {"message": "cannot now"}}'), ApiRefused, "cannot now"),
        (b"\x88\x06\x03\xe9away", ResourceBroken, "away"),
        (b"\x01\x01{", RemoteProtocolError, "several frames"),
        (b"\x81\x05{", ResourceBroken, "broke"),
    ],
)
def test_infer_tells_what_went_wrong(tmp_path: Path, answer: bytes, error: type[Exception], text: str) -> None:
    server = _websocket_server(tmp_path / "s", lambda sock, *_: sock.sendall(answer))
    with server as address, pytest.raises(error, match=text):
        list(Client(address, "k").infer("Once"))


def test_a_refused_handshake_is_told(address: str) -> None:
    Handler.status = 401
    with pytest.raises(ApiRefused) as refused:
        list(Client(address, "k").infer("Once"))
    assert refused.value.status == 401
