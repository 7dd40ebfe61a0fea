from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from seedance.engine.vllm_outputs import Sender, send_at_once
from seedance.errors import EngineDead

DEAD = b"ENGINE_CORE_DEAD"
WAIT_MS = 5_000


class Outputs:
    """What a step has brought, as far as a sender touches it."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.engine_index = -1


class Encoder:
    """Makes two frames of outputs."""

    def encode(self, outputs: Outputs) -> list[bytes]:
        return [outputs.text, b"%d" % outputs.engine_index]


class Core:
    """An EngineCore that has outputs from its start, and one of each of its steps."""

    def __init__(self, path: str) -> None:
        self.output_queue: Any = queue.Queue()
        self.output_queue.put_nowait((0, Outputs(b"early")))
        self.output_thread = threading.Thread(target=self.process_output_sockets, args=([path], None, 7), daemon=True)
        self.output_thread.start()

    def process_output_sockets(self, output_paths: list[str], coord_output_path: str | None, engine_index: int) -> None:
        raise AssertionError("this would be vLLM's own")

    def run_busy_loop(self) -> None:
        for step in range(3):
            self.output_queue.put_nowait((0, Outputs(b"step %d" % step)))
        self.output_queue.put_nowait(DEAD)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        address = f"ipc://{tmp_path}/out"
        sock.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        sock.bind(address)
        yield sock, address


def test_all_outputs_leave_in_order_and_the_core_s_death_is_the_last_word(host: tuple[zmq.Socket[bytes], str]) -> None:
    class Sending(Core):
        pass

    sock, address = host
    send_at_once(Sending, Encoder)
    core = Sending(address)
    core.run_busy_loop()
    received = [sock.recv_multipart() for _ in range(5)]
    assert received == [[b"early", b"7"], *([b"step %d" % step, b"7"] for step in range(3)), [DEAD]]
    core.output_thread.join(WAIT_MS / 1e3)
    assert not core.output_thread.is_alive()


def test_a_core_that_sends_otherwise_is_refused() -> None:
    class Other(Core):
        def process_output_sockets(self, *paths: Any) -> None:
            raise AssertionError("nobody calls this")

    with pytest.raises(EngineDead, match="install that one"):
        send_at_once(Other, Encoder)


def test_who_puts_an_output_in_sends_it() -> None:
    senders: list[int] = []
    sender = Sender(lambda frames: senders.append(threading.get_ident()), Encoder().encode, 0)
    sender.put_nowait((0, Outputs(b"")))
    thread = threading.Thread(target=sender.put_nowait, args=((0, Outputs(b"")),))
    thread.start()
    thread.join()
    assert senders == [threading.get_ident(), thread.ident]
    assert not sender.ended.is_set()


def test_frames_are_not_mixed_where_two_threads_send() -> None:
    frames: list[bytes] = []
    is_in, goes_on = threading.Event(), threading.Event()

    def send(parts: Any) -> None:
        frames.append(parts[0])
        is_in.set()
        goes_on.wait(WAIT_MS / 1e3)
        frames.append(parts[1])

    sender = Sender(send, Encoder().encode, 0)
    threads = [threading.Thread(target=sender.put_nowait, args=((0, Outputs(text)),)) for text in (b"a", b"b")]
    threads[0].start()
    assert is_in.wait(WAIT_MS / 1e3)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join()
    assert frames == [b"a", b"0", b"b", b"0"]
