"""The streams of the synthetic engine: which tokens follow a prompt, and where they end."""

from __future__ import annotations

import array
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from seedance.engine.adapter import Output
from seedance.engine.request import FinishReason, Sampling, TokenLogprobs
from seedance.engine.settings import EngineSettings
from seedance.engine.synthetic_vocabulary import EOS_ID, FOLLOWERS, STARTERS, VOCAB_SIZE

_TOKEN_BYTES: Final = [token_id.to_bytes(4, "little") for token_id in range(VOCAB_SIZE)]
_MIX: Final = 0x9E3779B1  # 2³² / golden ratio: spreads the checksum's bits before the high ones are used
_STARTERS: Final = len(STARTERS)


def _generate(seed: int, prompt_token_ids: Sequence[int], eos_below: int = 0, eos_from: int = 0) -> Iterator[int]:
    """Yield the tokens after a prompt for ever.

    `eos_below` is the chance, of 65,536, of the end-of-text token at each place; none comes before place `eos_from`.
    """
    seed_bytes = (seed & (2**64 - 1)).to_bytes(8, "little")
    # The checksum stands for the seed and all tokens so far.
    state = zlib.crc32(array.array("I", prompt_token_ids).tobytes(), zlib.crc32(seed_bytes))
    follower = FOLLOWERS.get(prompt_token_ids[-1]) if prompt_token_ids else None
    for position in itertools.count():
        mixed = state * _MIX & 0xFFFFFFFF
        if follower is not None:
            token_id = follower
        elif mixed & 0xFFFF < eos_below and position >= eos_from:
            token_id = EOS_ID
        else:
            token_id = STARTERS[(mixed >> 8) * _STARTERS >> 24]
        yield token_id
        state = zlib.crc32(_TOKEN_BYTES[token_id], state)
        follower = FOLLOWERS.get(token_id)


def expected_token_ids(
    seed: int, prompt_token_ids: Sequence[int], count: int, eos_probability: float = 0.0
) -> list[int]:
    """Return the first `count` tokens after a prompt, as if no limit or stop token ended them."""
    return list(itertools.islice(_generate(seed, prompt_token_ids, _eos_below(eos_probability)), count))


def _eos_below(probability: float) -> int:
    return round(probability * 65_536)


class Stream:
    """One generation inside the engine.

    `length` counts its prompt and what it has emitted. `computed` tokens have been read; when they are `target`, the
    next token comes out.
    """

    __slots__ = (
        "blocks",
        "computed",
        "ends",
        "is_held",
        "key",
        "length",
        "logprobs",
        "min_length",
        "remaining",
        "target",
        "token_ids",
    )

    def __init__(
        self,
        key: int,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        settings: EngineSettings,
        emitted_token_ids: Sequence[int] = (),
    ) -> None:
        seed = settings.synthetic.seed if sampling.seed is None else sampling.seed
        eos_below = _eos_below(settings.synthetic.eos_probability)
        self.key = key
        emitted = len(emitted_token_ids)
        self.length = len(prompt_token_ids) + emitted
        # An ignored end-of-text is a token like others, at any place.
        eos_from = 0 if sampling.ignore_eos else sampling.min_tokens - emitted
        self.token_ids = _generate(seed, [*prompt_token_ids, *emitted_token_ids], eos_below, eos_from)
        self.min_length = len(prompt_token_ids) + sampling.min_tokens
        self.remaining = min(sampling.max_tokens - emitted, settings.max_model_len - self.length)
        self.ends = frozenset(sampling.stop_token_ids)
        if eos_below and not sampling.ignore_eos:
            self.ends |= {EOS_ID}
        self.logprobs = sampling.logprobs
        self.computed = 0
        self.target = self.length
        self.is_held = False
        self.blocks = 0

    def advance(self, count: int) -> Output:
        """Emit up to `count` tokens."""
        count = min(count, self.remaining)
        token_ids = list(itertools.islice(self.token_ids, count))
        finish_reason = FinishReason.LENGTH if count == self.remaining else None
        if self.ends:
            # `place` counts this token in.
            for place, token_id in enumerate(token_ids, start=1):
                if token_id in self.ends and self.length + place > self.min_length:
                    del token_ids[place:]
                    finish_reason = FinishReason.STOP
                    break
        self.length += len(token_ids)
        self.remaining -= len(token_ids)
        logprobs = None if self.logprobs is None else [_logprobs(token_id, self.logprobs) for token_id in token_ids]
        return Output(self.key, token_ids, finish_reason, logprobs)


def _logprobs(token_id: int, alternatives: int) -> TokenLogprobs:
    """Return probabilities for a token and its alternatives; the chosen one is always the likeliest."""
    best = -(token_id % 100) / 100
    others = [(token_id + i) % VOCAB_SIZE for i in range(alternatives)]
    return TokenLogprobs([token_id, *others], [best, *(best - i for i in range(alternatives))], 1)
