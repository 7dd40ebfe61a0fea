"""What is kept for clients that left, against a model that looks at everything at every step."""

from __future__ import annotations

import functools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from seedance.daemon.history import RECORD_COST_BYTES, History
from seedance.daemon.session_log import Absent, Kept, SessionLog

TENANTS = ("a", "b")
CLIENTS = ("one", "two")
RESUME_FOR_S = 10.0
BOUND_BYTES = 2000


class Sessions(RuleBasedStateMachine):
    """Two tenants with the same random names: what differs between them is the key alone."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.logs: dict[str, SessionLog[History]] = {}
        self.count = dict.fromkeys(TENANTS, 0)
        self.lost: dict[str, int] = {}  # token → the oldest sequence when it went
        self.records: dict[str, list[bytes]] = {}
        for tenant in TENANTS:
            random_bytes = functools.partial(self.random, tenant)
            self.logs[tenant] = SessionLog(tenant.encode() * 32, RESUME_FOR_S, BOUND_BYTES, random_bytes)

    def random(self, tenant: str, size: int) -> bytes:
        self.count[tenant] += 1
        return self.count[tenant].to_bytes(size, "big")

    @rule(target=sessions, tenant=st.sampled_from(TENANTS), client=st.sampled_from(CLIENTS))
    def begin(self, tenant: str, client: str) -> tuple[str, str, Kept[History]]:
        kept = self.logs[tenant].add(client, lambda name, token: History(BOUND_BYTES // 4))
        self.records[kept.token] = []
        return tenant, client, kept

    @rule(session=sessions, record=st.binary(max_size=120))
    def record(self, session: tuple[str, str, Kept[History]], record: bytes) -> None:
        kept = session[2]
        if kept.token not in self.lost:
            kept.item.append(record)
            self.records[kept.token].append(record)

    @rule(session=sessions)
    def leave(self, session: tuple[str, str, Kept[History]]) -> None:
        self.logs[session[0]].left(session[2], self.now)

    @rule(session=sessions, seq=st.integers(0, 20))
    def come_back(self, session: tuple[str, str, Kept[History]], seq: int) -> None:
        tenant, client, kept = session
        found = self.logs[tenant].find(kept.token, client, self.now)
        if kept.left_at_s is not None and self.now >= kept.left_at_s + RESUME_FOR_S:
            self.lost.setdefault(kept.token, kept.item.oldest_seq)
        if kept.token in self.lost:
            assert found == Absent("gone", self.lost[kept.token])
            return
        assert found is kept
        self.logs[tenant].returned(kept)
        records, rest = self.records[kept.token], kept.item.after(seq)
        if rest is None:
            assert seq < kept.item.oldest_seq - 1 or seq > len(records)
        else:
            assert rest == records[seq:]

    @rule(session=sessions)
    def pry(self, session: tuple[str, str, Kept[History]]) -> None:
        tenant, client, kept = session
        others = [(t, c) for t in TENANTS for c in CLIENTS if (t, c) != (tenant, client)]
        for other_tenant, other_client in others:
            assert self.logs[other_tenant].find(kept.token, other_client, self.now) == Absent("not_found")

    @rule(session=consumes(sessions))
    def finish(self, session: tuple[str, str, Kept[History]]) -> None:
        tenant, client, kept = session
        self.logs[tenant].remove(kept)
        assert isinstance(self.logs[tenant].find(kept.token, client, self.now), Absent)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        for log in self.logs.values():
            for kept in log.expire(self.now):
                self.lost.setdefault(kept.token, kept.item.oldest_seq)
            away = log.next_expiry() != float("inf")
            assert not away or log.held_bytes() <= BOUND_BYTES
            assert log.next_expiry() > self.now

    @invariant()
    def every_history_is_bounded(self) -> None:
        for log in self.logs.values():
            assert log.held_bytes() <= len(log) * (BOUND_BYTES // 4 + RECORD_COST_BYTES)


Sessions.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestSessions = Sessions.TestCase
