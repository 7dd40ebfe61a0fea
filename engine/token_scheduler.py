"""The scheduling policy of an engine, wired to the ledger: limits and pauses come from there, statistics go there.

What runs it is the engine's side, in the process that makes the steps; see `policy` for the order of calls. The news of
the ledger are taken at each of them, which costs two comparisons when there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from seedance.engine.ledger import EngineRecord, Ledger, LimitsReader
from seedance.engine.policy import Policy
from seedance.engine.request import NOT_URGENT, Urgency
from seedance.engine.scheduling import PolicySettings, Step, TenantStatistics
from seedance.engine.states import Key

_BEAT_EVERY_S: Final = 0.1
_TELL_EVERY_S: Final = 0.5
_TELL_ONE_S: Final = 300e-6
"""A hundred times what it takes to tell of one tenant, so that it never is more than a percent."""
_REST_S: Final = 1.0
_NONE: Final[Mapping[Key, int]] = MappingProxyType({})


class TokenScheduler:
    """The policy of one engine's life; `now_s` is CLOCK_MONOTONIC. The ledger stays its owner's.

    Every request has the row of its tenant, and the number of its stream, at which its pause flag stands.
    """

    def __init__(self, settings: PolicySettings, ledger: Ledger, now_s: float) -> None:
        self.policy = Policy(settings, now_s)
        self._ledger = ledger
        self._limits = LimitsReader(ledger)
        self._streams: dict[Key, int] = {}
        self._pause_changes = self._pauses_looked_at = 0
        self._leaving: set[int] = set()
        self._told: dict[int, TenantStatistics] = {}
        self._tell_at_s = self._beat_at_s = now_s
        self._steps = 0
        self._step_s = 0.0
        self._ended_s = now_s
        self._begun: list[float] = []
        ledger.set_engine(EngineRecord())
        if ledger.is_active:
            ledger.clear_statistics()
        self._take_news(now_s)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submitted(
        self,
        key: Key,
        row: int,
        stream: int,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        urgency: Urgency = NOT_URGENT,
    ) -> None:
        """Take a new request; see `Policy.submitted`. Raises EngineError."""
        self._take_news(now_s)
        self._leaving.discard(row)
        self.policy.submitted(
            key,
            row,
            prompt_tokens,
            max_tokens,
            now_s,
            deadline_s=urgency.deadline_s,
            rtt_s=urgency.rtt_s,
            rtt_variance_s=urgency.rtt_variance_s,
        )
        self._streams[key] = stream
        if self._ledger.is_paused(stream):
            self.policy.paused(key, now_s)

    def finished(self, key: Key, now_s: float) -> None:
        """Forget a request that has ended; an unknown one is ignored."""
        self._streams.pop(key, None)
        self.policy.finished(key, now_s)

    def preempted(self, key: Key) -> None:
        """Note that the engine has preempted a request of its own accord."""
        self.policy.preempted(key)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_begins(self, now_s: float, kv_free_blocks: int, slots_free: int) -> Step:
        """Decide the coming step; see `Policy.step_begins`."""
        self._take_news(now_s)
        self._begun.append(now_s)
        step = self.policy.step_begins(now_s, kv_free_blocks, slots_free)
        for key in step.end:
            self._streams.pop(key, None)
        return step

    def step_scheduled(self, scheduled: Mapping[Key, int], now_s: float, cached: Mapping[Key, int] = _NONE) -> None:
        """Take what the engine put into the step; see `Policy.step_scheduled`."""
        self.policy.step_scheduled(scheduled, now_s, cached)
        if not scheduled:
            self._begun[-1] = -1.0  # an empty step is none for those who count

    def step_ended(self, now_s: float, step_s: float | None = None) -> None:
        """Charge the oldest step that has not ended; see `Policy.step_ended`."""
        self.policy.step_ended(now_s, step_s)
        begun_s = self._begun.pop(0)
        if begun_s >= 0:
            took_s = now_s - max(begun_s, self._ended_s) if step_s is None else step_s
            self._steps += 1
            self._step_s += took_s
            if self._ledger.is_active:
                self._ledger.count_step(took_s)
        self._ended_s = now_s
        if now_s >= self._tell_at_s:
            self.tell(now_s)
        elif now_s >= self._beat_at_s:
            self._beat(now_s)

    @property
    def is_steady(self) -> bool:
        """Whether there is a step to be made, as far as is known; see `policy`."""
        return self.policy.is_steady

    def wake_at(self, now_s: float) -> float | None:
        """Return when a step can do something; see `Policy.wake_at`."""
        self._take_news(now_s)
        return self.policy.wake_at(now_s)

    def rest(self, now_s: float) -> float:
        """Return how long the engine may sleep at most: until something is to be told, or the next sign of life."""
        if now_s >= self._tell_at_s:
            self.tell(now_s)
            return _REST_S
        return self._tell_at_s - now_s

    def tell(self, now_s: float) -> None:
        """Write to the ledger what has changed since the last time."""
        for row in [row for row in self._leaving if self.policy.remove_tenant(row)]:
            self._leaving.discard(row)
            self._told.pop(row, None)
        statistics = self.policy.statistics(now_s)
        if not self._ledger.is_active:
            self._told.clear()
        for row, entry in statistics.items() if self._ledger.is_active else ():
            if self._told.get(row) != entry:
                self._told[row] = entry
                self._ledger.set_statistics(row, entry)
        self._beat(now_s)
        self._tell_at_s = now_s + max(_TELL_EVERY_S, _TELL_ONE_S * len(statistics))

    def _beat(self, now_s: float) -> None:
        self._ledger.set_engine(EngineRecord(beat_s=now_s, steps=self._steps, step_s=self._step_s))
        self._beat_at_s = now_s + _BEAT_EVERY_S

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def _take_news(self, now_s: float) -> None:
        for row, limits in self._limits.news() if self._limits.has_news else ():
            if limits is None:
                self._leaving.add(row)
            else:
                self._leaving.discard(row)
                self.policy.set_tenant(row, limits, now_s)
        changes = self._ledger.pause_changes
        if changes != self._pause_changes:
            self._take_pauses(now_s)
            # Looked at twice: a processor may show the counter before what it counts.
            if self._pauses_looked_at == changes:
                self._pause_changes = changes
            self._pauses_looked_at = changes

    def _take_pauses(self, now_s: float) -> None:
        is_paused = self._ledger.is_paused
        for key, stream in self._streams.items():
            if is_paused(stream):
                self.policy.paused(key, now_s)
            else:
                self.policy.resumed(key)
