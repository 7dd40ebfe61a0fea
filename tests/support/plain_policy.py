"""First come, first served, as an engine does without us: what a scheduling policy is compared with.

Whoever runs decodes; what is left of the step's tokens goes to prompts in order of arrival; nobody is held. It expects
as many KV blocks as it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from seedance.engine.scheduling import NOTHING_COUNTED, PolicySettings, Step, TenantLimits, TenantStatistics
from seedance.engine.states import Key


class PlainPolicy:
    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._waiting: deque[tuple[Key, int]] = deque()
        self._reading: dict[Key, int] = {}
        self._decoding: set[Key] = set()
        self._rows: set[int] = set()

    def set_tenant(self, row: int, limits: TenantLimits, now_s: float) -> None:
        self._rows.add(row)

    def set_tokens_left(self, row: int, tokens: int | None, now_s: float) -> None:
        assert tokens is None

    def submitted(
        self, key: Key, row: int, prompt_tokens: int, max_tokens: int, now_s: float, **_preferences: Any
    ) -> None:
        self._waiting.append((key, prompt_tokens))

    def finished(self, key: Key, now_s: float) -> None:
        self._decoding.discard(key)

    def paused(self, key: Key, now_s: float) -> None:
        raise NotImplementedError

    def resumed(self, key: Key) -> None:
        raise NotImplementedError

    def step_begins(self, now_s: float, kv_free_blocks: int, slots_free: int) -> Step:
        step = Step([], [], [], [], [], {})
        budget = self._settings.step_tokens - len(self._decoding)
        for key, unread in self._reading.items():
            if budget > 0:
                step.prefill[key] = min(unread, budget)
                budget -= step.prefill[key]
        while self._waiting and budget > 0 and len(step.admit) < slots_free:
            key, unread = self._waiting.popleft()
            self._reading[key] = unread
            step.admit.append(key)
            step.prefill[key] = min(unread, budget)
            budget -= step.prefill[key]
        return step

    def step_scheduled(self, scheduled: Mapping[Key, int], now_s: float) -> None:
        for key in [key for key in self._reading if key in scheduled]:
            self._reading[key] -= scheduled[key]
            if self._reading[key] == 0:
                del self._reading[key]
                self._decoding.add(key)

    def step_ended(self, now_s: float) -> None:
        pass

    def wake_at(self, now_s: float) -> float | None:
        return now_s if self._decoding or self._reading or self._waiting else None

    def statistics(self, now_s: float) -> dict[int, TenantStatistics]:
        return dict.fromkeys(self._rows, NOTHING_COUNTED)
