"""The hooks, over classes with vLLM's shape; the real ones are met in the end-to-end tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seedance.engine.request import Sampling, TenantContext
from seedance.engine.vllm_continue import begin_behind, begin_states_behind, emitted_token_ids, replay, seed_at
from seedance.engine.vllm_sampling import ModelFacts, sampling_params

FACTS = ModelFacts(
    max_model_len=64, vocab_size=100, max_logprobs=20, eos_token_id=1, generation_eos_ids=(), structured_backend=None
)


def parameters(emitted: list[int], seed: int | None = None) -> Any:
    tenant = TenantContext(name="acme", scheduling_class="gold", cache_salt="s")
    return sampling_params(Sampling(max_tokens=8, seed=seed), tenant, FACTS, emitted=emitted)


class Request:
    def __init__(self, emitted: list[int]) -> None:
        self.request_id = "1.1"
        self.sampling_params = parameters(emitted)
        self.output: list[int] = []
        self.prefill_stats: object | None = object()

    def append_output_token_ids(self, token_ids: list[int]) -> None:
        self.output += token_ids


class Generator:
    seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def make_state(emitted: list[int], seed: int | None = None) -> Any:
    class State:
        def __init__(self) -> None:
            self.sampling_params = parameters(emitted, seed)
            self.output_token_ids: list[int] = []
            self.generator = None if seed is None else Generator()
            self.num_prompt_tokens = 0
            self.__post_init__()

        def __post_init__(self) -> None:
            self.num_prompt_tokens = 3

    begin_states_behind(State)
    return State()


def test_emitted_tokens_are_the_requests_output() -> None:
    fresh, continued = Request([]), Request([5, 6])
    for request in (fresh, continued):
        begin_behind(request)
    assert (fresh.output, continued.output) == ([], [5, 6])
    assert fresh.prefill_stats is not None
    assert continued.prefill_stats is None


def test_emitted_tokens_are_the_states_output_and_change_its_seed() -> None:
    assert make_state([]).output_token_ids == []
    assert make_state([5, 6]).output_token_ids == [5, 6]
    assert make_state([5, 6]).num_prompt_tokens == 3
    assert make_state([], 7).generator.seed == 0
    assert make_state([5, 6], 7).generator.seed == seed_at(7, 2)


def test_numbers_of_a_seed_do_not_come_twice() -> None:
    assert len({seed_at(seed, place) for seed in (-1, 7, 2**62) for place in range(1, 50)}) == 3 * 49


def test_grammar_takes_what_was_emitted() -> None:
    taken: list[list[int]] = []

    def accept_tokens(request_id: str, token_ids: list[int]) -> bool:
        taken.append(token_ids)
        return 9 not in token_ids

    grammar = SimpleNamespace(accept_tokens=accept_tokens)
    assert replay(grammar, Request([])) is grammar
    assert replay(grammar, Request([5, 6])) is grammar
    assert taken == [[5, 6]]
    with pytest.raises(ValueError, match="does not fit the grammar"):
        replay(grammar, Request([5, 9]))


def test_requests_without_sampling_have_emitted_nothing() -> None:
    assert list(emitted_token_ids(None)) == []
    assert list(emitted_token_ids(SimpleNamespace(extra_args=None))) == []
