"""FM sessions as columns: a step's TOKENS of all their streams are a few operations on arrays.

A stream is a row while all that run in its session bring plain tokens and their client keeps up. The session's next
number lies here then (`ServerSession.lend`), in the row of its first stream, the leader; and of each frame that is
under way whose token it is, and which. A frame is made of that again when the session is to send it anew, or anything
else. Then it takes its rows back, and goes on as it ever does. A text that is no token's own, as of a character of
several tokens, leaves with the step's others, and is kept as it is.

A step's frames of a session are one message (`fm_matrix`), which the kernel is sent from, and the journal takes all of
them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seedance.daemon import fm_matrix
from seedance.daemon.decoder_table import Entry
from seedance.daemon.protocol.fm_frame import tokens_frame
from seedance.daemon.protocol.fm_messages import RING_FRAMES
from seedance.daemon.protocol.fm_server import Lent
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.stream_columns import ROWS, Sends
from seedance.daemon.token_texts import FIRST, TEXT_BYTES, UNSEEN, TokenTexts


class Owner(Protocol):
    """A session that has rows."""

    def take_back(self) -> None:
        """Call `leave`, and go on without rows."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """Take note that so much waits because the client reads slowly."""


class Member(NamedTuple):
    """A stream, by its number for the engine, and what its payloads begin with."""

    number: int
    prefix: bytes


class Frames(NamedTuple):
    """A step's frames for the journal: by frame the session, ACKed and own sequence, and where it lies in `data`.

    Those of a session are in the order of their sequences.
    """

    sessions: bytes
    acked_seqs: bytes
    seqs: bytes
    begins: bytes
    lengths: bytes
    data: bytes


class Left(NamedTuple):
    """What a session takes back: frames that were sent and not ACKed, and what each member has come to."""

    frames: list[bytes]
    tokens: list[int]
    text_bytes: list[int]


class FmColumns:
    """Rows of streams, by their numbers for the engine; number 0 is no stream's. A session is known by its first one's.

    `stepped` is called when there is something to send that there was not: `flush` is to follow.
    """

    __slots__ = (
        "_acked",
        "_base",
        "_dropped",
        "_fds",
        "_heads",
        "_kept",
        "_kept_rows",
        "_leaders",
        "_limits",
        "_members",
        "_next",
        "_numbers",
        "_owners",
        "_owners_by_fd",
        "_prefix_lengths",
        "_send_each",
        "_sends",
        "_sessions",
        "_step",
        "_taken",
        "_text_bytes",
        "_texts",
        "_tokens",
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
        self._owners: dict[int, Owner] = {}  # by a stream's number
        self._owners_by_fd: dict[int, Owner] = {}
        self._members: dict[int, Sequence[Member]] = {}  # by leader
        self._whole: dict[int, dict[int, bytes]] = {}  # by leader and sequence, texts that are no token's own
        self._waiting: dict[int, bytes] = {}  # by row, those that have no number yet
        self._step: tuple[NDArray[np.uint32], NDArray[np.uint16]] | None = None  # rows and slots, no number yet
        self._texts = TokenTexts(())
        # By row. Pages of these that are not touched take no memory.
        self._taken = bytearray(ROWS)
        self._numbers = np.zeros(ROWS, np.uint32)  # 0 where the next token is not plain
        self._leaders = np.zeros(ROWS, np.uint32)
        self._tokens = np.zeros(ROWS, np.uint32)
        self._text_bytes = np.zeros(ROWS, np.uint64)
        self._heads = np.zeros((ROWS, fm_matrix.HEAD_BYTES), np.uint8)
        self._prefix_lengths = np.zeros(ROWS, np.uint8)
        # By leader.
        self._fds = np.zeros(ROWS, np.uint32)
        self._sessions = np.zeros(ROWS, np.uint32)
        self._base = np.zeros(ROWS, np.int64)  # the first sequence that is not in the session itself
        self._next = np.zeros(ROWS, np.int64)
        self._acked = np.zeros(ROWS, np.int64)
        self._limits = np.zeros(ROWS, np.int64)  # up to here there is credit for a frame of each member
        self._kept = np.zeros((ROWS, RING_FRAMES), np.uint16)  # slots by sequence
        self._kept_rows = np.zeros((ROWS, RING_FRAMES), np.uint16)  # and whose they are

    def __len__(self) -> int:
        return len(self._owners)

    def use_vocabulary(self, entries: Sequence[Entry]) -> None:
        """Send all rows back, and begin anew with another vocabulary."""
        for number in list(self._owners):
            if number in self._owners:  # it did not leave with another one of its session
                self.send_back(number)
        self._texts = TokenTexts(entries)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def enter(self, session: int, fd: int, lent: Lent, members: Sequence[Member], owner: Owner) -> bool:
        """Give a session rows, for these streams and this descriptor; False where there are none for it."""
        rows = [member.number % ROWS for member in members]
        if len(set(rows)) < len(rows) or any(self._taken[row] for row in rows):
            return False
        leader = rows[0]
        self._members[leader] = members
        self._owners_by_fd[fd] = owner
        for row, (number, prefix) in zip(rows, members, strict=True):
            self._taken[row] = True
            self._owners[number] = owner
            self._numbers[row] = number
            self._heads[row] = fm_matrix.head(prefix)
            self._prefix_lengths[row] = len(prefix)
        self._leaders[rows] = leader
        self._tokens[rows] = self._text_bytes[rows] = 0
        self._fds[leader], self._sessions[leader] = fd, session
        self._base[leader] = self._next[leader] = lent.next_seq
        self._set_credit(leader, lent.acked_seq, lent.credit)
        return True

    def leave(self, number: int) -> Left:
        """Give a session its frames back."""
        self.prepare()
        leader = number % ROWS
        members = self._members.pop(leader)
        del self._owners_by_fd[int(self._fds[leader])]
        rows = [member.number % ROWS for member in members]
        for row, member in zip(rows, members, strict=True):
            del self._owners[member.number]
            self._taken[row] = False
        self._numbers[rows] = 0
        prefixes = {row: member.prefix for row, member in zip(rows, members, strict=True)}
        return Left(self._under_way(leader, prefixes), self._tokens[rows].tolist(), self._text_bytes[rows].tolist())

    def _under_way(self, leader: int, prefixes: dict[int, bytes]) -> list[bytes]:
        whole = self._whole.pop(leader, {})
        seqs = np.arange(self._base[leader], self._next[leader])
        places = seqs % RING_FRAMES
        slots = self._kept[leader, places]
        lengths, packed = self._texts.lengths[slots].tolist(), self._texts.texts[slots].tobytes()
        rows, texts_at = self._kept_rows[leader, places].tolist(), range(0, len(packed), TEXT_BYTES)
        frames = []
        for seq, row, at, length in zip(seqs.tolist(), rows, texts_at, lengths, strict=True):
            frames.append(tokens_frame(seq, prefixes[row], whole.get(seq) or packed[at : at + length]))
        return frames

    def _set_credit(self, leader: int, seq: int, credit: int) -> None:
        self._acked[leader] = seq
        self._limits[leader] = seq + credit + 1 - len(self._members[leader])

    def set_plain(self, number: int, is_plain: bool) -> None:
        """Say whether the next token of a stream stands for just its text; so it is at first."""
        self._numbers[number % ROWS] = number if is_plain else 0

    def next_seq(self, number: int) -> int:
        """Return the number of the next frame of a session."""
        return int(self._next[number % ROWS])

    def send_back(self, number: int) -> None:
        """Have the session of a stream take its rows back."""
        self._owners[number].take_back()

    def drop(self, fd: int) -> None:
        """Send nothing of what was not sent yet on this descriptor, which is about to be another's."""
        self.prepare()
        if self._sends:
            self._dropped.add(fd)

    def acked(self, number: int, seq: int, credit: int) -> bool:
        """Take an ACK of a session; False where it is none of a frame from here on, and changes nothing."""
        leader = number % ROWS
        if not self._base[leader] - 1 <= seq < self._next[leader]:
            return False
        self._base[leader] = seq + 1
        self._set_credit(leader, seq, credit)
        if (whole := self._whole.get(leader)) is not None:
            self._whole[leader] = {later: text for later, text in whole.items() if later > seq}
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
        leaders = self._leaders[rows]
        is_here = self._numbers[rows] == numbers
        is_here &= self._next[leaders] <= self._limits[leaders]
        slots = self._texts.find(token_ids)
        is_here &= slots >= FIRST
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
        leader = self._leaders[row]
        if row in self._waiting:
            self.prepare()
        if len(text) > TEXT_BYTES or self._next[leader] > self._limits[leader]:
            return False
        self._waiting[row] = text
        self.stepped()
        return True

    def prepare(self) -> None:
        """Make frames of what came since the last time; before the journal is committed."""
        if self._step is None and not self._waiting:
            return
        rows, slots = self._step or (np.zeros(0, np.uint32), np.zeros(0, np.uint16))
        waiting, self._step, self._waiting = self._waiting, None, {}
        self._tokens[rows] += 1
        if waiting:
            rows = np.concatenate((rows, np.fromiter(waiting, np.uint32, len(waiting))))
            slots = np.concatenate((slots, np.full(len(waiting), UNSEEN, np.uint16)))
        leaders = self._leaders[rows]
        order = leaders.argsort(kind="stable")
        rows, slots, leaders = rows[order], slots[order], leaders[order]
        firsts = np.flatnonzero(np.diff(leaders, prepend=np.uint32(ROWS)))
        seqs = self._number(leaders, firsts)
        places = seqs % RING_FRAMES
        self._kept[leaders, places] = slots
        self._kept_rows[leaders, places] = rows
        lengths = self._texts.lengths[slots]
        if not waiting:
            self._make(rows, leaders, firsts, seqs, self._texts.texts[:, : lengths.max()][slots], lengths)
            return
        others = np.flatnonzero(slots == UNSEEN)
        whole = [waiting[row] for row in rows[others].tolist()]
        for leader, seq, text in zip(leaders[others].tolist(), seqs[others].tolist(), whole, strict=True):
            self._whole.setdefault(leader, {})[seq] = text
        lengths[others] = list(map(len, whole))
        width = int(lengths.max())
        texts = self._texts.texts[:, :width][slots]
        texts[others] = np.frombuffer(b"".join([text.ljust(width, b"\0") for text in whole]), np.uint8).reshape(
            -1, width
        )
        self._make(rows, leaders, firsts, seqs, texts, lengths)

    def _number(self, leaders: NDArray[np.uint32], firsts: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the next numbers of sessions, one for each time that it is there; they are in order."""
        counts = np.diff(firsts, append=len(leaders))
        heads = leaders[firsts]
        begins = self._next[heads]
        self._next[heads] = begins + counts
        seqs: NDArray[np.int64] = np.repeat(begins - firsts, counts) + np.arange(len(leaders))
        return seqs

    def _make(
        self,
        rows: NDArray[np.uint32],
        leaders: NDArray[np.uint32],
        firsts: NDArray[np.intp],
        seqs: NDArray[np.int64],
        texts: NDArray[np.uint8],
        text_lengths: NDArray[np.uint8],
    ) -> None:
        """Make a frame of each row, to be sent as messages that begin with each of `firsts`."""
        self._text_bytes[rows] += text_lengths
        packed = fm_matrix.pack(firsts, seqs, self._heads[rows], self._prefix_lengths[rows], texts, text_lengths)
        self.journal(
            Frames(
                self._sessions[leaders].tobytes(),
                self._acked[leaders].tobytes(),
                seqs.tobytes(),
                packed.begins.astype(np.uint32).tobytes(),
                packed.lengths.astype(np.uint32).tobytes(),
                packed.data.tobytes(),
            )
        )
        addresses = packed.message_begins.astype(np.uint64) + np.uint64(packed.data.ctypes.data)
        frames = StoredFrames(addresses.data, packed.message_lengths.astype(np.uint32).data, packed.data)
        self._sends.append(Sends(self._fds[leaders[firsts]].data, frames))

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
