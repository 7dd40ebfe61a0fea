"""A tenant's limits on requests and LLM tokens, applied to what it does.

Theory of operation. Four limits, each with the bound that it keeps:

* `tokens.streams`: never more streams at once.
* `requests.per_minute`: the limiter remembers when the last N requests were admitted and admits another when the N-th
  last is 60 s old. So no 60 seconds, wherever they begin, hold more than N admitted requests.
* `tokens.per_second`: a bucket of one second's credits, filled at the rate. Charging may take it into debt, and nothing
  is admitted before the debt is paid. So at each admission, what was charged since the first one is less than
  rate x time + one second's worth.
* `tokens.per_minute`, `tokens.per_day`: windows. One opens with the first charge after the last one closed, and holds
  N tokens; when they are used up, streams end and nothing is admitted until it closes. So t seconds after the first
  charge, at most N x (1 + t / length) tokens have been used.

A charge is for tokens that exist already, so a window can be overdrawn by what one engine step brought, unless the
caller asks `remaining` first and drops the rest. `admit` and `charge` take constant time and read nothing of the
request, so that a refusal costs next to nothing.

`now` is in seconds on a clock that never goes back, such as CLOCK_MONOTONIC. `wall` is Unix time; it is used only
between a snapshot and its restoration, where it may have jumped: if it went back, no time counts as passed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from seedance.qos.quota import Quota, TokenQuota

MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
MAX_EXACT_REQUESTS: Final = 600
# When a stream will end is unknown; this is when a refused client may ask again.
STREAM_RETRY_S: Final = 1.0
# Added to every wait, so that rounding never makes `now + retry_after_s` fall just short. Far above the resolution of
# a double that counts seconds for a century, far below what anyone notices.
_ROUNDING_S: Final = 1e-5


class Refusal(msgspec.Struct, frozen=True):
    """Why a request cannot run: the limit as the tenant file names it, a protocol error code, a text for people.

    `retry_after_s` is how long the limit stands if nothing else happens; None when waiting does not help.
    """

    limit: str
    code: str
    message: str
    retry_after_s: float | None = None


class LimiterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the tenant's first request, and the streams running now."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    refused: int = 0
    streams: int = 0


class WindowSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A window: seconds since it opened, and tokens used in it."""

    age_s: float
    used: int


class RequestGroup(msgspec.Struct, frozen=True, array_like=True):
    """Requests admitted at nearly the same time: how long ago the last of them was, and how many they are."""

    age_s: float
    count: int


class LimiterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a limiter must remember across a restart of its worker; ages are relative to `wall`, in Unix seconds.

    Over MAX_EXACT_REQUESTS, requests are told in groups, each as old as its youngest: so the snapshot stays small, and
    the limit is still kept. The oldest are first. `credits` is None for a full bucket. Running streams are left out:
    they end with the worker.
    """

    wall: float
    request_ages_s: list[RequestGroup] = []
    credits: float | None = None
    minute: WindowSnapshot | None = None
    day: WindowSnapshot | None = None
    statistics: LimiterStatistics = LimiterStatistics()


class _RequestLog:
    """The admission times of the last requests: exact, and one float per request of the limit."""

    __slots__ = ("_limit", "_times")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._times: deque[float] = deque()

    def due(self, now: float) -> float:
        """Return when the next request may be admitted; not after `now` means at once."""
        if self._limit is None or len(self._times) < self._limit:
            return now
        return self._times[-self._limit] + MINUTE_S

    def record(self, now: float) -> None:
        if self._limit is None:
            return
        self._times.append(now)
        # After the limit was lowered more than N times are held, and still count should it be raised again.
        while len(self._times) > self._limit and self._times[0] + MINUTE_S <= now:
            self._times.popleft()

    def set_limit(self, limit: int | None) -> None:
        self._limit = limit
        if limit is None:
            self._times.clear()

    def snapshot(self, now: float) -> list[RequestGroup]:
        ages = [now - time for time in self._times if time + MINUTE_S > now]
        spread_s = 0.0 if len(ages) <= MAX_EXACT_REQUESTS else MINUTE_S / MAX_EXACT_REQUESTS
        groups: list[RequestGroup] = []
        for age in reversed(ages):
            if spread_s and groups and age - groups[-1].age_s < spread_s:
                groups[-1] = RequestGroup(groups[-1].age_s, groups[-1].count + 1)
            else:
                groups.append(RequestGroup(age, 1))
        return groups[::-1]

    def restore(self, groups: list[RequestGroup], taken_at: float, now: float) -> None:
        for group in groups:
            time = taken_at - group.age_s
            if time + MINUTE_S > now:
                self._times.extend([time] * group.count)


class _Bucket:
    """Credits that come at a rate, kept for one second at most, and possibly owed."""

    __slots__ = ("_at", "_credits", "rate")

    def __init__(self, rate_per_s: int | None) -> None:
        self.rate = rate_per_s
        self._credits = math.inf if rate_per_s is None else float(rate_per_s)
        self._at = -math.inf

    def _settle(self, now: float) -> None:
        if self.rate is not None and now > self._at:
            filled = self._credits + (now - self._at) * self.rate
            self._credits = min(float(self.rate), filled)
            self._at = now

    def due(self, now: float) -> float:
        """Return when one whole credit is there."""
        self._settle(now)
        if self.rate is None or self._credits >= 1:
            return now
        return now + (1 - self._credits) / self.rate

    def charge(self, now: float, tokens: int) -> None:
        self._settle(now)
        self._credits -= tokens

    def refund(self, now: float, tokens: int) -> None:
        self._settle(now)
        self._credits += tokens
        if self.rate is not None:
            self._credits = min(self._credits, float(self.rate))

    def set_rate(self, rate_per_s: int | None, now: float) -> None:
        self._settle(now)
        self.rate = rate_per_s
        self._credits = math.inf if rate_per_s is None else min(self._credits, float(rate_per_s))
        self._at = now

    def credits(self, now: float) -> float | None:
        self._settle(now)
        return None if self.rate is None or self._credits >= self.rate else self._credits

    def restore(self, credits: float | None, at: float) -> None:
        if credits is not None and self.rate is not None:
            self._credits = min(credits, float(self.rate))
            self._at = at


class _Window:
    """A budget of tokens for a length of time that starts with their first use."""

    __slots__ = ("_closes", "_length_s", "_opened", "_used", "limit")

    def __init__(self, length_s: float, limit: int | None) -> None:
        self._length_s = length_s
        self.limit = limit
        self._open(-math.inf, 0)

    def _open(self, at: float, used: int) -> None:
        self._opened, self._closes = at, at + self._length_s
        self._used = used

    def remaining(self, now: float) -> int | None:
        if self.limit is None:
            return None
        used = self._used if now < self._closes else 0
        return max(0, self.limit - used)

    def due(self, now: float) -> float:
        """Return when there is something to use."""
        return self._closes if self.remaining(now) == 0 else now

    def charge(self, now: float, tokens: int) -> None:
        # Counted without a limit too: a limit that is set later finds the window as it is.
        if now >= self._closes:
            self._open(now, 0)
        self._used += tokens

    def refund(self, now: float, charged_at: float, tokens: int) -> None:
        if self._opened <= charged_at and now < self._closes:
            self._used = max(0, self._used - tokens)

    def snapshot(self, now: float) -> WindowSnapshot | None:
        return WindowSnapshot(now - self._opened, self._used) if now < self._closes else None

    def restore(self, snapshot: WindowSnapshot | None, at: float) -> None:
        if snapshot is not None:
            self._open(at - snapshot.age_s, snapshot.used)


def _stands_for_s(refusal: Refusal) -> float:
    return math.inf if refusal.retry_after_s is None else refusal.retry_after_s


class TenantLimiter:
    """One tenant's limits and what it has used of them.

    Every stream of an admitted request runs until `stream_ended` is called for it, exactly once.
    """

    __slots__ = (
        "_bucket",
        "_day",
        "_minute",
        "_output_tokens",
        "_prompt_tokens",
        "_refused",
        "_request_log",
        "_requests",
        "_streams",
        "_tokens",
    )

    def __init__(self, quota: Quota) -> None:
        self._tokens = quota.tokens
        self._request_log = _RequestLog(quota.requests.per_minute)
        self._bucket = _Bucket(quota.tokens.per_second)
        self._minute = _Window(MINUTE_S, quota.tokens.per_minute)
        self._day = _Window(DAY_S, quota.tokens.per_day)
        self._streams = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._requests = 0
        self._refused = 0

    def admit(self, now: float, streams: int = 1) -> Refusal | None:
        """Count a request and its streams, or say why not; a refused one uses nothing up.

        Of several limits that stand, the one that stands longest is told. A request of more streams than the tenant
        may ever run is `invalid_request`.
        """
        refusal = max(self._refusals(now, streams), key=_stands_for_s, default=None)
        if refusal is not None:
            self._refused += 1
            return refusal
        self._request_log.record(now)
        self._requests += 1
        self._streams += streams
        return None

    def refused_elsewhere(self) -> None:
        """Count a request that a limit which is not kept here has refused."""
        self._refused += 1

    def retry_after_s(self, now: float) -> float:
        """Return how long a request of one stream would be refused if nothing else happened; 0.0 for not at all."""
        return max((refusal.retry_after_s or 0.0 for refusal in self._refusals(now, 1)), default=0.0)

    def _refusals(self, now: float, streams: int) -> Iterator[Refusal]:
        most = self._tokens.streams
        if most is not None and streams > most:
            text = f"cannot run {streams} streams for one request: limit 'tokens.streams' is {most}; ask for fewer"
            yield Refusal("tokens.streams", "invalid_request", text)
        elif most is not None and self._streams + streams > most:
            text = f"cannot run more than {most} streams at once; wait for one to end"
            yield Refusal("tokens.streams", "rate_limited", text, STREAM_RETRY_S)
        for limit, code, due in (
            ("requests.per_minute", "rate_limited", self._request_log.due(now)),
            ("tokens.per_second", "rate_limited", self._bucket.due(now)),
            ("tokens.per_minute", "quota_exceeded", self._minute.due(now)),
            ("tokens.per_day", "quota_exceeded", self._day.due(now)),
        ):
            if due > now:
                wait_s = due - now + _ROUNDING_S
                text = f"cannot take this request: limit '{limit}' is used up; try again in {math.ceil(wait_s)} s"
                yield Refusal(limit, code, text, wait_s)

    def stream_ended(self) -> None:
        """Free the place of one admitted stream."""
        assert self._streams > 0, "a stream ended that was never admitted"
        self._streams -= 1

    def stream_resumed(self) -> None:
        """Take a place for a stream that was admitted in another process; `stream_ended` frees it."""
        self._streams += 1

    def charge(self, now: float, output_tokens: int = 0, *, prompt_tokens: int = 0) -> bool:
        """Use up LLM tokens; False once a window is empty: the tenant's streams then end with `quota_exceeded`."""
        tokens = output_tokens + prompt_tokens
        if tokens:
            self._output_tokens += output_tokens
            self._prompt_tokens += prompt_tokens
            if self._bucket.rate is not None:  # a call less for nearly all
                self._bucket.charge(now, tokens)
            self._minute.charge(now, tokens)
            self._day.charge(now, tokens)
        return self.remaining(now) != 0

    def refund(self, now: float, charged_at: float, prompt_tokens: int) -> None:
        """Give back the charge of a prompt that was refused elsewhere; one of a window that is over is gone."""
        self._prompt_tokens -= prompt_tokens
        self._bucket.refund(now, prompt_tokens)
        self._minute.refund(now, charged_at, prompt_tokens)
        self._day.refund(now, charged_at, prompt_tokens)

    def remaining(self, now: float) -> int | None:
        """Return how many tokens may still be used before `charge` says False; None for any number."""
        if self._minute.limit is None and self._day.limit is None:  # asked twice a step, and a call is dear there
            return None
        minute, day = self._minute.remaining(now), self._day.remaining(now)
        return day if minute is None else minute if day is None else min(minute, day)

    def update(self, quota: Quota, now: float) -> None:
        """Take over new limits; what was used under the old ones stays used."""
        self._tokens = quota.tokens
        self._request_log.set_limit(quota.requests.per_minute)
        self._bucket.set_rate(quota.tokens.per_second, now)
        self._minute.limit = quota.tokens.per_minute
        self._day.limit = quota.tokens.per_day

    def snapshot(self, now: float, wall: float) -> LimiterSnapshot:
        """Return what a limiter in another process needs to go on from here."""
        return LimiterSnapshot(
            wall=wall,
            request_ages_s=self._request_log.snapshot(now),
            credits=self._bucket.credits(now),
            minute=self._minute.snapshot(now),
            day=self._day.snapshot(now),
            statistics=msgspec.structs.replace(self.statistics(), streams=0),
        )

    def restore(self, snapshot: LimiterSnapshot, now: float, wall: float) -> None:
        """Go on from a snapshot; only for a limiter that has done nothing yet."""
        passed_s = max(0.0, wall - snapshot.wall)
        taken_at = now - passed_s
        self._request_log.restore(snapshot.request_ages_s, taken_at, now)
        self._bucket.restore(snapshot.credits, taken_at)
        self._minute.restore(snapshot.minute, taken_at)
        self._day.restore(snapshot.day, taken_at)
        self._prompt_tokens = snapshot.statistics.prompt_tokens
        self._output_tokens = snapshot.statistics.output_tokens
        self._requests = snapshot.statistics.requests
        self._refused = snapshot.statistics.refused

    def statistics(self) -> LimiterStatistics:
        """Return the counters."""
        return LimiterStatistics(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            requests=self._requests,
            refused=self._refused,
            streams=self._streams,
        )


def check_context(tokens: TokenQuota, model_max: int, prompt_tokens: int, max_tokens: int | None) -> int | Refusal:
    """Return how many tokens a request may put out, or why it does not fit; `model_max` is the model's own context.

    Without `max_tokens` it is all the room that the prompt leaves. Asking for more than there is room is refused, not
    cut down, as OpenAI and vLLM do.
    """
    by_quota = tokens.context is not None and tokens.context < model_max
    context = tokens.context if tokens.context is not None and by_quota else model_max
    limit, whose = ("tokens.context", "your quota") if by_quota else ("model", "the model")
    room = context - prompt_tokens
    if room < 1:
        text = (
            f"cannot take a prompt of {prompt_tokens} tokens: {whose} allows {context} with at least 1 for the answer"
        )
        return Refusal(limit, "context_too_long", text)
    if max_tokens is None:
        return room
    if max_tokens > room:
        text = (
            f"cannot put out {max_tokens} tokens after a prompt of {prompt_tokens}: {whose} allows {context} together;"
            f" ask for {room} at most"
        )
        return Refusal(limit, "context_too_long", text)
    return max_tokens
