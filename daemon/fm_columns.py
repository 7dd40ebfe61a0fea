"""FM sessions with one stream each, as columns: a step's TOKENS of all of them are a few operations on arrays.

A session is a row while its only stream brings plain tokens and its client keeps up. Its next number lies here then
(`ServerSession.lend`), and of each frame that is under way the token id alone: a frame is made of that again when the
session is to send it anew, or anything else. Then it takes its row back, and goes on as it ever does. A text that is
no token's own, as of a character of several tokens, leaves with the step's others, and is kept as it is.

A step's frames are rows of one matrix, which the kernel is sent from and which goes into the journal as it is:

    zeros | WebSocket header (2) | FM header (11) | what the stream's payloads begin with (3 to 7) | text | zeros
                                                            the text begins in the same place in all rows ┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.decoder_table import Entry
from seedance.daemon.protocol.fm_frame import HEADER_BYTES, TOKENS_PREFIX_BYTES, tokens_frame
from seedance.daemon.protocol.fm_messages import RING_FRAMES
from seedance.daemon.protocol.fm_server import Lent
from seedance.daemon.protocol.frame import SHORT_HEADER_BYTES, frame_binary
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.stream_columns import ROWS, Sends

TEXT_BYTES: Final = 40
"""Longer texts go the other way."""
MOST_PAYLOAD_BYTES: Final = TOKENS_PREFIX_BYTES + TEXT_BYTES
_BEFORE: Final = SHORT_HEADER_BYTES + HEADER_BYTES
_TEXT_AT: Final = _BEFORE + TOKENS_PREFIX_BYTES
_SEQ_AT: Final = -8  # from where the payload begins
_UNSEEN, _UNFIT, _FIRST = range(3)  # slots of tokens that have none, and the first
_SLOTS: Final = 256  # at first
_MOST_SLOTS: Final = 2**16 - 1


class Owner(Protocol):
    """A session that is a row."""

    def take_back(self) -> None:
        """Call `leave`, and go on without a row."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """Take note that so much waits because the client reads slowly."""


class Frames(NamedTuple):
    """A step's frames for the journal: by row the session, ACKed and own sequence, and where it lies in `data`."""

    sessions: bytes
    acked_seqs: bytes
    seqs: bytes
    begins: bytes
    lengths: bytes
    data: bytes


class Left(NamedTuple):
    """What a session takes back: frames that were sent and not ACKed, and what all its time in a row amounts to."""

    frames: list[bytes]
    tokens: int
    text_bytes: int


class FmColumns:
    """Rows of sessions, by the numbers of their streams for the engine; number 0 is no stream's.

    `stepped` is called when there is something to send that there was not: `flush` is to follow.
    """

    __slots__ = (
        "_acked",
        "_base",
        "_credits",
        "_dropped",
        "_entries",
        "_fds",
        "_heads",
        "_kept",
        "_lengths",
        "_next",
        "_numbers",
        "_owners",
        "_owners_by_fd",
        "_prefix_lengths",
        "_send_each",
        "_sends",
        "_sessions",
        "_slots",
        "_step",
        "_taken",
        "_text_bytes",
        "_texts",
        "_tokens",
        "_used",
        "_waiting",
        "_whole",
        "journal",
        "stepped",
    )

    def __init__(self, send_each: Callable[[memoryview, StoredFrames], list[tuple[int, int]]]) -> None:
        """`send_each` is a driver's."""
        self.stepped: Callable[[], None] = lambda: None
        self.journal: Callable[[Frames], None] = lambda frames: None
        self._send_each = send_each
        self._sends: list[Sends] = []
        self._dropped: set[int] = set()
        self._owners: dict[int, Owner] = {}  # by the stream's number
        self._owners_by_fd: dict[int, Owner] = {}
        self._whole: dict[int, dict[int, bytes]] = {}  # by row and sequence, texts that are no token's own
        self._waiting: dict[int, bytes] = {}  # by row, those that have no number yet
        self._step: tuple[NDArray[np.uint32], NDArray[np.uint16]] | None = None  # rows and slots, no number yet
        # By row. Pages of these that are not touched take no memory.
        self._taken = bytearray(ROWS)
        self._numbers = np.zeros(ROWS, np.uint32)  # 0 where the next token is not plain
        self._fds = np.zeros(ROWS, np.uint32)
        self._sessions = np.zeros(ROWS, np.uint32)
        self._tokens = np.zeros(ROWS, np.uint32)
        self._text_bytes = np.zeros(ROWS, np.uint64)
        self._base = np.zeros(ROWS, np.int64)  # the first sequence that is not in the session itself
        self._next = np.zeros(ROWS, np.int64)
        self._acked = np.zeros(ROWS, np.int64)
        self._credits = np.zeros(ROWS, np.int64)
        self._heads = np.zeros((ROWS, _TEXT_AT), np.uint8)
        self._prefix_lengths = np.zeros(ROWS, np.uint8)
        self._kept = np.zeros((ROWS, RING_FRAMES), np.uint16)  # slots by sequence
        self.use_vocabulary(())

    def __len__(self) -> int:
        return len(self._owners)

    def use_vocabulary(self, entries: Sequence[Entry]) -> None:
        """Send all rows back, and begin anew with another vocabulary."""
        for owner in list(self._owners.values()):
            owner.take_back()
        self._entries = entries
        # One more, which never fits, for all tokens that are not in the vocabulary.
        self._slots = np.zeros(len(entries) + 1, np.uint16)
        self._slots[-1] = _UNFIT
        # By slot, in the order in which tokens came: few of a vocabulary ever do.
        self._used = _FIRST
        self._lengths = np.zeros(_SLOTS, np.uint8)
        self._texts = np.zeros((_SLOTS, TEXT_BYTES), np.uint8)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def enter(self, number: int, session: int, fd: int, lent: Lent, owner: Owner) -> bool:
        """Give a session a row, of this stream and this descriptor; False where there is none for it."""
        row = number % ROWS
        if self._taken[row]:
            return False
        self._taken[row] = True
        self._owners[number] = self._owners_by_fd[fd] = owner
        self._numbers[row] = number
        self._fds[row] = fd
        self._sessions[row] = session
        self._base[row] = self._next[row] = lent.next_seq
        self._acked[row], self._credits[row] = lent.acked_seq, lent.credit
        self._tokens[row] = self._text_bytes[row] = 0
        head = frame_binary(tokens_frame(0, lent.prefix, b""))
        self._heads[row] = np.frombuffer(head.rjust(_TEXT_AT, b"\0"), np.uint8)
        self._prefix_lengths[row] = len(lent.prefix)
        return True

    def leave(self, number: int, prefix: bytes) -> Left:
        """Give a session its frames back, of which the payloads begin so."""
        self.prepare()
        row = number % ROWS
        del self._owners[number]
        del self._owners_by_fd[int(self._fds[row])]
        self._taken[row] = False
        self._numbers[row] = 0
        return Left(self._under_way(row, prefix), int(self._tokens[row]), int(self._text_bytes[row]))

    def _under_way(self, row: int, prefix: bytes) -> list[bytes]:
        whole = self._whole.pop(row, {})
        seqs = range(int(self._base[row]), int(self._next[row]))
        slots = self._kept[row, np.arange(seqs.start, seqs.stop) % RING_FRAMES]
        lengths, packed = self._lengths[slots].tolist(), self._texts[slots].tobytes()
        frames = []
        for seq, at, length in zip(seqs, range(0, len(packed), TEXT_BYTES), lengths, strict=True):
            frames.append(tokens_frame(seq, prefix, whole.get(seq) or packed[at : at + length]))
        return frames

    def set_plain(self, number: int, is_plain: bool) -> None:
        """Say whether the next token of a stream stands for just its text; so it is at first."""
        self._numbers[number % ROWS] = number if is_plain else 0

    def next_seq(self, number: int) -> int:
        """Return the number of the next frame of a stream."""
        return int(self._next[number % ROWS])

    def send_back(self, number: int) -> None:
        """Have the session of a stream take its row back."""
        self._owners[number].take_back()

    def drop(self, fd: int) -> None:
        """Send nothing of what was not sent yet on this descriptor, which is about to be another's."""
        self.prepare()
        if self._sends:
            self._dropped.add(fd)

    def acked(self, number: int, seq: int, credit: int) -> bool:
        """Take an ACK; False where it is none of a frame from here on, and changes nothing."""
        row = number % ROWS
        if not self._base[row] - 1 <= seq < self._next[row]:
            return False
        self._base[row] = seq + 1
        self._acked[row], self._credits[row] = seq, credit
        if (whole := self._whole.get(row)) is not None:
            self._whole[row] = {later: text for later, text in whole.items() if later > seq}
        return True

    # -- steps --------------------------------------------------------------------------------------------------------

    def take(
        self, numbers: NDArray[np.uint32], token_ids: NDArray[np.uint32]
    ) -> tuple[int, NDArray[np.uint32], NDArray[np.uint32]]:
        """Take what a step brought; return how many, and what is left. No number may be twice in it.

        `prepare` is to follow before the next step.
        """
        if not self._owners:
            return 0, numbers, token_ids
        rows = numbers % ROWS
        is_here = self._numbers[rows] == numbers
        is_here &= self._next[rows] <= self._acked[rows] + self._credits[rows]
        slots = self._find_slots(token_ids)
        is_here &= slots >= _FIRST
        left_numbers, left_ids = numbers[:0], token_ids[:0]
        if not is_here.all():
            left = ~is_here
            left_numbers, left_ids = numbers[left], token_ids[left]
            rows, slots = rows[is_here], slots[is_here]
        if len(rows):
            self._step = rows, slots
            self.stepped()
        return len(rows), left_numbers, left_ids

    def send_text(self, number: int, text: bytes) -> bool:
        """Send a text of a stream with what this step brings the others; False where it has to go another way."""
        row = number % ROWS
        if row in self._waiting:
            self.prepare()
        if len(text) > TEXT_BYTES or self._next[row] > self._acked[row] + self._credits[row]:
            return False
        self._waiting[row] = text
        self.stepped()
        return True

    def _find_slots(self, token_ids: NDArray[np.uint32]) -> NDArray[np.uint16]:
        slots = self._slots.take(token_ids, mode="clip")
        if not slots.all():  # _UNSEEN among them
            for token_id in set(token_ids[slots == _UNSEEN].tolist()):
                self._learn(token_id)
            slots = self._slots.take(token_ids, mode="clip")
        return slots

    def _learn(self, token_id: int) -> None:
        entry, slot = self._entries[token_id], self._used
        text = entry.encode() if isinstance(entry, str) else b""
        if not 0 < len(text) <= TEXT_BYTES or slot > _MOST_SLOTS:
            self._slots[token_id] = _UNFIT
            return
        if slot == len(self._lengths):
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
            self._texts = np.concatenate((self._texts, np.zeros_like(self._texts)))
        self._texts[slot, : len(text)] = np.frombuffer(text, np.uint8)
        self._lengths[slot] = len(text)
        self._slots[token_id] = slot
        self._used += 1

    def prepare(self) -> None:
        """Make frames of what came since the last time; before the journal is committed."""
        if self._step is None and not self._waiting:
            return
        rows, slots = self._step or (np.zeros(0, np.uint32), np.zeros(0, np.uint16))
        waiting, self._step, self._waiting = self._waiting, None, {}
        self._kept[rows, self._next[rows] % RING_FRAMES] = slots
        self._tokens[rows] += 1
        lengths = self._lengths[slots]
        if not waiting:
            self._make(rows, self._texts[:, : lengths.max()][slots], lengths)
            return
        others = np.fromiter(waiting, np.uint32, len(waiting))
        for row, seq, text in zip(waiting, self._next[others].tolist(), waiting.values(), strict=True):
            self._whole.setdefault(row, {})[seq] = text
        lengths = np.concatenate((lengths, np.fromiter(map(len, waiting.values()), np.uint8, len(waiting))))
        width = int(lengths.max())
        packed = b"".join([text.ljust(width, b"\0") for text in waiting.values()])
        texts = self._texts[:, :width][slots], np.frombuffer(packed, np.uint8).reshape(-1, width)
        self._make(np.concatenate((rows, others)), np.concatenate(texts), lengths)

    def _make(self, rows: NDArray[np.uint32], texts: NDArray[np.uint8], text_lengths: NDArray[np.uint8]) -> None:
        """Make the next frame of each row."""
        seqs = self._next[rows]
        self._next[rows] = seqs + 1
        self._text_bytes[rows] += text_lengths
        prefix_lengths = self._prefix_lengths[rows]
        payload_lengths = prefix_lengths + text_lengths
        width = _TEXT_AT + texts.shape[1]
        matrix = np.empty((len(rows), width), np.uint8)
        matrix[:, :_TEXT_AT] = self._heads[rows]
        matrix[:, _TEXT_AT:] = texts
        flat = matrix.reshape(-1)
        payloads_at = np.arange(_TEXT_AT, flat.size, width) - prefix_lengths
        flat[payloads_at - 1] = payload_lengths
        flat[payloads_at - _BEFORE + 1] = payload_lengths + HEADER_BYTES
        for byte in range(4):
            flat[payloads_at + _SEQ_AT + byte] = seqs >> (24 - 8 * byte) & 0xFF
        lengths = payload_lengths.astype(np.uint32) + _BEFORE
        begins = payloads_at - _BEFORE
        self.journal(
            Frames(
                self._sessions[rows].tobytes(),
                self._acked[rows].tobytes(),
                seqs.tobytes(),
                (begins + SHORT_HEADER_BYTES).astype(np.uint32).tobytes(),
                (lengths - SHORT_HEADER_BYTES).tobytes(),
                flat.tobytes(),
            )
        )
        addresses = begins.astype(np.uint64) + np.uint64(flat.ctypes.data)
        frames = StoredFrames(addresses.data, lengths.data, matrix)
        self._sends.append(Sends(self._fds[rows].data, frames))

    def flush(self) -> None:
        """Send what was made; before anything else that is sent to the same sessions."""
        if not self._sends:
            return
        sends, self._sends = self._sends, []
        dropped, self._dropped = self._dropped, set()
        for fds, frames in sends:
            if dropped:
                fds, frames = frames.without(fds, dropped)  # noqa: PLW2901
            for fd, waiting_bytes in self._send_each(fds, frames):
                if (owner := self._owners_by_fd.get(fd)) is not None:
                    owner.fell_behind(waiting_bytes)
