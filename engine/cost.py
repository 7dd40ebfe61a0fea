"""What a step of the engine costs: a model fitted online to measured step times, and who owes how much of a step.

The time of a step is taken as a sum: a fixed part (weights are read once for everybody), an extra for a step that reads
prompts at all (no captured graph fits it), and a price each for prompt tokens, decoded tokens, their context, and the
attention of prompt tokens to their context. The prices are a least-squares fit that cannot go negative.

* Old steps fade out; prices that recent steps say nothing about stay as they are.
* Errors are taken relative to the step's length, and a step far off (a page fault, a stopped machine, a compilation)
  pulls no harder than one at the edge of the usual spread (Huber's weights, with a spread that is followed online).
* The first steps of an engine warm it up: they are looked at together, and those that took far too long are left out.

`observe` only notes a step; every few steps the prices are solved for.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

WARM_UP_STEPS: Final = 16
_FADE: Final = 0.997
_SOLVE_FIRST: Final = 4
_SOLVE_EVERY: Final = 64
_SPREAD_STEP: Final = 0.03
_SPREAD_MIN: Final = 0.01
_EDGE: Final = 2.0
_PRIOR_STRENGTH: Final = 1e-3
_WARM_UP_FACTOR: Final = 2.5
_PAIRS: Final = 1_000


class StepLoad(msgspec.Struct):
    """What a step, or one tenant's part of it, has to do.

    `requests` counts those scheduled. `context_tokens` sums the contexts of the decoded ones; `attention` counts pairs
    of a prompt token and a token before it, in thousands.
    """

    requests: int = 0
    prefill_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0
    attention: float = 0.0

    def add_prefill(self, tokens: int, context_tokens: int) -> None:
        """Add the next `tokens` of a prompt of which `context_tokens` have been read."""
        self.requests += 1
        self.prefill_tokens += tokens
        self.attention += tokens * (context_tokens + tokens / 2) / _PAIRS


class Prices(msgspec.Struct, frozen=True):
    """What each thing in a step takes, in seconds; `mixed_s` once, in a step that reads prompts."""

    fixed_s: float
    mixed_s: float
    prefill_s: float
    decode_s: float
    context_s: float
    attention_s: float

    def cost_s(self, load: StepLoad) -> float:
        """Return the time of a step with this load; nothing for an empty one."""
        if not load.requests:
            return 0.0
        return (
            self.fixed_s
            + (self.mixed_s if load.prefill_tokens else 0.0)
            + self.prefill_s * load.prefill_tokens
            + self.decode_s * load.decodes
            + self.context_s * load.context_tokens
            + self.attention_s * load.attention
        )


class Rates(msgspec.Struct, frozen=True):
    """What each thing in one measured step owes of it, in seconds."""

    request_s: float
    prefill_s: float
    decode_s: float
    context_s: float
    attention_s: float

    def share_s(self, part: StepLoad) -> float:
        """Return what a part of the step owes."""
        return (
            self.request_s * part.requests
            + self.prefill_s * part.prefill_tokens
            + self.decode_s * part.decodes
            + self.context_s * part.context_tokens
            + self.attention_s * part.attention
        )


UNMEASURED: Final = Prices(2e-3, 2e-4, 2e-5, 1e-4, 1e-8, 1e-6)
"""Where the fit begins, in the order of magnitude of a small model; of a fitted one only unseen prices come from it."""


class CostModel:
    """The prices as measured so far; `prices` is replaced, never changed."""

    def __init__(self, prices: Prices = UNMEASURED) -> None:
        self.prices = prices
        self.steps = 0
        # The fit is for multiples of these, so that all unknowns are of one magnitude.
        self._units = [max(price, unit) for price, unit in zip(_values(prices), _values(UNMEASURED), strict=True)]
        # The normal equations, right side last: sums over steps of what each has, and takes, times each other.
        count = len(self._units) + 1
        self._sums = [[0.0] * count for _ in range(count)]
        # Of each step that is not in the sums yet: what it has, what it took, and its weight.
        self._seen: list[tuple[float, ...]] = []
        self._free = list(range(len(self._units)))
        self._spread = 0.1
        self._solve_in = _SOLVE_FIRST
        self._warm_up: list[tuple[StepLoad, float]] = []

    @property
    def is_fitted(self) -> bool:
        """Whether measured steps, and not a first guess, make the prices."""
        return self.steps > WARM_UP_STEPS

    def predict_s(self, load: StepLoad) -> float:
        """Return how long a step with this load should take."""
        return self.prices.cost_s(load)

    def observe(self, load: StepLoad, step_s: float, predicted_s: float | None = None) -> None:
        """Learn from a step. The load belongs to the model from here; an empty one says nothing."""
        if not load.requests or step_s <= 0:
            return
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            self._warm_up.append((load, step_s))
            if self.steps == WARM_UP_STEPS:
                self._end_warm_up()
            return
        if predicted_s is None:
            predicted_s = self.prices.cost_s(load)
        self._learn(_counts(load), step_s, predicted_s)
        self._solve_if_due(1)

    def observe_run(self, load: StepLoad, times_s: Sequence[float]) -> None:
        """Learn, once the prices are fitted, from steps of those who decode alone; `load` is that of the first."""
        decodes, context_tokens = load.decodes, load.context_tokens
        predicted_s, more_s = self.prices.cost_s(load), self.prices.context_s * decodes
        for step_s in times_s:
            if step_s > 0:
                self._learn((1.0, 0.0, 0, decodes, context_tokens, 0.0), step_s, predicted_s)
            context_tokens += decodes
            predicted_s += more_s
        self.steps += len(times_s)
        self._solve_if_due(len(times_s))

    def _learn(self, counts: tuple[float, ...], step_s: float, predicted_s: float) -> None:
        error = abs(step_s / predicted_s - 1)
        edge = _EDGE * self._spread
        weight = 1.0 if error <= edge else edge / error
        self._seen.append((*counts, step_s, weight / (predicted_s * predicted_s)))
        spread = self._spread + _SPREAD_STEP * ((error if error < 2 * edge else 2 * edge) - self._spread)
        self._spread = spread if spread > _SPREAD_MIN else _SPREAD_MIN

    def _solve_if_due(self, steps: int) -> None:
        self._solve_in -= steps
        if self._solve_in <= 0:
            self._solve()
            self._solve_in = min(_SOLVE_EVERY, max(_SOLVE_FIRST, self.steps // 8))

    def rates(self, load: StepLoad, step_s: float, cost_s: float | None = None) -> Rates:
        """Return what each thing in a step that should take `cost_s` owes, so that all together owe `step_s`.

        The fixed part goes by requests, the extra of a mixed step by prompt tokens, the rest to whoever caused it.
        """
        prices = self.prices
        if cost_s is None:
            cost_s = prices.cost_s(load)
        if cost_s <= 0:
            return Rates(step_s / load.requests if load.requests else 0.0, 0.0, 0.0, 0.0, 0.0)
        scale = step_s / cost_s
        mixed_s = prices.mixed_s / load.prefill_tokens if load.prefill_tokens else 0.0
        return Rates(
            scale * prices.fixed_s / load.requests,
            scale * (prices.prefill_s + mixed_s),
            scale * prices.decode_s,
            scale * prices.context_s,
            scale * prices.attention_s,
        )

    def prefill_tokens_within(self, load: StepLoad, limit_s: float, context_tokens: int) -> int:
        """Return how many tokens of one more prompt fit into a step of that load before it takes `limit_s`.

        `context_tokens` of the prompt have been read. At least 0.
        """
        prices = self.prices
        spare_s = limit_s - prices.cost_s(load)
        if not load.requests:
            spare_s -= prices.fixed_s
        if not load.prefill_tokens:
            spare_s -= prices.mixed_s
        if spare_s <= 0:
            return 0
        # tokens x (price + attention x (context + tokens / 2)) = spare, solved for tokens without cancellation.
        price_s = prices.prefill_s + prices.attention_s * context_tokens / _PAIRS
        curve = prices.attention_s / _PAIRS
        root = (price_s * price_s + 2 * curve * spare_s) ** 0.5
        divisor = price_s + root
        return int(min(2 * spare_s / divisor, 1e9)) if divisor > 0 else 1_000_000_000

    def _end_warm_up(self) -> None:
        ratios = [step_s / self.prices.cost_s(load) for load, step_s in self._warm_up]
        usual = statistics.median_low(ratios)
        self._units = [unit * usual for unit in self._units]
        self.prices = Prices(*(price * usual for price in _values(self.prices)))
        for (load, step_s), ratio in zip(self._warm_up, ratios, strict=True):
            if ratio <= _WARM_UP_FACTOR * usual:
                self._seen.append((*_counts(load), step_s, self.prices.cost_s(load) ** -2))
        self._warm_up.clear()
        self._solve()

    def _sum_up(self) -> None:
        """Take the steps that were seen into the sums; old ones fade."""
        *columns, weights = zip(*self._seen, strict=True)
        self._seen.clear()
        fading = _FADE ** len(weights)
        weights = tuple(weight * _FADE**age for age, weight in enumerate(reversed(weights)))[::-1]
        units = (*self._units, 1.0)
        for i, column in enumerate(columns):
            weighted = [units[i] * value * weight for value, weight in zip(column, weights, strict=True)]
            for j in range(i + 1):
                value = self._sums[i][j] * fading + units[j] * sum(map(operator.mul, weighted, columns[j]))
                self._sums[i][j] = self._sums[j][i] = value

    def _solve(self) -> None:
        """Find the prices of least error; one that would be negative is 0, and the others are found without it."""
        self._sum_up()
        current = [price / unit for price, unit in zip(_values(self.prices), self._units, strict=True)]
        found = _solve_for(self._free, current, self._sums)  # which are not 0 seldom changes
        if not _is_least(found, current, self._sums):
            found = _solve_for(list(range(len(current))), current, self._sums)
            while min(found.values()) < 0:
                del found[min(found, key=found.__getitem__)]
                found = _solve_for(list(found), current, self._sums)
        self._free = list(found)
        prices = Prices(*(found.get(i, 0.0) * unit for i, unit in enumerate(self._units)))
        if prices.fixed_s + prices.prefill_s + prices.decode_s > 0:
            self.prices = prices


def _is_least(found: dict[int, float], current: list[float], sums: list[list[float]]) -> bool:
    """Return whether no price is negative, and the error would not be less with one of the others above 0."""
    if min(found.values()) < 0:
        return False
    for i, line in enumerate(sums[:-1]):
        if i not in found:
            explained = sum([line[j] * price for j, price in found.items()])
            if explained < line[-1] + _PRIOR_STRENGTH * current[i]:
                return False
    return True


def _solve_for(free: list[int], current: list[float], sums: list[list[float]]) -> dict[int, float]:
    """Solve the normal equations for some unknowns, the others being 0, by Gauss's elimination.

    The matrix is positive definite thanks to the pull towards the current prices, so no pivoting is needed.
    """
    rows: list[list[float]] = []
    for i in free:
        row = [sums[i][j] for j in free]
        row.append(sums[i][-1] + _PRIOR_STRENGTH * current[i])
        row[len(rows)] += _PRIOR_STRENGTH
        rows.append(row)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            for j in range(place, len(row)):
                row[j] -= factor * pivot[j]
    solution = [0.0] * len(rows)
    for place in range(len(rows) - 1, -1, -1):
        row = rows[place]
        known = sum(row[j] * solution[j] for j in range(place + 1, len(rows)))
        solution[place] = (row[-1] - known) / row[place]
    return dict(zip(free, solution, strict=True))


def _values(prices: Prices) -> tuple[float, ...]:
    return (
        prices.fixed_s,
        prices.mixed_s,
        prices.prefill_s,
        prices.decode_s,
        prices.context_s,
        prices.attention_s,
    )


def _counts(load: StepLoad) -> tuple[float, ...]:
    """Return how often a step pays each price, in the order of `Prices`."""
    mixed = 1.0 if load.prefill_tokens else 0.0
    return (1.0, mixed, load.prefill_tokens, load.decodes, load.context_tokens, load.attention)
