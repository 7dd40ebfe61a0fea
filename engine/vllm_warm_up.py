"""What a fresh vLLM engine is asked before it serves."""

from __future__ import annotations

from seedance.engine.request import Sampling
from seedance.engine.vllm_sampling import ModelFacts


def warm_up_rounds(facts: ModelFacts) -> list[list[tuple[list[int], Sampling]]]:
    """Return requests that walk every path a first user could take, one list to run at a time.

    The last round asks for structured output alone, so that its failure can be told from others.
    """
    longest = facts.max_model_len - 8

    def prompt(length: int) -> list[int]:
        return [(7919 * at + length) % facts.vocab_size for at in range(max(1, min(length, longest)))]

    greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    mixed = [
        Sampling(max_tokens=6, seed=1, top_p=0.9, top_k=8),
        Sampling(max_tokens=6, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
        Sampling(max_tokens=6, logprobs=min(5, facts.max_logprobs), min_tokens=2),
        Sampling(max_tokens=6, logit_bias={0: -1.0}, temperature=0.5),
    ]
    alone = [[(prompt(length), greedy)] for length in (16, 1, 128)]
    together = [(prompt(16 * (at + 1)), sampling) for at, sampling in enumerate([greedy, *mixed, greedy, *mixed])]
    again = [[(prompt(16), sampling)] for sampling in mixed]
    structured = [(prompt(16), Sampling(max_tokens=4, json_object=True))] if facts.structured_backend else []
    return [*alone, together, *again, structured]
