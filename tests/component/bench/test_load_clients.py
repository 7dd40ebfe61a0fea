"""The load clients count right, however the bytes are cut: the figures of the comparisons stand on them."""

from __future__ import annotations

import array
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.contender import read_times
from bench.frontend import infer_entries
from bench.processes import LineProcess
from seedance.daemon.protocol.fm_frame import frame as fm_frame
from seedance.daemon.protocol.fm_frame import split_message
from seedance.daemon.protocol.fm_messages import (
    Accept,
    Ack,
    End,
    Hello,
    Infer,
    Message,
    Ping,
    Pong,
    Tokens,
    Welcome,
    decode_payload,
    encode_payload,
)

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 20.0
UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)
WELCOME = Welcome(
    session_id="s",
    epoch=1,
    resume_token="t",
    resume_for_ms=1000,
    oldest_seq=1,
    next_seq=1,
    last_seq=0,
    window=128,
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    build = tmp_path_factory.mktemp("bench")
    for name in ("fanout_client", "sse_client", "fm_client"):
        command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(build / name)]
        subprocess.run([*command, str(ROOT / f"bench/{name}.c"), str(ROOT / "bench/load.c")], check=True)
    return build


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def client(argv: list[str], pass_fds: tuple[int, ...] = ()) -> Iterator[LineProcess]:
    process = LineProcess(argv, [0], pass_fds)
    try:
        yield process
    finally:
        process.stop()


def accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_head(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    return data


def frame(opcode: int, payload: bytes, *, fin: bool = True) -> bytes:
    first = bytes([opcode | (0x80 if fin else 0)])
    size = len(payload)
    if size < 126:
        return first + bytes([size]) + payload
    if size < 65536:
        return first + b"\x7e" + size.to_bytes(2) + payload
    return first + b"\x7f" + size.to_bytes(8) + payload


def whole(data: bytes) -> list[bytes]:
    return [data]


def in_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def in_sevens(data: bytes) -> list[bytes]:
    return [data[at : at + 7] for at in range(0, len(data), 7)]


def send_cut(connection: socket.socket, data: bytes, cut: Callable[[bytes], list[bytes]]) -> None:
    for piece in cut(data):
        connection.sendall(piece)


def fields(answer: list[str]) -> dict[str, int]:
    return {key: int(value) for key, value in (field.split("=") for field in answer)}


@pytest.mark.parametrize("cut", [whole, in_bytes, in_sevens])
def test_frames_are_counted_however_they_are_cut(programs: Path, cut: Callable[[bytes], list[bytes]]) -> None:
    frames = [
        frame(2, b"x" * 16),
        frame(1, b""),
        frame(2, b"y" * 125),
        frame(2, b"z" * 300),
        frame(9, b""),
        frame(1, b"one ", fin=False),
        frame(10, b"pong between"),
        frame(0, b"message"),
    ]
    if cut is not in_bytes:
        frames.append(frame(2, b"w" * 70_000))
    messages = len(frames) - 3
    payload = sum(size for size in (16, 0, 125, 300, 4, 7, 70_000 if cut is not in_bytes else 0))
    argv = [str(programs / "fanout_client"), "--path", "/v2/infer", "--header", "Authorization: Bearer k"]
    with listening() as (listener, target), client([*argv, "--connect", target]) as load:
        load.tell("connect 1")
        with accept(listener) as connection:
            head = read_head(connection)
            assert head.startswith(b"GET /v2/infer HTTP/1.1\r\n")
            assert b"\r\nAuthorization: Bearer k\r\n" in head
            send_cut(connection, UPGRADED, cut)
            load.hear("connected", WAIT_S)
            load.ask(f"expect {messages}", "armed")
            send_cut(connection, b"".join(frames), cut)
            counted = fields(load.hear("received", WAIT_S))
            # The ping was answered, masked.
            assert connection.recv(100) == b"\x8a\x80\0\0\0\0"
    assert counted["messages"] == messages
    assert counted["payload_bytes"] == payload
    assert counted["bytes"] == sum(map(len, frames))
    assert counted["lost"] == 0
    assert counted["first_ns"] <= counted["last_ns"] <= time.monotonic_ns()


def test_a_message_goes_out_masked_on_every_connection(programs: Path) -> None:
    with listening() as (listener, target), client([str(programs / "fanout_client"), "--connect", target]) as load:
        load.tell("connect 2")
        connections = [accept(listener), accept(listener)]
        for connection in connections:
            read_head(connection)
            connection.sendall(UPGRADED)
        load.hear("connected", WAIT_S)
        text = '{"prompt":"' + "x" * 200 + '"}'
        assert load.ask(f"message {text}", "sent") == ["2"]
        for connection in connections:
            wanted = b"\x81\xfe" + len(text).to_bytes(2) + bytes(4) + text.encode()
            got = b""
            while len(got) < len(wanted):
                got += connection.recv(4096)
            assert got == wanted
            connection.close()


def test_a_lost_connection_ends_the_run(programs: Path) -> None:
    with listening() as (listener, target), client([str(programs / "fanout_client"), "--connect", target]) as load:
        load.tell("connect 1")
        with accept(listener) as connection:
            read_head(connection)
            connection.sendall(UPGRADED)
            load.hear("connected", WAIT_S)
            load.ask("expect 5", "armed")
            connection.sendall(frame(2, b"x"))
        counted = fields(load.hear("received", WAIT_S))
    assert (counted["messages"], counted["lost"]) == (1, 1)


def test_the_next_batch_is_written_when_half_of_the_last_has_arrived(programs: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    batches = tmp_path / "batches"
    batches.write_bytes(b"".join((5).to_bytes(4, "little") + text for text in (b"step0", b"step1")))
    argv = [str(programs / "fanout_client"), "--feed-fd", str(theirs.fileno())]
    with (
        ours,
        theirs,
        listening() as (listener, target),
        client([*argv, "--connect", target], (theirs.fileno(),)) as load,
    ):
        ours.settimeout(WAIT_S)
        load.tell("connect 2")
        connections = [accept(listener), accept(listener)]
        for connection in connections:
            read_head(connection)
            connection.sendall(UPGRADED)
        load.hear("connected", WAIT_S)
        assert load.ask(f"batches {batches}", "loaded") == ["2"]
        load.tell("feed 3")
        assert ours.recv(100) == b"step0"
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
        ours.settimeout(WAIT_S)
        connections[0].sendall(frame(2, b"x"))
        assert ours.recv(100) == b"step1"
        for _ in range(2):
            connections[1].sendall(frame(2, b"x"))
        assert ours.recv(100) == b"step0"
        for connection, count in zip(connections, (2, 1), strict=True):
            connection.sendall(frame(2, b"x") * count)
        counted = fields(load.hear("received", WAIT_S))
        assert counted["messages"] == 6
        assert 0 < counted["start_ns"] <= counted["first_ns"]
        for connection in connections:
            connection.close()


def test_arrival_times_are_kept_by_connection_and_step(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "times"
    with listening() as (listener, target), client([str(programs / "fanout_client"), "--connect", target]) as load:
        load.tell("connect 1")
        with accept(listener) as connection:
            read_head(connection)
            connection.sendall(UPGRADED)
            load.hear("connected", WAIT_S)
            load.ask(f"record 2 {path}", "armed")
            before_ns = time.monotonic_ns()
            connection.sendall(frame(2, b"x"))
            connection.sendall(frame(2, b"y"))
            load.hear("received", WAIT_S)
    times = read_times(path).tolist()
    assert times[:2] == [0, 0]
    assert before_ns <= times[2] <= times[3] <= time.monotonic_ns()


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("cut", [whole, in_bytes, in_sevens])
@pytest.mark.parametrize("chunk_bytes", [1, 11, 4096])
def test_events_are_counted_however_they_are_cut(
    programs: Path, tmp_path: Path, cut: Callable[[bytes], list[bytes]], chunk_bytes: int
) -> None:
    body = b': ping\n\ndata: {"a": "data: no"}\n\ndata: {}\r\n\r\nid: 3\ndata: x\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body, chunk_bytes)
    request = tmp_path / "request"
    request.write_bytes(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    argv = [str(programs / "sse_client"), "--request", str(request)]
    with (
        listening() as (listener, target),
        client([*argv, "--connect", target]) as load,
        serving(listener, answer, cut),
    ):
        for _ in range(2):  # the second round is on the same connections
            counted = fields(load.ask("round 2", "finished", WAIT_S))
            assert (counted["streams"], counted["done"], counted["events"]) == (2, 2, 6)
            assert counted["bytes"] == 2 * len(answer)
            assert counted["start_ns"] <= counted["first_ns"] <= counted["end_ns"]


@contextmanager
def serving(listener: socket.socket, answer: bytes, cut: Callable[[bytes], list[bytes]]) -> Iterator[None]:
    """Answer every request of two connections until they close."""

    def serve() -> None:
        with accept(listener) as connection:
            while request := connection.recv(4096):
                assert request.endswith(b"{}")
                send_cut(connection, answer, cut)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield


def test_gaps_between_messages_are_kept_by_connection(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "gaps"
    with listening() as (listener, target), client([str(programs / "fanout_client"), "--connect", target]) as load:
        load.tell("connect 2")
        connections = [accept(listener), accept(listener)]
        for connection in connections:
            read_head(connection)
            connection.sendall(UPGRADED)
        load.hear("connected", WAIT_S)
        load.ask("gaps", "watching")
        begun_ns = time.monotonic_ns()
        for connection, count in zip(connections, (3, 1), strict=True):
            connection.sendall(frame(1, b"x") * count)
        while fields(load.ask("counters", "counters"))["messages"] < 4:
            pass
        assert load.ask(f"gaps {path}", "gaps") == ["2", "0"]
        elapsed_us = (time.monotonic_ns() - begun_ns) // 1000
        for connection in connections:
            connection.close()
    gaps = array.array("I", path.read_bytes())
    assert len(gaps) == 2
    assert sum(gaps) <= elapsed_us


def unmasked(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return the whole frames of a client whose masks are zero, and what is left."""
    found = []
    while len(data) >= 2:
        head, size = 6, data[1] & 0x7F
        if size == 126:
            head, size = 8, int.from_bytes(data[2:4])
        if len(data) < head + size:
            break
        found.append((data[0] & 0x0F, data[head : head + size]))
        data = data[head + size :]
    return found, data


class FmPeer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket, cut: Callable[[bytes], list[bytes]]) -> None:
        self._connection = connection
        self._cut = cut
        self._rest = b""
        self.heard: list[Message] = []

    def hear(self, kind: type, count: int) -> list[Any]:
        """Wait until so many messages of a kind have come in all, and return them."""
        while len(found := [message for message in self.heard if isinstance(message, kind)]) < count:
            frames, self._rest = unmasked(self._rest + self._connection.recv(65536))
            for _, payload in frames:
                for _, at, end in split_message(payload, 1 << 20):
                    self.heard.append(decode_payload(payload, at, end))
        return found

    def say(self, *messages: tuple[int, Message]) -> None:
        """Send messages with their sequence numbers, in one WebSocket message."""
        payload = b"".join(fm_frame(seq, encode_payload(message)) for seq, message in messages)
        send_cut(self._connection, frame(2, payload), self._cut)


@pytest.mark.parametrize("cut", [whole, in_bytes, in_sevens])
def test_fm_streams_are_counted_and_acked_however_they_are_cut(
    programs: Path, tmp_path: Path, cut: Callable[[bytes], list[bytes]]
) -> None:
    hello, infer = tmp_path / "hello", tmp_path / "infer"
    hello.write_bytes(fm_frame(0, encode_payload(Hello(client_id="bench"))))
    infer.write_bytes(infer_entries({"model": "m", "prompt": "Once", "max_tokens": 40, "stream": True}))
    argv = [str(programs / "fm_client"), "--header", "Authorization: Bearer k", "--streams-per-session", "2"]
    argv += ["--hello", str(hello), "--infer", str(infer)]
    with listening() as (listener, target), client([*argv, "--connect", target]) as load:
        load.tell("round 2")
        with accept(listener) as connection:
            head = read_head(connection)
            assert b"\r\nSec-WebSocket-Protocol: seedance.fm.v1\r\nAuthorization: Bearer k\r\n" in head
            connection.sendall(UPGRADED)
            peer = FmPeer(connection, cut)
            assert peer.hear(Hello, 1) == [Hello(client_id="bench")]
            peer.say((0, WELCOME))
            seq = 1
            for number in (1, 2):  # the second round is in the same session
                if number == 2:
                    load.tell("round 2")
                streams = [ask.stream for ask in peer.hear(Infer, 2 * number)[-2:]]
                assert streams == [2 * number - 1, 2 * number]
                for stream in streams:
                    peer.say((seq, Accept(stream=stream, id="x" * 32)))
                    seq += 1
                for _ in range(40):
                    peer.say(*((seq + i, Tokens(stream, 0, b" word")) for i, stream in enumerate(streams)))
                    seq += 2
                peer.say(*((seq + i, End(stream=stream, finish_reason="length")) for i, stream in enumerate(streams)))
                seq += 2
                counted = fields(load.hear("finished", WAIT_S))
                assert (counted["streams"], counted["done"], counted["events"]) == (2, 2, 80)
                assert counted["start_ns"] <= counted["first_ns"] <= counted["end_ns"]
            # 168 frames: an ACK of what came for each 64 at least, and none of what did not.
            acks = peer.hear(Ack, 2)
            assert all(ack.seq < seq and ack.credit == 128 for ack in acks)
            peer.say((0, Ping(opaque=b"12345678")))
            assert peer.hear(Pong, 1) == [Pong(opaque=b"12345678")]
