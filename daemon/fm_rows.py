"""The streams of an FM session while they are rows (`fm_columns`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from seedance.daemon.engine_client import EngineClient
from seedance.daemon.fm_answer import FmAnswer
from seedance.daemon.fm_columns import Member, Owner
from seedance.daemon.protocol.fm_frame import TOKENS_PREFIX_BYTES
from seedance.daemon.protocol.fm_messages import Ack
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.token_texts import TEXT_BYTES

_MOST_PAYLOAD_BYTES: Final = TOKENS_PREFIX_BYTES + TEXT_BYTES


class FmRows:
    """The rows of one session; its protocol is to be left alone until `leave`, but for what is here."""

    __slots__ = ("_answers", "_columns", "_number", "_protocol", "_seen_seq")

    def __init__(self, engine: EngineClient, protocol: ServerSession, answers: Sequence[FmAnswer]) -> None:
        """Own rows, which `fm_columns` has given to the streams of these answers."""
        self._columns = engine.fm_columns
        self._protocol = protocol
        self._answers = answers
        self._number = answers[0].streams[0].number
        self._seen_seq = self._columns.next_seq(self._number)
        for answer in answers:
            (stream,) = answer.streams
            answer.in_columns = True
            stream.in_columns = answer.has_text
            self._columns.set_plain(stream.number, answer.has_text)

    def leave(self) -> None:
        """Give the session back what is its own."""
        left = self._columns.leave(self._number)
        self._protocol.sent_elsewhere(left.frames)
        for answer, tokens, text_bytes in zip(self._answers, left.tokens, left.text_bytes, strict=True):
            (stream,) = answer.streams
            stream.in_columns = answer.in_columns = False
            stream.output_tokens += tokens
            answer.text_bytes += text_bytes

    def send_text(self, answer: FmAnswer, text: bytes) -> bool:
        """Send a text of a stream, its first one perhaps; False where it has to go another way."""
        (stream,) = answer.streams
        if not self._columns.send_text(stream.number, text):
            return False
        if not stream.in_columns:
            stream.in_columns = True
            self._columns.set_plain(stream.number, stream.plain)
        return True

    def has_sent(self) -> bool:
        """Tell whether anything was sent since the last call."""
        before, self._seen_seq = self._seen_seq, self._columns.next_seq(self._number)
        return self._seen_seq != before

    def acked(self, ack: Ack) -> bool:
        """Take an ACK after which there is nothing to do; False where the protocol has to look at it."""
        if not self._columns.acked(self._number, ack.seq, ack.credit):
            return False
        self._protocol.acked_elsewhere(ack.seq, ack.credit)
        return True


def enter(
    engine: EngineClient,
    protocol: ServerSession,
    session: int,
    fd: int,
    answers: Sequence[FmAnswer],
    owner: Owner,
) -> FmRows | None:
    """Have a session's streams become rows, if all that have text bring plain tokens, and nothing is in the way.

    `session` is its number in the journal, `fd` its connection's descriptor. Streams that the engine does not have stay
    outside; where it is to hear of one now, that is waited for.
    """
    inside = [answer for answer in answers if answer.streams]
    if (
        fd < 0
        or not inside
        or any(answer.is_coming for answer in answers)
        or not all(_suits(engine, each) for each in inside)
    ):
        return None
    lent = protocol.lend(_MOST_PAYLOAD_BYTES)
    if lent is None:
        return None
    members = [Member(answer.streams[0].number, lent.prefixes[answer.number]) for answer in inside]
    if not engine.fm_columns.enter(session, fd, lent, members, owner):
        return None
    return FmRows(engine, protocol, inside)


def _suits(engine: EngineClient, answer: FmAnswer) -> bool:
    (stream,) = answer.streams
    return engine.suits_columns(stream) and not answer.has_logprobs and (stream.plain or not answer.has_text)
