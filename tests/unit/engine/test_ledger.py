"""The ledger: what is written is what is read, by every holder of its descriptor, whole or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from seedance.engine.ledger import (
    ENGINES,
    HISTOGRAM_PLACES,
    LEDGER_BYTES,
    ROWS,
    STREAMS,
    EngineRecord,
    Ledger,
    LimitsReader,
)
from seedance.engine.scheduling import TenantLimits, TenantStatistics
from seedance.errors import EngineError

LIMITS = TenantLimits(weight=2.0, share=0.25, kv_share=None, tokens_per_s=100.0)


def make_statistics(number: int) -> TenantStatistics:
    return TenantStatistics(
        step_s=number / 4,
        prompt_tokens=number,
        cached_tokens=number,
        output_tokens=number,
        held_s=number / 4,
        preemptions=number,
        recomputed_tokens=number,
        queue_s=number / 4,
        started=number,
        running=number,
        waiting=number,
        kv_blocks=number,
        is_held=bool(number % 2),
    )


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create()
    yield made
    made.close()


@pytest.fixture
def other(ledger: Ledger) -> Iterator[Ledger]:
    """The same table, as another process maps it."""
    made = Ledger(os.dup(ledger.fd))
    yield made
    made.close()


def look(reader: LimitsReader) -> dict[int, TenantLimits | None]:
    return dict(reader.news())


def test_limits_count_once_they_were_announced(ledger: Ledger, other: Ledger) -> None:
    reader = LimitsReader(other)
    assert look(reader) == {}
    ledger.set_limits(1, LIMITS)
    ledger.set_limits(ROWS - 1, TenantLimits())
    assert look(reader) == {}
    ledger.limits_changed()
    assert look(reader) == {1: LIMITS, ROWS - 1: TenantLimits()}
    assert look(reader) == {}
    ledger.set_limits(1, None)
    ledger.limits_changed()
    assert look(reader) == {1: None}
    assert look(reader) == {}
    assert look(LimitsReader(other)) == {ROWS - 1: TenantLimits()}


def test_row_of_nobody_is_no_news(ledger: Ledger) -> None:
    reader = LimitsReader(ledger)
    ledger.set_limits(5, None)
    ledger.limits_changed()
    assert look(reader) == {}


def test_torn_record_is_read_at_the_next_look(ledger: Ledger, other: Ledger) -> None:
    """A writer that is stopped between two bytes is what a torn read is."""
    reader = LimitsReader(other)
    ledger.set_limits(1, LIMITS)
    ledger.set_limits(2, LIMITS)
    ledger.limits_changed()
    whole = os.pread(ledger.fd, LEDGER_BYTES, 0)
    ledger.set_limits(2, TenantLimits(weight=9.0, share=0.5))
    at = next(
        place for place, (a, b) in enumerate(zip(whole, os.pread(ledger.fd, LEDGER_BYTES, 0), strict=True)) if a != b
    )
    end = os.pread(ledger.fd, 64, at)
    os.pwrite(ledger.fd, bytes([end[0] ^ 1]), at)
    assert look(reader) == {1: LIMITS}
    assert look(reader) == {}
    os.pwrite(ledger.fd, end, at)
    assert look(reader) == {2: TenantLimits(weight=9.0, share=0.5)}


def test_statistics_are_whole_while_another_process_writes_them(ledger: Ledger) -> None:
    ledger.set_statistics(3, make_statistics(0))
    pid = os.fork()
    if pid == 0:
        number = 0
        while True:
            number += 1
            ledger.set_statistics(3, make_statistics(number))
    try:
        whole = torn = last = 0
        while whole < 2_000 or last < 1_000:
            statistics = ledger.statistics(3)
            if statistics is None:
                torn += 1
                continue
            whole += 1
            last = statistics.prompt_tokens
            assert statistics == make_statistics(last)
        assert torn < whole
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_statistics_of_nobody_are_none_and_can_be_cleared(ledger: Ledger, other: Ledger) -> None:
    assert other.statistics(7) is None
    ledger.set_limits(7, LIMITS)
    ledger.set_statistics(7, make_statistics(5))
    ledger.set_engine(EngineRecord(beat_s=12.5, steps=3, step_s=0.5))
    ledger.count_step(0.001)
    assert other.statistics(7) == make_statistics(5)
    assert other.engine() == EngineRecord(beat_s=12.5, steps=3, step_s=0.5)
    other.clear_statistics()
    assert ledger.statistics(7) is None
    assert not any(ledger.histogram())


def test_engines_have_records_of_their_own_and_one_is_active(ledger: Ledger) -> None:
    second = ledger.for_engine(ENGINES - 1)
    ledger.set_engine(EngineRecord(steps=3))
    second.set_engine(EngineRecord(steps=5))
    ledger.set_limits(7, LIMITS)
    ledger.set_statistics(7, make_statistics(5))
    assert (ledger.is_active, second.is_active) == (True, False)
    assert second.engine() == EngineRecord(steps=3)
    ledger.choose(ENGINES - 1)
    assert (ledger.is_active, second.is_active) == (False, True)
    assert ledger.engine() == EngineRecord(steps=5)
    assert ledger.engine(0) == EngineRecord(steps=3)
    assert ledger.statistics(7) is None
    second.close()


def test_histogram_counts_by_powers_of_two(ledger: Ledger) -> None:
    for step_s in (0.0, 1e-6, 1.9e-6, 2e-6, 0.001, 1e6):
        ledger.count_step(step_s)
    counts = dict(enumerate(ledger.histogram()))
    assert {place: count for place, count in counts.items() if count} == {
        0: 1,
        1: 2,
        2: 1,
        10: 1,
        HISTOGRAM_PLACES - 1: 1,
    }


def test_pause_flags_are_by_stream(ledger: Ledger, other: Ledger) -> None:
    ledger.set_paused(2, True)
    assert other.is_paused(2)
    assert other.is_paused(2 + STREAMS)
    assert not other.is_paused(3)
    assert other.pause_changes == 1
    ledger.set_paused(2, True)
    assert other.pause_changes == 1
    ledger.set_paused(2, False)
    assert not other.is_paused(2)
    assert other.pause_changes == 2


def test_anything_else_is_no_ledger() -> None:
    fd = os.memfd_create("test")
    with pytest.raises(EngineError, match="cannot use the ledger"):
        Ledger(fd)
    fd = os.memfd_create("test")
    os.ftruncate(fd, LEDGER_BYTES)
    with pytest.raises(EngineError, match="another version"):
        Ledger(fd)
