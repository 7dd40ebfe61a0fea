"""A host that goes on with the engines of one that has died, with adapters under the test's control."""

from __future__ import annotations

import asyncio

from support.fake_adapter import MODEL, FakeAdapter
from support.host_scene import brought, scene, settle
from support.virtual_time import in_virtual_time

from seedance.engine.adapter import Output
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    Noted,
    Submit,
    pack_singles,
)
from seedance.engine.failover import CONTINUED
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling
from seedance.engine.scheduling import TenantLimits, TenantStatistics
from seedance.engine.survivors import claim_of
from seedance.errors import EngineDead


@in_virtual_time
async def test_host_goes_on_with_the_engines_of_the_last_one() -> None:
    async with scene(start=False) as it:
        ledger = Ledger.create()
        ledger.choose(3)
        ledger.set_limits(1, TenantLimits())
        told = TenantStatistics(
            step_s=1.5,
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=2,
            held_s=0.0,
            preemptions=0,
            recomputed_tokens=0,
            queue_s=0.0,
            started=1,
            running=1,
            waiting=0,
            kv_blocks=3,
            is_held=False,
        )
        ledger.set_statistics(1, told)
        active, standby = FakeAdapter(), FakeAdapter()
        it.start(active, standby, left=[3, 5], standby=True, ledger=ledger)
        await asyncio.sleep(5)
        assert (it.source.most, it.source.rows) == ([2], [3, 5])
        assert it.states() == ["ready"]
        assert it.host.engines is not None
        assert (it.host.engines.standing_by, len(it.host.engines.all)) == (1, 2)
        assert (ledger.active_row, ledger.statistics(1)) == (3, told)
        active.die("killed")
        await settle()
        assert ledger.active_row == 5
        assert ledger.statistics(1) is None


@in_virtual_time
async def test_engine_that_does_not_answer_its_new_host_is_followed_by_another_one() -> None:
    async with scene(start=False) as it:
        silent, fresh = FakeAdapter(), FakeAdapter()
        silent.start_error = EngineDead("it does not answer")
        it.start(silent, fresh, left=[3])
        await asyncio.sleep(5)
        assert (silent.stopped, it.states()[-1]) == (1, "ready")
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        assert len(fresh.submitted) == 1


@in_virtual_time
async def test_what_an_engine_went_on_with_is_taken_over_by_who_asks_for_it_again() -> None:
    async with scene(start=False) as it:
        it.adapter.unclaimed = {0, 1}
        it.start(left=[0])
        await settle()
        assert it.adapter.remembered == [MODEL]
        sampling = Sampling(max_tokens=9)
        claims = [claim_of("acme", stream, [1, 2], sampling) for stream in range(4)]
        it.adapter.claimable = {
            (claims[1], (5,)): Output(0, [6, 7], None, None, 16),
            (claims[2], ()): Output(1, []),
            (claims[3], (5,)): Output(9, [6], FinishReason.STOP),
        }
        it.heard()
        await it.say(*(Submit(stream, [1, 2], sampling, NOT_URGENT, [5] if stream % 2 else []) for stream in range(4)))
        assert [key for key, *_ in it.adapter.submitted] == [2]
        assert it.adapter.claims == [claims[0]]
        assert it.heard() == [
            Batch([Delta(1, [6, 7], None, None, 16)]),
            Noted([1], CONTINUED, is_same=True),
            Batch([Delta(3, [6], FinishReason.STOP)]),
            Noted([3], CONTINUED, is_same=True),
        ]
        it.host.step_completed([Output(0, [8]), Output(1, [5]), Output(2, [5])])
        assert it.heard() == [Batch([], pack_singles([1, 8, 2, 5, 0, 5]))]
        assert brought(it, 0) == [5, 6, 7, 8]
        it.adapter.die("killed")
        await settle()
        again = dict(zip([key for key, *_ in it.adapter.submitted], it.adapter.emitted, strict=True))
        assert again == {0: [5, 6, 7, 8], 1: [5], 2: [5]}
        await it.say(Abort([1]))
        assert it.adapter.aborted == [0]
