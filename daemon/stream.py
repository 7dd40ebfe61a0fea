"""A stream as the worker knows it: one generation, from the submit to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from seedance.daemon.detokenizer import Detokenizer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.ring.driver import Flow
from seedance.daemon.stop_strings import StopDetokenizer
from seedance.engine.request import FinishReason, TokenLogprobs


class Sink(Protocol):
    """Where the text of one stream goes; called from the event loop, never after its last call."""

    def text_arrived(self, text: str) -> None:
        """Take more text; never empty."""

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        """Take more text, which may be empty, with the log probabilities of the tokens behind it."""

    def stream_finished(self, reason: FinishReason) -> None:
        """All text has come: the last call."""

    def stream_failed(self, error: ApiError) -> None:
        """No more text will come: the last call."""


def _nobody(waiting_bytes: int) -> None:
    raise AssertionError("nobody said who is told of a plain flow that falls behind")


class Stream:
    """One generation on its way to one sink; `number` is its name on the engine channel.

    A token of `hidden_token_ids` that ends the stream counts, but has no text. `plain` says that a token with a text of
    its own stands for just that text: nothing is held back before it, nothing is looked for in it. `plain_flow`, if
    any, takes such a token's frame, which is the same for all streams that have one, past the sink; `fell_behind` is
    then told how many bytes wait there.
    """

    __slots__ = (
        "cached_tokens",
        "detokenizer",
        "fell_behind",
        "hidden_token_ids",
        "number",
        "output_tokens",
        "plain",
        "plain_flow",
        "sink",
        "stop",
    )

    def __init__(self, sink: Sink, detokenizer: Detokenizer, stop: StopDetokenizer | None) -> None:
        """`stop`, if any, wraps the detokenizer and is fed in its place."""
        self.number = 0
        self.sink = sink
        self.detokenizer = detokenizer
        self.stop = stop
        self.plain = stop is None and detokenizer.is_plain
        self.plain_flow: Flow | None = None
        self.fell_behind: Callable[[int], None] = _nobody
        self.output_tokens = 0
        self.cached_tokens = 0
        self.hidden_token_ids: tuple[int, ...] = ()
