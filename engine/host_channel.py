"""One worker's channel as the engine host holds it: its socket, its running generations, its backlog.

While the socket takes everything, each engine step costs one batch and one system call. Once it is full, deltas are
merged in the backlog until the worker reads again, and the host goes on with the others.
"""

from __future__ import annotations

import array
import asyncio
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from seedance.engine.backlog import Backlog
from seedance.engine.channel import (
    Batch,
    Delta,
    EngineChanged,
    ModelComing,
    Noted,
    QueueBound,
    Receiver,
    Refused,
    Submit,
    ToHost,
    encode,
)
from seedance.engine.host_link import ChannelStatistics
from seedance.engine.request import TenantContext
from seedance.engine.survivors import claim_of
from seedance.errors import RemoteProtocolError

if TYPE_CHECKING:
    from seedance.engine.engine import Engine

_RECEIVE_BYTES: Final = 256 << 10
# A worker that does not read its refusals is not read from either.
_MAX_MESSAGE_BACKLOG_BYTES: Final = 256 << 10


class Generation:
    """The record of a running generation: enough to continue it elsewhere. Append only.

    `engine` has it, None while it waits for one; `deaths` counts engines that died with it. One that was over when it
    was claimed `is_over`.
    `prompt_token_ids` and `token_ids` (those emitted so far, here or elsewhere) are arrays of unsigned 32-bit ids;
    `tokens` names what they mean.
    """

    __slots__ = (
        "channel",
        "deaths",
        "engine",
        "is_over",
        "is_paused",
        "key",
        "prompt_token_ids",
        "sampling",
        "stream",
        "token_ids",
        "tokens",
        "urgency",
    )

    def __init__(self, key: int, channel: Channel, wish: Submit) -> None:
        self.key = key
        self.channel = channel
        self.stream = wish.stream
        self.prompt_token_ids = wish.prompt_token_ids
        self.sampling = wish.sampling
        self.urgency = wish.urgency
        self.tokens = wish.tokens
        self.token_ids = array.array("I", wish.emitted_token_ids)
        self.engine: Engine | None = None
        self.deaths = 0
        self.is_paused = self.is_over = False

    @property
    def claim(self) -> str:
        """By what an engine that outlives this host can be asked for it."""
        return claim_of(self.channel.tenant.name, self.stream, self.prompt_token_ids, self.sampling)


def by_engine(generations: Iterable[Generation]) -> Iterable[tuple[Engine, list[int]]]:
    """Return the keys of generations, by the engine that has them."""
    keys: dict[Engine, list[int]] = {}
    for generation in generations:
        if generation.engine is not None:
            keys.setdefault(generation.engine, []).append(generation.key)
    return keys.items()


class ChannelOwner(Protocol):
    """What the host does with a channel's news."""

    def message_received(self, channel: Channel, message: ToHost) -> None:
        """Take a message of the worker."""

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """Close a channel whose worker is gone or broke the protocol; told once, not in the middle of another call."""


class Channel:
    """The host's end of one channel; it owns the socket.

    `generations` (by stream number), `deltas` and `singles` (of the engine step in hand, as in `channel.Batch`) are the
    owner's to fill.
    """

    def __init__(
        self,
        number: int,
        tenant: TenantContext,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        owner: ChannelOwner,
    ) -> None:
        sock.setblocking(False)
        self.number = number
        self.tenant = tenant
        self.generations: dict[int, Generation] = {}
        self.deltas: list[Delta] = []
        self.singles = b""
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._owner = owner
        self._receiver: Receiver[ToHost] = Receiver(ToHost)
        self._unsent = memoryview(b"")
        self._backlog = Backlog()
        self._open = True
        self._reading = True
        self._tokens = self._batches = self._sends = 0
        loop.add_reader(self._fd, self._readable)

    def flush(self) -> None:
        """Send the deltas of the step in hand as one batch, or merge them into the backlog."""
        batch = Batch(self.deltas, self.singles)
        self.deltas, self.singles = [], b""
        self._tokens += batch.tokens
        if self._unsent:
            singles = (Delta(stream, [token_id]) for stream, token_id in batch.pairs())
            self._backlog.add_deltas([*batch.deltas, *singles])
        elif self._open:
            self._batches += 1
            self._send(encode(batch))

    def send(self, message: EngineChanged | Refused | QueueBound | ModelComing | Noted) -> None:
        """Send a message after all that was sent before."""
        if self._unsent:
            self._backlog.add_message(message)
        elif self._open:
            self._send(encode(message))

    def is_free(self, stream: int) -> bool:
        """Return whether a stream number can be given to a new generation."""
        return stream not in self.generations and not self._backlog.holds(stream)

    def discard(self, streams: Iterable[int]) -> None:
        """Drop what the worker has not taken yet of streams that it no longer wants."""
        if self._backlog.tokens:
            self._backlog.discard(streams)

    def close(self) -> None:
        """Close the socket and forget the backlog; idempotent."""
        self._stop()
        self._sock.close()

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot."""
        return ChannelStatistics(
            channel=self.number,
            tenant=self.tenant.name,
            open_streams=len(self.generations),
            backlog_bytes=len(self._unsent) + self._backlog.message_bytes,
            backlog_tokens=self._backlog.tokens,
            tokens=self._tokens,
            batches=self._batches + self._backlog.batches,
            sends=self._sends,
        )

    def _send(self, data: bytes) -> None:
        self._write(memoryview(data))
        if self._unsent:
            self._loop.add_writer(self._fd, self._writable)

    def _write(self, data: memoryview) -> None:
        """Give the socket what it takes; the rest is `_unsent`."""
        self._sends += 1
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._fail(f"cannot send to the worker: {exc.strerror}")
            return
        self._unsent = data[sent:]

    def _writable(self) -> None:
        self._write(self._unsent)
        while self._open and not self._unsent:
            data = self._backlog.pop()
            if not data:
                self._loop.remove_writer(self._fd)
                break
            self._write(memoryview(data))
        self._apply_backpressure()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._fail(f"cannot read from the worker: {exc.strerror}")
            return
        if not data:
            self._fail("the worker closed it")
            return
        try:
            messages = self._receiver.receive_data(data)
        except RemoteProtocolError as exc:
            self._fail(str(exc))
            return
        for message in messages:
            self._owner.message_received(self, message)
        self._apply_backpressure()

    def _apply_backpressure(self) -> None:
        wanted = self._backlog.message_bytes <= _MAX_MESSAGE_BACKLOG_BYTES
        if not self._open or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._loop.add_reader(self._fd, self._readable)
        else:
            self._loop.remove_reader(self._fd)

    def _fail(self, reason: str) -> None:
        # Told later: the owner may be in the middle of a step.
        if self._open:
            self._stop()
            self._loop.call_soon(self._owner.channel_lost, self, reason)

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._unsent = memoryview(b"")
            self._backlog = Backlog()
