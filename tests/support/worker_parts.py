"""Parts of a worker without sockets: a driver whose flows record, and a sink that records."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.ring.driver import DriverStatistics, Endpoint, Flow, Listener
from seedance.engine.request import FinishReason, TokenLogprobs


class FakeFlow:
    """A flow that keeps what is sent; `waiting_bytes` is what its `send` answers."""

    def __init__(self, fd: int, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.sent = bytearray()
        self.waiting_bytes = 0
        self.ended = ""
        self._fd = fd

    @property
    def fd(self) -> int:
        return -1 if self.ended else self._fd

    @property
    def backlog_bytes(self) -> int:
        return self.waiting_bytes

    def send(self, data: bytes) -> int:
        if not self.ended:
            self.sent += data
        return self.waiting_bytes

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def detach(self, detached: Callable[[int], None]) -> None:
        self.ended = "detached"
        detached(self._fd)

    def _end(self, how: str) -> None:
        if not self.ended:
            self.ended = how
            self.endpoint.connection_lost(None)


class FakeDriver:
    """A driver whose flows are `flows`, in the order in which they were opened."""

    def __init__(self) -> None:
        self.flows: list[FakeFlow] = []

    def listen(self, listener: socket.socket, accepted: Callable[[int], None]) -> Listener:
        raise NotImplementedError

    def open(self, fd: int, endpoint: Endpoint) -> Flow:
        self.flows.append(FakeFlow(fd, endpoint))
        return self.flows[-1]

    def send_each(self, fds: Sequence[int], frames: Sequence[bytes]) -> list[tuple[int, int]]:
        flows = {flow.fd: flow for flow in self.flows}
        sent = [(fd, flows[fd].send(frame)) for fd, frame in zip(fds, frames, strict=True)]
        return [(fd, waiting_bytes) for fd, waiting_bytes in sent if waiting_bytes]

    def flush(self) -> None:
        pass

    def statistics(self) -> DriverStatistics:
        raise NotImplementedError


class FakeSink:
    """A sink that keeps what it is told; nothing may come after the end."""

    def __init__(self) -> None:
        self.text = ""
        self.positions: list[TokenLogprobs] = []
        self.end: FinishReason | ApiError | None = None
        self.notes: list[str] = []

    def text_arrived(self, text: str) -> None:
        assert text and self.end is None
        self.text += text

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        assert self.end is None
        self.text += text
        self.positions += positions

    def note_arrived(self, note: str) -> None:
        assert self.end is None
        self.notes.append(note)

    def stream_finished(self, reason: FinishReason) -> None:
        assert self.end is None
        self.end = reason

    def stream_failed(self, error: ApiError) -> None:
        assert self.end is None
        self.end = error
