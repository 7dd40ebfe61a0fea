"""The sending half of an FM session: numbers frames, and keeps each until the peer has ACKed it.

    send ─► waiting (no number yet; deltas of a stream are merged) ─ credit ─► kept (numbered, under way) ─ ACK ─► gone

A frame is numbered when the peer has credit for it, so what is kept is never more than a window of 128 frames, and a
client that reads slowly, or is away, gets fewer and larger TOKENS frames. Both places count against one bound of bytes,
and every `send` says what that means for its caller (`Backpressure`). With nothing waiting and credit at hand a delta
becomes a frame at once: that is the way of nearly all tokens.

What is sent again is the frame as it was. The answers that a stream is owed are taken beyond the bound, as nobody could
say otherwise how it ended; who lets a peer begin streams has to see that there is room (`is_full`, `is_flooded`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Container, Sequence
from itertools import islice
from typing import Final

from seedance.daemon.protocol.fm_frame import HEADER_BYTES, TOKENS_PREFIX_BYTES, Kind, frame, tokens_frame

DEFAULT_BOUND_BYTES: Final = 1 << 20
FRAME_COST_BYTES: Final = HEADER_BYTES + 64
"""What a frame costs beside its payload: its header, and roughly the objects around it."""
MERGED_BYTES: Final = 16 << 10
"""Deltas are merged up to here."""

_PAUSE_PART: Final = 4
_LAST: Final = (Kind.END, Kind.ERROR)
_CONTINUATION: Final = range(0x80, 0xC0)


class Backpressure(enum.IntEnum):
    """What whoever sends has to do; over a quarter of the bound, three quarters, and all of it."""

    NONE = 0  # go on
    PAUSE = 1  # it was taken; pause the stream, until `take_drained`
    PARK = 2  # it was taken; the peer is no use as it is: close its connection and let the session wait
    REFUSED = 3  # it was not taken: end the stream with an error, or send it again when drained


_NONE: Final = Backpressure.NONE


class _Delta:
    """TOKENS of one stream that have no number yet."""

    __slots__ = ("data", "prefix", "stream")

    def __init__(self, stream: int, prefix: bytes) -> None:
        self.stream = stream
        self.prefix = prefix
        self.data = bytearray()


class Sender:
    """Frames of one session in one direction.

    `next_seq` is the next number to be given, `acked_seq` the last that the peer has, `held_bytes` what counts against
    the bound. `credit` frames may be under way; it is 0 while there is no connection. `unsaved` takes what began to
    wait, for who keeps a journal, and None for who keeps none: a payload, and for a stream's last one the stream and
    its text that waits before it.
    """

    __slots__ = (
        "_bound_bytes",
        "_fresh",
        "_is_pressed",
        "_kept",
        "_mergeable",
        "_park_bytes",
        "_pause_bytes",
        "_piece_bytes",
        "_resend",
        "_waiting",
        "acked_seq",
        "credit",
        "frames_resent",
        "held_bytes",
        "next_seq",
        "unsaved",
    )

    def __init__(self, bound_bytes: int = DEFAULT_BOUND_BYTES, next_seq: int = 1) -> None:
        self._bound_bytes = bound_bytes
        self._pause_bytes = bound_bytes // _PAUSE_PART
        self._park_bytes = bound_bytes - self._pause_bytes
        self._is_pressed = False
        self._piece_bytes = MERGED_BYTES
        self.next_seq = next_seq
        self.acked_seq = next_seq - 1
        self.credit = 0
        self.held_bytes = 0
        self.frames_resent = 0
        self._kept: deque[bytes] = deque()  # from acked_seq + 1 on
        self._waiting: deque[_Delta | bytes] = deque()
        self._mergeable: dict[int, _Delta] = {}  # of each stream, the last that waits, if it is TOKENS
        self._fresh: list[bytes] = []
        self._resend: set[int] = set()
        self.unsaved: list[tuple[int, bytes, bytes]] | None = None

    def __len__(self) -> int:
        """Return how many frames are under way."""
        return len(self._kept)

    @property
    def waiting_frames(self) -> int:
        """Return how many frames have no number yet."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Tell whether the bound is reached: nothing new should be begun."""
        return self.held_bytes >= self._bound_bytes

    @property
    def is_flooded(self) -> bool:
        """Tell whether twice the bound is reached, which what was owed when it was full cannot explain."""
        return self.held_bytes >= 2 * self._bound_bytes

    # What the session sends.

    def send_tokens(self, stream: int, prefix: bytes, data: bytes) -> Backpressure:
        """Send a delta of a stream; `prefix` is what `tokens_prefix` made for it.

        A delta longer than a frame may be is cut, between characters if it is UTF-8.
        """
        held_bytes = self.held_bytes
        if held_bytes >= self._bound_bytes:
            self._is_pressed = True
            return Backpressure.REFUSED
        size = len(data)
        if size > self._piece_bytes:
            return self._send_pieces(stream, prefix, data)
        if self._waiting or len(self._kept) >= self.credit:
            return self._merge(stream, prefix, data)
        framed = tokens_frame(self.next_seq, prefix, data)
        self.next_seq += 1
        self._kept.append(framed)
        self._fresh.append(framed)
        self.held_bytes = held_bytes = held_bytes + len(prefix) + size + FRAME_COST_BYTES
        return _NONE if held_bytes < self._pause_bytes else self._pressure()

    def send(self, stream: int, payload: bytes, *, beyond_bound: bool = False) -> Backpressure:
        """Send any other numbered frame; it stays behind what was sent for its stream before."""
        if self.held_bytes >= self._bound_bytes and not beyond_bound:
            self._is_pressed = True
            return Backpressure.REFUSED
        self.held_bytes += len(payload) + FRAME_COST_BYTES
        if self._waiting or len(self._kept) >= self.credit:
            self._mergeable.pop(stream, None)
            if self.unsaved is not None:
                is_last = payload[0] in _LAST
                self.unsaved.append((stream * is_last, self._waiting_text(stream) if is_last else b"", payload))
            self._waiting.append(payload)
        else:
            self._number(payload)
        return self._pressure()

    def _send_pieces(self, stream: int, prefix: bytes, data: bytes) -> Backpressure:
        pressure = Backpressure.NONE
        at = 0
        while at < len(data):
            end = min(at + self._piece_bytes, len(data))
            if end < len(data):
                end = next((cut for cut in range(end, end - 4, -1) if data[cut] not in _CONTINUATION), end)
            pressure = self._merge(stream, prefix, data[at:end])
            at = end
        return pressure

    def _merge(self, stream: int, prefix: bytes, data: bytes) -> Backpressure:
        delta = self._mergeable.get(stream)
        if delta is None or len(delta.data) + len(data) > self._piece_bytes:
            self._mergeable[stream] = delta = _Delta(stream, prefix)
            self._waiting.append(delta)
            self.held_bytes += len(prefix) + FRAME_COST_BYTES
        delta.data += data
        self.held_bytes += len(data)
        return self._pressure()

    def _waiting_text(self, stream: int) -> bytes:
        return b"".join([item.data for item in self._waiting if isinstance(item, _Delta) and item.stream == stream])

    def _pressure(self) -> Backpressure:
        if self.held_bytes < self._pause_bytes:
            return Backpressure.NONE
        self._is_pressed = True
        return Backpressure.PAUSE if self.held_bytes < self._park_bytes else Backpressure.PARK

    def take_drained(self) -> bool:
        """Tell once, after a send that asked for a pause, that half of what it takes for one is free again."""
        if not self._is_pressed or self.held_bytes > self._pause_bytes // 2:
            return False
        self._is_pressed = False
        return True

    # Frames that the owner numbers and sends by itself.

    @property
    def is_quiet(self) -> bool:
        """Tell whether there is nothing to be sent now, nor after an ACK."""
        return not (self._waiting or self._fresh or self._resend or self._is_pressed)

    def can_lend(self, payload_bytes: int, frames: int) -> bool:
        """Tell whether so many frames may be numbered elsewhere: nothing waits, and they are far from the bound."""
        if not self.is_quiet:
            return False
        return self.held_bytes + frames * (payload_bytes + FRAME_COST_BYTES) < self._pause_bytes

    def sent_elsewhere(self, frames: Sequence[bytes]) -> None:
        """Keep frames that were numbered from `next_seq` on, and sent."""
        self._kept.extend(frames)
        self.next_seq += len(frames)
        self.held_bytes += sum(map(len, frames)) + len(frames) * (FRAME_COST_BYTES - HEADER_BYTES)

    def acked_elsewhere(self, frames: int, credit: int) -> None:
        """Let go of all that is kept, and pass over so many frames that were sent and ACKed since."""
        self._release(self.next_seq - 1)
        self.next_seq += frames
        self.acked_seq += frames
        self.credit = credit

    # What leaves.

    def take(self) -> list[bytes]:
        """Return the frames to put on the wire now: those to be sent again, then new ones."""
        while self._waiting and len(self._kept) < self.credit:
            self._number_next()
        out, self._fresh = self._fresh, []
        if self._resend:
            first = self.acked_seq + 1
            again = [self._kept[seq - first] for seq in sorted(self._resend) if seq >= first]
            self._resend.clear()
            self.frames_resent += len(again)
            out = again + out
        return out

    def _number_next(self) -> None:
        item = self._waiting.popleft()
        if isinstance(item, _Delta):
            if self._mergeable.get(item.stream) is item:
                del self._mergeable[item.stream]
            item = item.prefix + item.data
        self._number(item)

    def _number(self, payload: bytes) -> None:
        framed = frame(self.next_seq, payload)
        self.next_seq += 1
        self._kept.append(framed)
        self._fresh.append(framed)

    # What the peer told.

    def ack_arrived(self, seq: int, credit: int) -> bool:
        """Let go of all up to `seq`, and take the new credit; False when nothing of that number was ever sent."""
        if seq >= self.next_seq:
            return False
        if seq >= self.acked_seq:  # else it was overtaken by a later one
            self._release(seq)
            self.credit = credit
        return True

    def nack_arrived(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Have frames sent again; False when the ranges are not in order, or of what was never sent."""
        last_seq = 0
        for first, last in ranges:
            if not last_seq < first <= last < self.next_seq:
                return False
            last_seq = last
            self._resend.update(range(max(first, self.acked_seq + 1), last + 1))
        return True

    def probe(self) -> bool:
        """Have the last frame under way sent again, which makes the peer tell what it has; False when there is none."""
        if self._kept:
            self._resend.add(self.next_seq - 1)
        return bool(self._kept)

    def connection_lost(self) -> None:
        """Hold everything until the peer resumes."""
        self.credit = 0
        self._fresh.clear()
        self._resend.clear()

    def agree(self, payload_bytes: int) -> None:
        """Take the largest payload that the peer takes, before anything is sent."""
        self._piece_bytes = min(MERGED_BYTES, payload_bytes - TOKENS_PREFIX_BYTES)

    def resume(self, last_seq: int, credit: int) -> bool:
        """Go on behind the last frame that the peer has; False when what follows it is not kept, or never was.

        All that is under way is sent again, more than the credit though it may be: it is within the peer's ring.
        """
        if not self.acked_seq <= last_seq < self.next_seq:
            return False
        self._release(last_seq)
        self._fresh.clear()
        self._resend = set(range(last_seq + 1, self.next_seq))
        self.credit = credit
        return True

    # What a journal keeps.

    def kept_from(self, seq: int) -> bytes:
        """Return all frames under way from this one on, put together."""
        kept = self._kept
        frames = self.next_seq - seq
        return kept[-1] if frames == 1 else b"".join(islice(kept, len(kept) - frames, None))

    def waiting(self, running: Container[int]) -> list[tuple[int, bytes]]:
        """Return what waits, in order: payloads, with 0, and text of streams that are over, with their number."""
        return [
            (item.stream, bytes(item.data)) if isinstance(item, _Delta) else (0, item)
            for item in self._waiting
            if not (isinstance(item, _Delta) and item.stream in running)
        ]

    def waiting_bytes(self) -> dict[int, int]:
        """Return how much text of each stream waits."""
        sizes: dict[int, int] = {}
        for item in self._waiting:
            if isinstance(item, _Delta):
                sizes[item.stream] = sizes.get(item.stream, 0) + len(item.data)
        return sizes

    def restore(self, frames: Sequence[bytes], waiting: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Have what another sender had under way behind `acked_seq`, and what waited; of a text its prefix, too."""
        for framed in frames:
            self._kept.append(framed)
            self.next_seq += 1
            self.held_bytes += len(framed) - HEADER_BYTES + FRAME_COST_BYTES
        for stream, prefix, data in waiting:
            if stream:
                self._merge(stream, prefix, data)
            else:
                self._waiting.append(data)
                self.held_bytes += len(data) + FRAME_COST_BYTES

    def _release(self, seq: int) -> None:
        kept, frames = self._kept, seq - self.acked_seq
        released_bytes = frames * (FRAME_COST_BYTES - HEADER_BYTES)
        for _ in range(frames):
            released_bytes += len(kept.popleft())
        self.held_bytes -= released_bytes
        self.acked_seq = seq
