"""What a new engine's first answer must be."""

from __future__ import annotations

import math

import pytest

from seedance.engine.adapter import Output
from seedance.engine.canary import SAMPLING, Canary, prompt
from seedance.engine.request import FinishReason, ModelInfo, TokenLogprobs


def model(vocab_size: int = 100, max_model_len: int = 1000) -> ModelInfo:
    return ModelInfo(
        name="m",
        tokenizer_dir="",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(),
        created=0,
        engine="vllm",
    )


def output(*token_ids: int, key: int = 5, last: bool = False, logprob: float = -1.0) -> Output:
    logprobs = [TokenLogprobs([token_id, 1], [logprob, -2.0], 1) for token_id in token_ids]
    return Output(key, list(token_ids), FinishReason.LENGTH if last else None, logprobs)


def judged(*outputs: Output, of: ModelInfo | None = None) -> tuple[bool, str]:
    canary = Canary(5, of or model())
    for one in outputs:
        canary.take([one])
    return canary.is_done, canary.fault


@pytest.mark.parametrize(("vocab_size", "max_model_len"), [(1, 2), (100, 17), (262_144, 8192)])
def test_the_prompt_fits_every_model(vocab_size: int, max_model_len: int) -> None:
    ids = prompt(model(vocab_size, max_model_len))
    assert ids
    assert len(ids) < max_model_len
    assert all(0 <= token_id < vocab_size for token_id in ids)
    assert ids == prompt(model(vocab_size, max_model_len))


def test_an_answer_as_it_should_be() -> None:
    whole = [output(*range(8)), output(99, key=6), output(*range(8), last=True)]
    assert judged(*whole[:2]) == (False, "")
    assert judged(*whole) == (True, "")


def test_a_short_context_shortens_it() -> None:
    assert judged(output(*range(4), last=True), of=model(max_model_len=5)) == (True, "")


@pytest.mark.parametrize(
    ("faulty", "fault"),
    [
        (output(100), "it gave token 100, and its vocabulary has 100"),
        (output(-1), "it gave token -1"),
        (output(1, logprob=math.nan), "it gave the log probability nan"),
        (output(1, logprob=-math.inf), "it gave the log probability -inf"),
        (output(1, logprob=0.5), "it gave the log probability 0.5"),
        (Output(5, [1]), "it gave log probabilities of 0 tokens, and 1 tokens"),
        (Output(5, [], FinishReason.ERROR, error="CUDA error"), "CUDA error"),
        (output(1, last=True), f"it gave 1 tokens, and {SAMPLING.max_tokens} were asked for"),
    ],
)
def test_an_answer_as_it_must_not_be(faulty: Output, fault: str) -> None:
    is_done, said = judged(faulty)
    assert is_done
    assert said.startswith(fault)
