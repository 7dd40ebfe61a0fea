from __future__ import annotations

import argparse

import pytest
from support import tiny_tokenizers

from bench.prompts import Phase, Round, summary, text_of

ARGUMENTS = argparse.Namespace(streams=1000, prompts=8, prompt_tokens=200_000)


def phase(gap_us: int, health_us: int) -> Phase:
    return Phase(
        seconds=2.0,
        messages=100,
        gap_p50_us=50_000,
        gap_p99_us=gap_us,
        gap_max_us=2 * gap_us,
        health_p99_us=health_us,
        health_max_us=health_us,
    )


def test_growth_is_formed_within_rounds() -> None:
    rounds = [
        Round(phase(60_000, 1000), {"other": phase(61_000, 9000), "same": phase(64_000, 8000)}),
        Round(phase(80_000, 2000), {"other": phase(82_000, 11_000), "same": phase(90_000, 8000)}),
        Round(phase(50_000, 3000), {"other": phase(53_000, 10_000), "same": phase(56_000, 8000)}),
    ]
    result = summary(rounds, ARGUMENTS)
    assert result["gap_p99_growth_ms_other"] == pytest.approx(2.0)
    assert result["gap_p99_growth_ms_same"] == pytest.approx(6.0)
    assert result["health_p99_ms_other"] == pytest.approx(10.0)
    assert result["gap_p99_ms_alone"] == pytest.approx(60.0)


def test_a_prompt_has_as_many_tokens_as_are_wanted() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert 5000 <= len(tokenizer.encode(text_of(tokenizer, 5000)).ids) <= 5500
