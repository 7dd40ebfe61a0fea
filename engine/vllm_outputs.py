"""How outputs leave an EngineCore: sent by the thread that makes the steps.

vLLM hands them to a thread of its own. To wake that one for each step, and to have it ask for the interpreter's lock in
the middle of the next, costs more than what it does: of a step most generations are one output (`vllm_wire.Singles`).
Nothing of vLLM is imported: who imports it passes its encoder.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from seedance.errors import EngineDead

_PARAMETERS: Final = ["self", "output_paths", "coord_output_path", "engine_index"]
_LINGER_MS: Final = 4_000  # for the news of the core's death, as in vLLM


class Sender:
    """What stands in the place of an EngineCore's queue of outputs; any thread may put something in.

    `encode` makes the frames of a message. The socket is used by one thread at a time, and closed by its owner once
    `ended` is set: when the core's death was told.
    """

    def __init__(
        self, send: Callable[[Sequence[Any]], object], encode: Callable[[Any], Sequence[Any]], engine_index: int
    ) -> None:
        self._send = send
        self._encode = encode
        self._engine_index = engine_index
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def put_nowait(self, item: bytes | tuple[int, Any]) -> None:
        """Send the outputs for a client, of which there is one; or these bytes, which are the core's last word."""
        with self._lock:
            if isinstance(item, bytes):
                self._send([item])
                self.ended.set()
                return
            _, outputs = item
            outputs.engine_index = self._engine_index
            self._send(self._encode(outputs))


def send_at_once(core: Any, encoder: Callable[[], Any]) -> None:
    """Have an EngineCore's outputs sent by whoever has them; `encoder` makes what encodes them.

    Raises EngineDead when it is not vLLM 0.32's.
    """
    if list(inspect.signature(core.process_output_sockets).parameters) != _PARAMETERS:
        raise EngineDead("this vLLM sends its outputs otherwise than 0.32.0, install that one")
    run_busy_loop = core.run_busy_loop
    sends = threading.Event()  # there is one core in a process

    def process_output_sockets(self: Any, paths: list[str], _: str | None, engine_index: int) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
            sock.setsockopt(zmq.LINGER, _LINGER_MS)
            sock.setsockopt(zmq.SNDHWM, 0)  # kept while there is no host
            sock.connect(paths[0])
            sender = Sender(lambda frames: sock.send_multipart(frames, copy=False), encoder().encode, engine_index)
            waiting, self.output_queue = self.output_queue, sender
            while not waiting.empty():
                sender.put_nowait(waiting.get())
            sends.set()
            sender.ended.wait()

    def run(self: Any) -> None:
        sends.wait()
        run_busy_loop(self)

    core.process_output_sockets = process_output_sockets
    core.run_busy_loop = run
