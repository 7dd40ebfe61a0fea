"""A stream as the worker knows it: one generation, from the submit to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seedance.daemon.detokenizer import Detokenizer
from seedance.daemon.doors.errors import ApiError
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


class Stream:
    """One generation on its way to one sink; `number` is its name on the engine channel.

    A token of `hidden_token_ids` that ends the stream counts, but has no text. `plain` says that a token with a text of
    its own stands for just that text: nothing is held back before it, nothing is looked for in it.
    """

    __slots__ = (
        "cached_tokens",
        "detokenizer",
        "hidden_token_ids",
        "number",
        "output_tokens",
        "plain",
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
        self.output_tokens = 0
        self.cached_tokens = 0
        self.hidden_token_ids: tuple[int, ...] = ()
