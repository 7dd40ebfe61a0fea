"""A prompt that a new engine answers before anybody else asks it: is what comes out what a model can have said?

An engine that starts need not be right: weights that were read into the wrong places, or a kernel that does not fit the
device, show in numbers that are none. The prompt is the same for every model of a vocabulary's size, and the likeliest
tokens are asked for, so that two runs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from seedance.engine.adapter import Output
from seedance.engine.request import FinishReason, ModelInfo, Sampling

PROMPT_TOKENS: Final = 24
SAMPLING: Final = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
LIMIT_S: Final = 60.0
"""So long a new engine, which is warm, may take for it on a busy machine."""

_ROUNDING: Final = 1e-3  # a certain token's log probability is 0, give or take
_STEP: Final = 7919  # a prime: the ids are spread over any vocabulary


def prompt(model: ModelInfo) -> list[int]:
    """Return the prompt for a model."""
    length = max(1, min(PROMPT_TOKENS, model.max_model_len - SAMPLING.max_tokens))
    return [(_STEP * (place + 1)) % model.vocab_size for place in range(length)]


class Canary:
    """Takes the outputs of the canary's generation; `fault` says what is wrong once `is_done`, "" for nothing."""

    def __init__(self, key: int, model: ModelInfo) -> None:
        self.key = key
        self.is_done = False
        self.fault = ""
        self.token_ids: list[int] = []
        self._model = model
        self._wanted = min(SAMPLING.max_tokens, model.max_model_len - len(prompt(model)))

    def take(self, outputs: Sequence[Output]) -> None:
        """Take the outputs of a step; those of other generations are passed over."""
        for output in outputs:
            if output.key == self.key and not self.is_done:
                self._take(output)

    def _take(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.fault = self._fault_in(output)
        if output.finish_reason is not None and not self.fault and len(self.token_ids) != self._wanted:
            self.fault = f"it gave {len(self.token_ids)} tokens, and {self._wanted} were asked for"
        self.is_done = bool(self.fault) or output.finish_reason is not None

    def _fault_in(self, output: Output) -> str:
        if output.finish_reason is FinishReason.ERROR:
            return output.error or "it failed without a reason"
        for token_id in output.token_ids:
            if not 0 <= token_id < self._model.vocab_size:
                return f"it gave token {token_id}, and its vocabulary has {self._model.vocab_size}"
        positions = output.logprobs or []
        if len(positions) != len(output.token_ids):
            return f"it gave log probabilities of {len(positions)} tokens, and {len(output.token_ids)} tokens"
        for position in positions:
            for logprob in position.logprobs:
                if not (math.isfinite(logprob) and logprob <= _ROUNDING):
                    return f"it gave the log probability {logprob}, as an engine does whose weights are wrong"
        return ""
