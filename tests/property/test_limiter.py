"""The bounds that the limiter states, under any course of events.

Times are multiples of a power of two of a second, which doubles hold exactly: what is tested is the rule, not rounding.
"""

from __future__ import annotations

import math

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seedance.qos.limiter import DAY_S, MINUTE_S, LimiterSnapshot, Refusal, TenantLimiter
from seedance.qos.quota import Quota, RequestQuota, TokenQuota

ROUNDING_CREDITS = 1e-3

limits = st.one_of(st.none(), st.integers(1, 6), st.integers(50, 3000))
quotas = st.builds(
    Quota,
    tenant=st.just("acme"),
    requests=st.builds(RequestQuota, per_minute=st.one_of(st.none(), st.integers(1, 12))),
    tokens=st.builds(
        TokenQuota,
        per_second=limits,
        per_minute=limits,
        per_day=st.one_of(st.none(), st.integers(100, 5000)),
        streams=st.one_of(st.none(), st.integers(1, 5)),
    ),
)
ticks = st.one_of(st.integers(0, 2048), st.integers(0, 70 * 1024), st.integers(0, 90_000 * 1024))


class Windows:
    """The model of a hard window, kept by full history instead of by two numbers."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.history: list[tuple[float, list[int]]] = []

    def charge(self, now: float, tokens: int) -> None:
        if not self.history or now >= self.history[-1][0] + self.length_s:
            self.history.append((now, []))
        self.history[-1][1].append(tokens)

    def used(self, now: float) -> int:
        if not self.history or now >= self.history[-1][0] + self.length_s:
            return 0
        return sum(self.history[-1][1])


class LimiterMachine(RuleBasedStateMachine):
    """One tenant over days, through restarts of its worker, with a quota that stays as it is."""

    @initialize(quota=quotas)
    def begin(self, quota: Quota) -> None:
        self.quota = quota
        self.limiter = TenantLimiter(quota)
        self.now = 1024.0
        self.wall = 1_700_000_000.0
        self.admitted: list[float] = []
        self.charges: list[tuple[float, int]] = []
        self.streams = 0
        self.minute = Windows(MINUTE_S)
        self.day = Windows(DAY_S)

    def admit(self) -> Refusal | None:
        refusal = self.limiter.admit(self.now)
        if refusal is None:
            self.admitted.append(self.now)
            self.streams += 1
            self.check_pace()
        return refusal

    def check_pace(self) -> None:
        """At an admission, what was charged is within rate x time + one second's worth, from any charge on."""
        rate = self.quota.tokens.per_second
        if rate is None:
            return
        charged = 0
        for time, tokens in reversed(self.charges):
            charged += tokens
            assert charged <= rate * (self.now - time) + rate + ROUNDING_CREDITS

    @rule(tick=ticks)
    def time_passes(self, tick: int) -> None:
        self.now += tick / 1024
        self.wall += tick / 1024

    @rule(count=st.integers(1, 8))
    def requests_arrive(self, count: int) -> None:
        for _ in range(count):
            refusal = self.admit()
            if refusal is not None:
                self.check_refusal(refusal)

    def check_refusal(self, refusal: Refusal) -> None:
        """Say no only where the model does."""
        tokens = self.quota.tokens
        if refusal.limit == "tokens.streams":
            assert self.streams == tokens.streams
        elif refusal.limit == "requests.per_minute":
            recent = [time for time in self.admitted if time > self.now - MINUTE_S]
            assert len(recent) == self.quota.requests.per_minute
        elif refusal.limit == "tokens.per_minute":
            assert tokens.per_minute is not None
            assert self.minute.used(self.now) >= tokens.per_minute
        elif refusal.limit == "tokens.per_day":
            assert tokens.per_day is not None
            assert self.day.used(self.now) >= tokens.per_day
        else:
            assert refusal.limit == "tokens.per_second"

    @precondition(lambda self: self.streams > 0)
    @rule()
    def stream_ends(self) -> None:
        self.limiter.stream_ended()
        self.streams -= 1

    @precondition(lambda self: self.streams > 0)
    @rule(tokens=st.integers(0, 2000), prompt=st.booleans(), trimmed=st.booleans())
    def step_completes(self, tokens: int, prompt: bool, trimmed: bool) -> None:
        remaining = self.limiter.remaining(self.now)
        if trimmed and remaining is not None:
            tokens = min(tokens, remaining)
        if prompt:
            open_still = self.limiter.charge(self.now, prompt_tokens=tokens)
        else:
            open_still = self.limiter.charge(self.now, tokens)
        if tokens:
            self.charges.append((self.now, tokens))
            self.minute.charge(self.now, tokens)
            self.day.charge(self.now, tokens)
        assert open_still == (self.limiter.remaining(self.now) != 0)

    @precondition(lambda self: self.streams == 0)
    @rule()
    def a_client_waits_as_told(self) -> None:
        refusal = self.admit()
        if refusal is None:
            return
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 0
        # Rounded up to a finer tick that doubles still hold exactly, a tenth of what the limiter adds for rounding.
        passed = math.ceil(refusal.retry_after_s * 2**20) / 2**20
        self.now += passed
        self.wall += passed
        assert self.admit() is None
        self.limiter.stream_ended()
        self.streams -= 1

    @precondition(lambda self: self.streams == 0)
    @rule(tick=ticks)
    def worker_restarts(self, tick: int) -> None:
        """Both limiters must decide alike from here on; the old one is asked once, the new one takes over."""
        snapshot = self.limiter.snapshot(self.now, self.wall)
        snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=LimiterSnapshot)
        self.time_passes(tick)
        successor = TenantLimiter(self.quota)
        successor.restore(snapshot, self.now, self.wall)
        assert successor.statistics() == self.limiter.statistics()
        assert successor.remaining(self.now) == self.limiter.remaining(self.now)
        assert successor.snapshot(self.now, 0.0) == self.limiter.snapshot(self.now, 0.0)
        old, new = self.limiter.admit(self.now), successor.admit(self.now)
        assert old == new
        if new is None:
            self.admitted.append(self.now)
            successor.stream_ended()
        self.limiter = successor

    @invariant()
    def no_minute_holds_more_requests_than_allowed(self) -> None:
        most = self.quota.requests.per_minute
        if most is not None:
            for first, beyond in zip(self.admitted, self.admitted[most:], strict=False):
                assert beyond - first >= MINUTE_S

    @invariant()
    def no_more_streams_than_allowed(self) -> None:
        most = self.quota.tokens.streams
        assert most is None or self.streams <= most
        assert self.limiter.statistics().streams == self.streams

    @invariant()
    def windows_agree_with_history(self) -> None:
        tokens = self.quota.tokens
        left = [
            max(0, limit - window.used(self.now))
            for limit, window in ((tokens.per_minute, self.minute), (tokens.per_day, self.day))
            if limit is not None
        ]
        assert self.limiter.remaining(self.now) == (min(left) if left else None)

    @invariant()
    def counters_agree_with_history(self) -> None:
        used = self.limiter.statistics()
        assert used.requests == len(self.admitted)
        assert used.prompt_tokens + used.output_tokens == sum(tokens for _, tokens in self.charges)


class LiveUpdateMachine(RuleBasedStateMachine):
    """A quota that changes while it is in use: nothing used is forgotten."""

    @initialize(quota=quotas)
    def begin(self, quota: Quota) -> None:
        self.quota = quota
        self.limiter = TenantLimiter(quota)
        self.now = 1024.0
        self.admitted: list[float] = []
        self.minute = Windows(MINUTE_S)

    @rule(tick=ticks)
    def time_passes(self, tick: int) -> None:
        self.now += tick / 1024

    @rule(quota=quotas)
    def quota_changes(self, quota: Quota) -> None:
        if quota.requests.per_minute is None:
            self.admitted.clear()
        self.quota = quota
        self.limiter.update(quota, self.now)

    @rule(tokens=st.integers(1, 500))
    def request_runs(self, tokens: int) -> None:
        if self.limiter.admit(self.now) is not None:
            return
        if self.quota.requests.per_minute is not None:
            self.admitted.append(self.now)
            recent = [time for time in self.admitted if time > self.now - MINUTE_S]
            assert len(recent) <= self.quota.requests.per_minute
        self.limiter.charge(self.now, tokens)
        self.minute.charge(self.now, tokens)
        self.limiter.stream_ended()

    @invariant()
    def the_minute_keeps_its_use(self) -> None:
        tokens = self.quota.tokens
        if tokens.per_minute is not None and tokens.per_day is None:
            assert self.limiter.remaining(self.now) == max(0, tokens.per_minute - self.minute.used(self.now))


TestLimiter = LimiterMachine.TestCase
TestLimiter.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLiveUpdate = LiveUpdateMachine.TestCase
TestLiveUpdate.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
