"""What a worker has not taken yet: deltas merged by stream, in order with the engine's changes.

However many steps a slow worker misses, there is one delta a stream: its memory is that of the tokens outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from seedance.engine.channel import Batch, Delta, EngineChanged, ModelComing, Noted, QueueBound, Refused, encode

# So many tokens go into one batch, that with logprobs it stays far below the channel's limit of a message.
BATCH_TOKENS: Final = 16_384


class _Part:
    """What came between two changes of the engine: deltas by stream number, then other messages as bytes.

    A refusal may be overtaken by deltas: they are of other streams.
    """

    __slots__ = ("deltas", "messages")

    def __init__(self) -> None:
        self.deltas: dict[int, Delta] = {}
        self.messages = bytearray()


class Backlog:
    """Messages for one worker, waiting until its socket takes more.

    `tokens` and `message_bytes` say how much waits, `batches` how many batches were popped so far.
    """

    __slots__ = ("_bound", "_parts", "batches", "message_bytes", "tokens")

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque([_Part()])
        self._bound: QueueBound | None = None
        self.batches = 0
        self.message_bytes = 0
        self.tokens = 0

    def add_deltas(self, deltas: Iterable[Delta]) -> None:
        """Take the deltas of one step; they, and the lists in them, belong to the backlog from here."""
        last = self._parts[-1].deltas
        for delta in deltas:
            self.tokens += len(delta.token_ids)
            held = last.setdefault(delta.stream, delta)
            if held is not delta:
                _merge(held, delta)

    def add_message(self, message: EngineChanged | Refused | QueueBound | ModelComing | Noted) -> None:
        """Take a message; nothing overtakes a change of the engine, and of the queue's bounds only the last counts."""
        if isinstance(message, QueueBound):
            self._bound = message
            return
        data = encode(message)
        self._parts[-1].messages += data
        self.message_bytes += len(data)
        if isinstance(message, EngineChanged):
            self._parts.append(_Part())

    def holds(self, stream: int) -> bool:
        """Return whether something of this stream is still here."""
        return any(stream in part.deltas for part in self._parts)

    def discard(self, streams: Iterable[int]) -> None:
        """Drop the deltas of streams."""
        for stream in streams:
            for part in self._parts:
                delta = part.deltas.pop(stream, None)
                if delta is not None:
                    self.tokens -= len(delta.token_ids)

    def pop(self) -> bytes:
        """Remove and return the next messages as they go on the wire; nothing when there are none."""
        if self._bound is not None:
            bound, self._bound = self._bound, None
            return encode(bound)
        while True:
            part = self._parts[0]
            if part.deltas:
                deltas = _pop_deltas(part.deltas)
                self.batches += 1
                self.tokens -= sum(len(delta.token_ids) for delta in deltas)
                return encode(Batch(deltas))
            data = bytes(part.messages)
            part.messages.clear()
            self.message_bytes -= len(data)
            last = len(self._parts) == 1
            if not last:
                self._parts.popleft()
            if data or last:
                return data


def _merge(held: Delta, later: Delta) -> None:
    if held.logprobs is None:
        held.logprobs = later.logprobs
    elif later.logprobs is not None:
        held.logprobs += later.logprobs
    held.token_ids += later.token_ids
    held.finish_reason = later.finish_reason
    held.cached_tokens += later.cached_tokens
    held.error = later.error


def _pop_deltas(deltas: dict[int, Delta]) -> list[Delta]:
    """Remove the oldest streams, up to BATCH_TOKENS and at least one."""
    chosen: list[Delta] = []
    tokens = 0
    for delta in deltas.values():
        tokens += len(delta.token_ids)
        if chosen and tokens > BATCH_TOKENS:
            break
        chosen.append(delta)
    for delta in chosen:
        del deltas[delta.stream]
    return chosen
