"""A tenant's limits on requests and LLM tokens."""

from __future__ import annotations

import msgspec
import pytest

from seedance.qos.limiter import (
    DAY_S,
    MAX_EXACT_REQUESTS,
    LimiterSnapshot,
    LimiterStatistics,
    Refusal,
    TenantLimiter,
    check_context,
)
from seedance.qos.quota import Quota, RequestQuota, TokenQuota

NOW = 1000.0
WALL = 1.7e9


def make_quota(
    *,
    requests_per_minute: int | None = None,
    per_second: int | None = None,
    per_minute: int | None = None,
    per_day: int | None = None,
    streams: int | None = None,
) -> Quota:
    tokens = TokenQuota(per_second=per_second, per_minute=per_minute, per_day=per_day, streams=streams)
    return Quota(tenant="acme", requests=RequestQuota(per_minute=requests_per_minute), tokens=tokens)


def refused(limiter: TenantLimiter, now: float) -> Refusal:
    refusal = limiter.admit(now)
    assert refusal is not None
    return refusal


def test_without_limits_everything_is_admitted() -> None:
    limiter = TenantLimiter(make_quota())
    assert all(limiter.admit(NOW) is None for _ in range(1000))
    assert limiter.charge(NOW, 10**9)
    assert limiter.remaining(NOW) is None
    assert limiter.admit(NOW) is None


def test_when_to_come_back_is_that_of_the_limit_that_stands_longest_and_asking_uses_nothing() -> None:
    limiter = TenantLimiter(make_quota(requests_per_minute=1, per_minute=10))
    assert limiter.retry_after_s(NOW) == 0.0
    assert limiter.admit(NOW) is None
    assert limiter.retry_after_s(NOW + 5) == pytest.approx(55, abs=0.001)
    assert not limiter.charge(NOW + 20, 10)
    wait_s = limiter.retry_after_s(NOW + 30)
    assert wait_s == pytest.approx(50, abs=0.001)
    assert limiter.statistics().refused == 0
    assert limiter.admit(NOW + 30 + wait_s) is None


class TestStreams:
    def test_place_is_free_again_when_a_stream_ends(self) -> None:
        limiter = TenantLimiter(make_quota(streams=2))
        assert limiter.admit(NOW) is None
        assert limiter.admit(NOW) is None
        refusal = refused(limiter, NOW)
        assert (refusal.limit, refusal.code, refusal.retry_after_s) == ("tokens.streams", "rate_limited", 1.0)
        assert "cannot run more than 2 streams at once" in refusal.message
        limiter.stream_ended()
        assert limiter.admit(NOW) is None

    def test_a_request_may_be_several_streams(self) -> None:
        limiter = TenantLimiter(make_quota(streams=3, requests_per_minute=2))
        assert limiter.admit(NOW, 2) is None
        assert limiter.admit(NOW, 2) is not None
        assert limiter.admit(NOW, 1) is None
        assert limiter.statistics() == LimiterStatistics(requests=2, refused=1, streams=3)

    def test_more_streams_than_ever_allowed_are_not_worth_waiting_for(self) -> None:
        limiter = TenantLimiter(make_quota(streams=3, requests_per_minute=1))
        assert limiter.admit(NOW) is None
        refusal = limiter.admit(NOW, 4)
        assert refusal is not None
        assert (refusal.limit, refusal.code, refusal.retry_after_s) == ("tokens.streams", "invalid_request", None)
        assert "limit 'tokens.streams' is 3; ask for fewer" in refusal.message

    def test_ending_a_stream_that_never_was_is_a_bug(self) -> None:
        limiter = TenantLimiter(make_quota())
        with pytest.raises(AssertionError):
            limiter.stream_ended()


class TestRequestsPerMinute:
    def test_the_window_slides(self) -> None:
        limiter = TenantLimiter(make_quota(requests_per_minute=2))
        assert limiter.admit(NOW) is None
        assert limiter.admit(NOW + 50) is None
        refusal = refused(limiter, NOW + 50)
        assert (refusal.limit, refusal.code) == ("requests.per_minute", "rate_limited")
        assert refusal.retry_after_s == pytest.approx(10, abs=1e-3)
        assert "try again in 11 s" in refusal.message
        assert limiter.admit(NOW + 59.999) is not None
        assert limiter.admit(NOW + 60) is None
        assert limiter.admit(NOW + 60) is not None
        assert limiter.admit(NOW + 110) is None

    def test_what_others_refuse_is_counted(self) -> None:
        limiter = TenantLimiter(make_quota())
        limiter.refused_elsewhere()
        assert limiter.statistics() == LimiterStatistics(refused=1)

    def test_refused_requests_do_not_count(self) -> None:
        limiter = TenantLimiter(make_quota(requests_per_minute=1))
        assert limiter.admit(NOW) is None
        for second in range(60):
            assert limiter.admit(NOW + second) is not None
        assert limiter.admit(NOW + 60) is None

    def test_a_limit_that_is_lowered_and_raised_forgets_nothing(self) -> None:
        limiter = TenantLimiter(make_quota(requests_per_minute=20))
        assert all(limiter.admit(NOW) is None for _ in range(20))
        limiter.update(make_quota(requests_per_minute=10), NOW + 1)
        assert limiter.admit(NOW + 1) is not None
        limiter.update(make_quota(requests_per_minute=21), NOW + 2)
        assert limiter.admit(NOW + 2) is None
        assert limiter.admit(NOW + 2) is not None

    def test_lowered_limit_counts_what_is_in_the_minute(self) -> None:
        limiter = TenantLimiter(make_quota(requests_per_minute=3))
        for second in (0, 10, 20):
            assert limiter.admit(NOW + second) is None
        limiter.update(make_quota(requests_per_minute=1), NOW + 20)
        assert limiter.admit(NOW + 79) is not None
        assert limiter.admit(NOW + 80) is None
        assert limiter.admit(NOW + 81) is not None

    def test_lifted_limit(self) -> None:
        limiter = TenantLimiter(make_quota(requests_per_minute=1))
        assert limiter.admit(NOW) is None
        limiter.update(make_quota(), NOW)
        assert all(limiter.admit(NOW) is None for _ in range(5))
        limiter.update(make_quota(requests_per_minute=1), NOW)
        assert limiter.admit(NOW) is None
        assert limiter.admit(NOW) is not None


class TestTokensPerSecond:
    def test_debt_is_paid_before_the_next_admission(self) -> None:
        limiter = TenantLimiter(make_quota(per_second=100))
        assert limiter.admit(NOW) is None
        assert limiter.charge(NOW, 350)
        refusal = refused(limiter, NOW)
        assert (refusal.limit, refusal.code) == ("tokens.per_second", "rate_limited")
        assert refusal.retry_after_s == pytest.approx(2.51, abs=1e-3)
        assert limiter.admit(NOW + 2.4) is not None
        assert limiter.admit(NOW + 2.52) is None

    def test_no_more_than_a_second_is_saved_up(self) -> None:
        limiter = TenantLimiter(make_quota(per_second=100))
        assert limiter.charge(NOW, 1)
        assert limiter.charge(NOW + 1000, 100)
        assert limiter.admit(NOW + 1000) is not None
        assert limiter.admit(NOW + 1000.011) is None

    def test_never_ends_a_stream(self) -> None:
        limiter = TenantLimiter(make_quota(per_second=1))
        assert limiter.charge(NOW, 10_000)
        assert limiter.remaining(NOW) is None

    def test_a_new_rate_applies_from_now_on(self) -> None:
        limiter = TenantLimiter(make_quota(per_second=10))
        limiter.charge(NOW, 110)
        limiter.update(make_quota(per_second=100), NOW + 5)
        assert refused(limiter, NOW + 5).retry_after_s == pytest.approx(0.51, abs=1e-3)
        limiter.update(make_quota(), NOW + 5)
        assert limiter.admit(NOW + 5) is None


@pytest.mark.parametrize(("limit", "length_s"), [("per_minute", 60.0), ("per_day", DAY_S)])
class TestTokenWindows:
    def make(self, limit: str, tokens: int) -> TenantLimiter:
        return TenantLimiter(Quota(tenant="a", tokens=TokenQuota(**{limit: tokens})))

    def test_streams_end_when_it_is_used_up(self, limit: str, length_s: float) -> None:
        limiter = self.make(limit, 100)
        assert limiter.admit(NOW) is None
        assert limiter.remaining(NOW) == 100
        assert limiter.charge(NOW, prompt_tokens=60)
        assert limiter.charge(NOW + 1, 39)
        assert limiter.remaining(NOW + 1) == 1
        assert not limiter.charge(NOW + 1, 1)
        assert limiter.remaining(NOW + 1) == 0
        refusal = refused(limiter, NOW + 2)
        assert (refusal.limit, refusal.code) == (f"tokens.{limit}", "quota_exceeded")
        assert refusal.retry_after_s == pytest.approx(length_s - 2, abs=1e-3)

    def test_opens_anew_with_the_first_use_after_its_end(self, limit: str, length_s: float) -> None:
        limiter = self.make(limit, 100)
        assert limiter.charge(NOW, 99)
        assert not limiter.charge(NOW + length_s - 1, 1)
        assert limiter.admit(NOW + length_s) is None
        assert limiter.remaining(NOW + length_s) == 100
        assert limiter.charge(NOW + length_s, 1)
        assert limiter.remaining(NOW + length_s) == 99
        later = NOW + 2 * length_s + 7
        assert not limiter.charge(later, 100)
        assert refused(limiter, later).retry_after_s == pytest.approx(length_s, abs=1e-3)

    def test_overdraft_does_not_reach_into_the_next(self, limit: str, length_s: float) -> None:
        limiter = self.make(limit, 100)
        assert not limiter.charge(NOW, 1000)
        assert limiter.remaining(NOW) == 0
        assert limiter.remaining(NOW + length_s) == 100

    def test_nothing_used_opens_nothing(self, limit: str, length_s: float) -> None:
        limiter = self.make(limit, 10)
        assert limiter.charge(NOW, 0)
        assert not limiter.charge(NOW + length_s - 1, 10)
        assert limiter.admit(NOW + length_s + 1) is not None

    def test_a_limit_set_live_finds_what_was_used(self, limit: str, length_s: float) -> None:
        limiter = TenantLimiter(Quota(tenant="a"))
        assert limiter.charge(NOW, 80)
        limiter.update(Quota(tenant="a", tokens=TokenQuota(**{limit: 100})), NOW + 1)
        assert limiter.remaining(NOW + 1) == 20
        limiter.update(Quota(tenant="a", tokens=TokenQuota(**{limit: 50})), NOW + 1)
        assert limiter.remaining(NOW + 1) == 0
        assert limiter.charge(NOW + 1, 0) is False
        assert limiter.admit(NOW + length_s) is None


def test_the_smaller_window_decides() -> None:
    limiter = TenantLimiter(make_quota(per_minute=100, per_day=150))
    assert not limiter.charge(NOW, 100)
    assert limiter.remaining(NOW + 60) == 50
    assert not limiter.charge(NOW + 60, 50)


def test_the_limit_that_stands_longest_is_told() -> None:
    limiter = TenantLimiter(make_quota(requests_per_minute=1, per_second=1, per_day=5, streams=1))
    assert limiter.admit(NOW) is None
    assert refused(limiter, NOW).limit == "requests.per_minute"
    limiter.charge(NOW, 5)
    assert refused(limiter, NOW).limit == "tokens.per_day"


def test_a_refund_undoes_a_charge_while_its_windows_are_open() -> None:
    limiter = TenantLimiter(make_quota(per_second=100, per_minute=150, per_day=1000))
    limiter.charge(NOW, prompt_tokens=120)
    assert limiter.admit(NOW) is not None
    limiter.refund(NOW, NOW, 120)
    assert limiter.admit(NOW) is None
    assert limiter.remaining(NOW) == 150
    assert limiter.statistics().prompt_tokens == 0
    limiter.charge(NOW, prompt_tokens=120)
    limiter.charge(NOW + 60, prompt_tokens=50)
    limiter.refund(NOW + 61, NOW, 120)
    assert limiter.remaining(NOW + 61) == 100  # the minute of the charge is over
    limiter.refund(NOW + 62, NOW + 60, 1000)
    assert limiter.remaining(NOW + 62) == 150
    assert not limiter.charge(NOW + 62, 150)


def test_statistics() -> None:
    limiter = TenantLimiter(make_quota(streams=1))
    limiter.admit(NOW)
    limiter.admit(NOW)
    limiter.charge(NOW, prompt_tokens=7)
    limiter.charge(NOW, 3)
    limiter.charge(NOW, 2, prompt_tokens=1)
    expected = LimiterStatistics(prompt_tokens=8, output_tokens=5, requests=1, refused=1, streams=1)
    assert limiter.statistics() == expected
    limiter.stream_ended()
    assert limiter.statistics().streams == 0


class TestRestart:
    QUOTA = make_quota(requests_per_minute=2, per_second=10, per_minute=100, per_day=1000, streams=1)

    def restart(self, limiter: TenantLimiter, now: float, after_s: float, quota: Quota = QUOTA) -> TenantLimiter:
        """Restore in a process whose monotonic clock began elsewhere, `after_s` of wall time later."""
        wire = msgspec.msgpack.encode(limiter.snapshot(now, WALL))
        successor = TenantLimiter(quota)
        successor.restore(msgspec.msgpack.decode(wire, type=LimiterSnapshot), 5.0, WALL + after_s)
        return successor

    def test_a_restart_resets_nothing_but_streams(self) -> None:
        limiter = TenantLimiter(self.QUOTA)
        limiter.admit(NOW)
        limiter.charge(NOW, 90, prompt_tokens=5)
        limiter.stream_ended()
        assert limiter.admit(NOW + 0.0) is not None
        successor = self.restart(limiter, NOW + 10, 20.0)
        assert successor.remaining(5.0) == 5
        assert successor.statistics() == LimiterStatistics(prompt_tokens=5, output_tokens=90, requests=1, refused=1)
        assert successor.admit(5.0) is None
        successor.stream_ended()
        assert refused(successor, 5.0).retry_after_s == pytest.approx(30, abs=1e-3)
        assert successor.remaining(5.0 + 30) == 100
        assert not successor.charge(5.0 + 30, 905)
        assert refused(successor, 36.0).limit == "tokens.per_day"

    def test_debt_is_kept_and_paid_meanwhile(self) -> None:
        quota = make_quota(per_second=10)
        limiter = TenantLimiter(quota)
        limiter.charge(NOW, 110)
        assert refused(self.restart(limiter, NOW, 4.0, quota), 5.0).retry_after_s == pytest.approx(6.1, abs=1e-3)
        assert self.restart(limiter, NOW, 10.2, quota).admit(5.0) is None

    def test_a_wall_clock_that_went_back_counts_as_no_time(self) -> None:
        limiter = TenantLimiter(self.QUOTA)
        limiter.admit(NOW)
        limiter.charge(NOW, 100)
        successor = self.restart(limiter, NOW + 10, -1e6)
        assert refused(successor, 5.0).retry_after_s == pytest.approx(50, abs=1e-3)

    def test_windows_that_are_over_are_gone(self) -> None:
        limiter = TenantLimiter(self.QUOTA)
        limiter.charge(NOW, 1000)
        assert self.restart(limiter, NOW + 10, 60.0).remaining(5.0) == 0
        assert self.restart(limiter, NOW + 10, 2 * DAY_S).remaining(5.0) == 100

    def test_many_requests_are_grouped_to_the_safe_side(self) -> None:
        quota = make_quota(requests_per_minute=5000)
        limiter = TenantLimiter(quota)
        for number in range(5000):
            assert limiter.admit(NOW + number / 100) is None
        snapshot = limiter.snapshot(NOW + 50, WALL)
        assert len(snapshot.request_ages_s) <= MAX_EXACT_REQUESTS + 1
        assert sum(group.count for group in snapshot.request_ages_s) == 5000
        successor = TenantLimiter(quota)
        successor.restore(snapshot, 5.0, WALL)
        wait_s = refused(successor, 5.0).retry_after_s
        exact_s = refused(limiter, NOW + 50).retry_after_s
        assert wait_s is not None
        assert exact_s is not None
        assert exact_s <= wait_s <= exact_s + 0.11


@pytest.mark.parametrize(
    ("context", "prompt", "wanted", "expected"),
    [
        (None, 10, None, 90),
        (None, 10, 5, 5),
        (None, 10, 90, 90),
        (50, 10, None, 40),
        (50, 10, 40, 40),
        (50, 49, None, 1),
        (200, 10, None, 90),
    ],
)
def test_context_that_fits(context: int | None, prompt: int, wanted: int | None, expected: int) -> None:
    assert check_context(TokenQuota(context=context), 100, prompt, wanted) == expected


@pytest.mark.parametrize(
    ("context", "prompt", "wanted", "limit", "words"),
    [
        (None, 100, None, "model", "the model allows 100 with at least 1"),
        (None, 10, 91, "model", "ask for 90 at most"),
        (50, 50, None, "tokens.context", "your quota allows 50"),
        (50, 10, 41, "tokens.context", "ask for 40 at most"),
        (100, 100, 1, "model", "prompt of 100 tokens"),
    ],
)
def test_context_that_does_not_fit(
    context: int | None, prompt: int, wanted: int | None, limit: str, words: str
) -> None:
    refusal = check_context(TokenQuota(context=context), 100, prompt, wanted)
    assert isinstance(refusal, Refusal)
    assert (refusal.limit, refusal.code, refusal.retry_after_s) == (limit, "context_too_long", None)
    assert words in refusal.message
    assert refusal.message.startswith("cannot ")
