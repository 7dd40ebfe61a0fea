"""The sockets of one EngineCore: ours are bound, and the core connects to them, or again to those of another host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import zmq

_MESSAGES_PER_WAKEUP: Final = 64
# As plain numbers: zmq's enumerations cost more than what is done with them.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


class CoreSockets:
    """A ROUTER for requests and a PULL for outputs, in the running loop.

    `readied` gets what the core says first of all, `received` the frames of each message of its output. Raises
    zmq.ZMQError when they cannot be bound to their paths.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        paths: tuple[str, str],
        readied: Callable[[bytes], None],
        received: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._paths = paths
        self._readied = readied
        self._received = received
        self._requests, self._outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for end, address in zip((self._requests, self._outputs), self.addresses, strict=True):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.SNDHWM, 0)
            end.setsockopt(zmq.RCVHWM, 0)
            end.bind(address)
        self._loop.add_reader(self._requests.fileno(), self._ready_arrived)
        self._loop.add_reader(self._outputs.fileno(), self._outputs_arrived)

    @property
    def addresses(self) -> tuple[str, str]:
        """Where the core is to connect to: for requests, for outputs."""
        return "ipc://" + self._paths[0], "ipc://" + self._paths[1]

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a request; returns whether there is a core that takes it."""
        try:
            self._requests.send_multipart(frames, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def rest(self) -> Iterator[Sequence[bytes]]:
        """Yield the messages that have arrived."""
        while True:
            try:
                yield self._outputs.recv_multipart(_NOBLOCK)
            except zmq.ZMQError:
                return

    def close(self) -> None:
        """Close both, and remove their files; idempotent."""
        for end in (self._requests, self._outputs):
            if not end.closed:
                self._loop.remove_reader(end.fileno())
                end.close(linger=0)
        for path in self._paths:
            Path(path).unlink(missing_ok=True)

    def _outputs_arrived(self) -> None:
        """Take what the core has sent; a zmq descriptor reports once, so take all or come back."""
        outputs = self._outputs
        for _ in range(_MESSAGES_PER_WAKEUP):
            if outputs.closed:
                return
            try:
                frame = outputs.recv(_NOBLOCK, False)
            except zmq.Again:
                return
            frames = [frame.bytes]
            while frame.more:  # the frame knows: asking the socket costs three times the receive
                frame = outputs.recv(_NOBLOCK, False)
                frames.append(frame.bytes)
            self._received(frames)
            if outputs.closed or not int(outputs.get(_EVENTS)) & _POLLIN:  # cheaper than another recv that raises
                return
        self._loop.call_soon(self._outputs_arrived)

    def _ready_arrived(self) -> None:
        while not self._requests.closed:
            try:
                _, payload = self._requests.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._readied(payload)
