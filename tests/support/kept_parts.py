"""What is around a kept stream: a log of its own, readers that record, and an answer."""

from __future__ import annotations

from collections.abc import Sequence

from support.fm_worker import KEY, FmWorker

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.journal import Journal
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.kept_streams import KeptStreams
from seedance.daemon.service import Answer
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Stream


class FakeReader:
    """A reader that keeps what it takes; it has room for `room_bytes`, and what is more waits."""

    def __init__(self, room_bytes: float = float("inf")) -> None:
        self.room_bytes = room_bytes
        self.said: list[str] = []
        self.taken: list[tuple[int, bytes]] = []
        self.pieces: list[int] = []

    def begin(self) -> None:
        self.said.append("begin")

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        assert "all_taken" not in self.said
        self.taken += enumerate(records, first_seq)
        self.pieces.append(len(records))
        self.room_bytes -= sum(map(len, records))
        return 0 if self.room_bytes >= 0 else 1

    def tell(self, note: str, retry_after_ms: int) -> None:
        self.said.append(f"{note} {retry_after_ms}")

    def all_taken(self) -> None:
        self.said.append("all_taken")

    def taken_over(self) -> None:
        self.said.append("taken_over")

    def sent_away(self) -> None:
        self.said.append("sent_away")

    def fail(self, error: ApiError) -> None:
        self.said.append(error.code)


class FakeAnswer(Answer):
    """An answer without streams, which can be cancelled."""

    def __init__(self, stream: KeptStream) -> None:
        super().__init__()
        self._stream = stream

    def cancelled_by_client(self) -> None:
        self._stream.append(b"abort")
        self._stream.finish()


class FakeStreams:
    """Takes notes; see `kept_stream.Streams`."""

    def __init__(self, stream_bytes: int = 4000) -> None:
        self.stream_bytes = stream_bytes
        self.journal = Journal()
        self.said: list[str] = []

    def stream(self) -> KeptStream:
        """Return a stream that has an answer; what there is to send is sent at once."""
        stream = KeptStream(self, "events")
        stream.kept = Kept("name", "name.mac", stream)
        stream.answer = FakeAnswer(stream)
        return stream

    def touched(self, stream: KeptStream) -> None:
        stream.send(stream.prepare())

    def flush(self) -> None:
        pass

    def set_paused(self, streams: Sequence[Stream], is_paused: bool) -> None:
        self.said.append("pause" if is_paused else "go on")

    def connected(self, stream: KeptStream) -> None:
        self.said.append("connected")

    def left(self, stream: KeptStream) -> None:
        self.said.append("left")

    def ended(self, stream: KeptStream) -> None:
        self.said.append("ended")

    def forget(self, stream: KeptStream) -> None:
        self.said.append("forget")

    def abandon(self, stream: KeptStream) -> None:
        self.said.append("abandon")


class KeptWorker(FmWorker):
    """A worker's part that FM sessions and kept streams are; what the JSON door needs of its worker, too."""

    def __init__(
        self,
        *,
        resume_for_s: float = 10.0,
        memory_bytes: int | None = None,
        bound_bytes: int = 64 << 10,
        log_fd: int | None = None,
        is_ready: bool = True,
    ) -> None:
        super().__init__(
            resume_for_s=resume_for_s,
            memory_bytes=memory_bytes,
            bound_bytes=bound_bytes,
            log_fd=log_fd,
            is_ready=False,
        )
        self.streams = KeptStreams(self.loop, self.service, KEY, self.quota, self.sessions, self.max_backlog_bytes)
        if is_ready:
            self.ready()

    def begin(self, door: str = "events") -> KeptStream:
        """Return a new stream that has an answer."""
        stream = self.streams.begin(door, None)
        stream.answer = FakeAnswer(stream)
        stream.begin()
        return stream

    def close(self) -> None:
        self.streams.close()
        super().close()
