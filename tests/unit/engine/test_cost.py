from __future__ import annotations

import random

import msgspec
import pytest
from support.workloads import PRICES

from seedance.engine.cost import UNMEASURED, WARM_UP_STEPS, CostModel, Prices, StepLoad

pytestmark = pytest.mark.unit


def load(rng: random.Random) -> StepLoad:
    """Return the load of a step: mostly decoding, some of it with prompts."""
    decodes = rng.randint(1, 200)
    made = StepLoad(requests=decodes, decodes=decodes, context_tokens=decodes * rng.randint(50, 4000))
    if rng.random() < 0.3:
        made.add_prefill(rng.randint(16, 1500), rng.choice([0, 0, 3000]))
    return made


def taught(prices: Prices, steps: int, *, noise: float = 0.02, seed: int = 1) -> CostModel:
    rng = random.Random(seed)
    model = CostModel()
    for _ in range(steps):
        step = load(rng)
        model.observe(step, prices.cost_s(step) * rng.gauss(1.0, noise))
    return model


def error(model: CostModel, prices: Prices, seed: int = 2) -> float:
    """Return the mean relative error on new steps."""
    rng = random.Random(seed)
    steps = [load(rng) for _ in range(200)]
    return sum(abs(model.predict_s(step) / prices.cost_s(step) - 1) for step in steps) / len(steps)


def times(prices: Prices, factor: float) -> Prices:
    return Prices(*(price * factor for price in msgspec.structs.astuple(prices)))


def test_the_first_guess_is_used_until_steps_are_measured() -> None:
    model = CostModel()
    assert model.prices == UNMEASURED
    assert not model.is_fitted


@pytest.mark.parametrize("factor", [0.02, 1.0, 100.0])
def test_prices_are_found_at_any_speed(factor: float) -> None:
    prices = times(PRICES, factor)
    model = taught(prices, 600)
    assert model.is_fitted
    assert error(model, prices) < 0.02
    assert model.prices.prefill_s == pytest.approx(prices.prefill_s, rel=0.1)
    assert model.prices.fixed_s == pytest.approx(prices.fixed_s, rel=0.1)


def test_a_slow_warm_up_is_forgotten_at_once() -> None:
    rng = random.Random(3)
    model = CostModel()
    for number in range(WARM_UP_STEPS + 60):
        step = load(rng)
        model.observe(step, PRICES.cost_s(step) * (200 if number < 6 else 1))
    assert error(model, PRICES) < 0.05


def test_outliers_hardly_move_the_prices() -> None:
    rng = random.Random(4)
    model = taught(PRICES, 400)
    for _ in range(600):
        step = load(rng)
        late = 20.0 if rng.random() < 0.05 else rng.gauss(1.0, 0.02)
        model.observe(step, PRICES.cost_s(step) * late)
    assert error(model, PRICES) < 0.06


def test_another_speed_is_learned() -> None:
    rng = random.Random(5)
    model = taught(PRICES, 800)
    slower = times(PRICES, 3.0)
    for _ in range(1500):
        step = load(rng)
        model.observe(step, slower.cost_s(step))
    assert error(model, slower) < 0.05


def test_prices_that_steps_say_nothing_about_stay() -> None:
    model = taught(PRICES, 600)
    before = model.prices.prefill_s
    for _ in range(5000):
        step = StepLoad(requests=50, decodes=50, context_tokens=50_000)
        model.observe(step, PRICES.cost_s(step))
    assert model.prices.prefill_s == pytest.approx(before, rel=0.05)
    assert model.predict_s(step) == pytest.approx(PRICES.cost_s(step), rel=0.01)


def test_no_price_is_ever_negative() -> None:
    rng = random.Random(6)
    model = CostModel()
    for _ in range(500):
        model.observe(load(rng), rng.uniform(1e-4, 1.0))
        assert min(msgspec.structs.astuple(model.prices)) >= 0


def test_from_a_run_of_steps_it_learns_as_from_each() -> None:
    models = [CostModel(), CostModel()]
    rng = random.Random(5)
    for _ in range(200):
        mixed = load(rng)
        run = StepLoad(decodes := rng.randint(1, 64), 0, decodes, rng.randint(0, 50_000))
        each = [StepLoad(decodes, 0, decodes, run.context_tokens + decodes * number) for number in range(16)]
        times_s = [PRICES.cost_s(one) * rng.uniform(0.95, 1.05) for one in each]
        for model in models:
            model.observe(msgspec.structs.replace(mixed), PRICES.cost_s(mixed))
        models[0].observe_run(run, times_s)
        for one, step_s in zip(each, times_s, strict=True):
            models[1].observe(one, step_s)
    assert models[0].steps == models[1].steps
    for one in (run, mixed):
        predicted_s = [model.predict_s(one) for model in models]
        assert predicted_s == pytest.approx([PRICES.cost_s(one)] * 2, rel=0.02)


def test_empty_and_timeless_steps_say_nothing() -> None:
    model = CostModel()
    model.observe(StepLoad(), 1.0)
    model.observe(StepLoad(requests=1, decodes=1), 0.0)
    assert model.steps == 0


def test_a_step_is_split_whole_and_by_cause() -> None:
    model = CostModel(PRICES)
    decoding = StepLoad(requests=3, decodes=3, context_tokens=3000)
    reading = StepLoad()
    reading.add_prefill(512, 1024)
    whole = StepLoad(requests=4, prefill_tokens=512, decodes=3, context_tokens=3000, attention=reading.attention)
    rates = model.rates(whole, 0.05)
    shares = [rates.share_s(decoding), rates.share_s(reading)]
    assert sum(shares) == pytest.approx(0.05)
    assert shares[1] > shares[0]
    # The fixed part is one of four for the prompt.
    exact = PRICES.fixed_s / 4 + PRICES.mixed_s + 512 * PRICES.prefill_s + PRICES.attention_s * reading.attention
    assert shares[1] == pytest.approx(exact * 0.05 / PRICES.cost_s(whole))


def test_a_step_without_prices_is_split_by_requests() -> None:
    model = CostModel(Prices(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert model.rates(StepLoad(requests=4, decodes=4), 1.0).share_s(StepLoad(requests=1, decodes=1)) == 0.25


@pytest.mark.parametrize("context_tokens", [0, 100, 100_000])
@pytest.mark.parametrize("limit_s", [0.001, 0.02, 0.5])
def test_a_chunk_fills_a_step_and_no_more(limit_s: float, context_tokens: int) -> None:
    model = CostModel(PRICES)
    step = StepLoad(requests=8, decodes=8, context_tokens=8000)
    tokens = model.prefill_tokens_within(step, limit_s, context_tokens)
    if tokens:
        step.add_prefill(tokens, context_tokens)
        assert model.predict_s(step) <= limit_s + 1e-9
        step.add_prefill(1, context_tokens + tokens)
        assert model.predict_s(step) > limit_s
    else:
        step.add_prefill(1, context_tokens)
        assert model.predict_s(step) > limit_s
