from __future__ import annotations

import argparse
import array

import pytest

from bench.processes import BenchError
from bench.streams import Round, lags_ns, round_of, summary
from seedance.engine.ledger import EngineRecord

MS = 1_000_000
ARGUMENTS = argparse.Namespace(streams=2, rate=20, seconds=10, tenants=1)


def records(*beats_s: float) -> list[EngineRecord]:
    return [EngineRecord(beat_s=beat_s, steps=number) for number, beat_s in enumerate(beats_s)]


def test_a_message_belongs_to_the_step_of_its_period() -> None:
    arrivals = [1000 * MS + 1, 1049 * MS, 1051 * MS, 1003 * MS, 999 * MS]
    [first, second] = lags_ns(arrivals, [1000 * MS, 1050 * MS], 50 * MS)
    assert first.tolist() == [1, 3 * MS, 49 * MS]
    assert second.tolist() == [MS]


def test_the_last_byte_is_measured_from_the_last_step_and_steps_from_the_middle() -> None:
    arrivals = array.array("Q", [100_001 * MS, 105_004 * MS, 105_006 * MS, 110_030 * MS])
    one, complete_ms = round_of(arrivals, records(100.0, 105.0, 110.0), ARGUMENTS, {"seed-w:bench0": 8_000_000})
    assert one.last_byte_ms == pytest.approx(30.0)
    assert one.known_steps == 1
    assert one.lag_max_ms == pytest.approx(6.0)
    assert complete_ms == pytest.approx([6.0])
    assert one.tokens_per_message == pytest.approx(100.0)
    assert one.cpu_us_per_token == {"seed-w:bench0": pytest.approx(20.0)}


def test_steps_without_messages_are_no_measurement() -> None:
    with pytest.raises(BenchError, match="no message arrived"):
        round_of(array.array("Q", [100_001 * MS]), records(100.0, 105.0, 110.0), ARGUMENTS, {})


def test_of_several_rounds_the_last_byte_is_the_latest_one() -> None:
    def one(last_byte_ms: float, lag_ms: float) -> Round:
        return Round(100, 5, last_byte_ms, lag_ms / 2, lag_ms, 2 * lag_ms, 1.1, {"seed-engine": 3.0})

    result = summary([one(20.0, 10.0), one(41.0, 12.0), one(30.0, 14.0)], ARGUMENTS)
    assert (result["last_byte_ms"], result["lag_p99_ms"], result["tokens_per_s"]) == (41.0, 12.0, 40)
