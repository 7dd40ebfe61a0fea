"""A stream as the worker knows it: one generation, from the submit to its end."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Protocol

from seedance.daemon.detokenizer import Detokenizer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.stop_strings import StopDetokenizer
from seedance.daemon.stream_columns import StreamColumns
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling, TokenLogprobs


class Sink(Protocol):
    """Where the text of one stream goes; called from the event loop, never after its last call."""

    def text_arrived(self, text: str) -> None:
        """Take more text; empty only where the stream `tells_each`."""

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        """Take more text, which may be empty, with the log probabilities of the tokens behind it."""

    def note_arrived(self, note: str) -> None:
        """Take what is going on with the engine; no text is lost by it."""

    def stream_finished(self, reason: FinishReason) -> None:
        """All text has come: the last call."""

    def stream_failed(self, error: ApiError) -> None:
        """No more text will come: the last call."""


def _nobody(waiting_bytes: int) -> None:
    raise AssertionError("nobody said who is told of a bypass that falls behind")


class Stream:
    """One generation on its way to one sink; `number` is its name on the engine channel.

    A token of `hidden_token_ids` that ends the stream counts, but has no text. `plain` says that a token with a text of
    its own stands for just that text: nothing is held back before it, nothing is looked for in it. With `columns` such
    a token's frame goes past the sink, to the flow of `bypass_fd` (see `EngineClient.bypass`). `output_tokens` lacks
    the tokens that went this way until the stream has left the engine client. `in_columns` says that its plain
    tokens are made TOKENS with those of others (`fm_columns`); it lacks those, too, until the stream is out of there.
    `is_paused` says that the engine was told to leave it out, `is_sampled` that its tokens are drawn by chance.
    `tells_each` says that its sink is to hear of each token that comes, of one that brings no text by an empty one.
    `tokens` names what its token ids mean (`ModelInfo.tokens`).

    `prompt_token_ids`, `sampling`, and `token_ids` of all that came (see `emitted`) are what another engine goes on
    from. `is_kept` says that it waits for one for as long as it takes, `is_resumed` that one has been asked to.
    `charged_tokens` is what its prompt was charged, at `charged_at`; a host that refuses it gives that back.
    """

    __slots__ = (
        "bypass_fd",
        "cached_tokens",
        "charged_at",
        "charged_tokens",
        "columns",
        "detokenizer",
        "fell_behind",
        "hidden_token_ids",
        "in_columns",
        "is_kept",
        "is_paused",
        "is_resumed",
        "is_sampled",
        "number",
        "output_tokens",
        "plain",
        "prompt_token_ids",
        "sampling",
        "sink",
        "stop",
        "tells_each",
        "token_ids",
        "tokens",
        "urgency",
    )

    sampling: Sampling

    def __init__(self, sink: Sink, detokenizer: Detokenizer, stop: StopDetokenizer | None) -> None:
        """`stop`, if any, wraps the detokenizer and is fed in its place."""
        self.number = 0
        self.sink = sink
        self.detokenizer = detokenizer
        self.stop = stop
        self.plain = stop is None and detokenizer.is_plain
        self.in_columns = self.is_paused = self.is_kept = self.is_resumed = self.is_sampled = self.tells_each = False
        self.columns: StreamColumns | None = None
        self.bypass_fd = -1
        self.fell_behind: Callable[[int], None] = _nobody
        self.output_tokens = 0
        self.cached_tokens = 0
        self.charged_at = 0.0
        self.charged_tokens = 0
        self.hidden_token_ids: tuple[int, ...] = ()
        self.prompt_token_ids = array.array("I")
        self.token_ids = array.array("I")
        self.urgency = NOT_URGENT
        self.tokens = ""
