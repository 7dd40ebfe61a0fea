"""When an engine hangs, and when it is only at work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.progress import GPU_S, IDLE_S, LOOK_EVERY_S, STEP_S, STOPPED_S, Progress, Sight

LIMIT_S = 10.0  # in which a hang is to be seen


def found_after(sights: Iterator[Sight], limit_s: float) -> tuple[float, str] | None:
    """Return when the watch finds a hang in what it sees, and which; the first sight is at 0."""
    progress = Progress()
    for sight in sights:
        if sight.now_s > limit_s:
            break
        if reason := progress.look(sight):
            return sight.now_s, reason
    return None


def every_look(
    *, sign_every_s: float = 0, cpu: float = 0.0, state: str = "S", gpu_busy: bool | None = None
) -> Iterator[Sight]:
    for number in itertools.count():
        now_s = number * LOOK_EVERY_S
        sign = now_s // sign_every_s if sign_every_s else 0.0
        yield Sight(now_s=now_s, sign=sign, cpu_s=cpu * now_s, process_state=state, gpu_busy=gpu_busy)


@pytest.mark.parametrize(
    ("sights", "reason"),
    [
        (every_look(state="T"), "its process was stopped by a signal"),
        (every_look(state="T", sign_every_s=1), "its process was stopped by a signal"),
        (every_look(), "it hangs: no sign of life for 7 s, and nothing computes"),
        (every_look(cpu=0.01, gpu_busy=False), "it hangs: no sign of life for 7 s, and nothing computes"),
    ],
)
def test_a_hang_is_seen_in_time(sights: Iterator[Sight], reason: str) -> None:
    found = found_after(sights, LIMIT_S)
    assert found is not None
    assert found[0] <= LIMIT_S - LOOK_EVERY_S, "a look may come late by as much as they are apart"
    assert found[1] == reason


@pytest.mark.parametrize(
    "sights",
    [
        every_look(sign_every_s=1),
        every_look(sign_every_s=6),
        every_look(sign_every_s=120, cpu=1.0, state="R"),
        every_look(sign_every_s=120, cpu=0.0, state="R"),
        every_look(sign_every_s=120, cpu=0.0, state="D"),
        every_look(sign_every_s=120, cpu=0.5),
        every_look(sign_every_s=120, gpu_busy=True),
    ],
    ids=["at rest", "late", "on the processor", "starved", "reads a disk", "in another thread", "on the GPU"],
)
def test_work_is_no_hang(sights: Iterator[Sight]) -> None:
    assert found_after(sights, 3600.0) is None


def test_a_step_without_end_is_a_hang() -> None:
    found = found_after(every_look(cpu=1.0, state="R"), 2 * STEP_S)
    assert found is not None
    assert abs(found[0] - STEP_S) <= LOOK_EVERY_S


def test_a_gpu_that_is_busy_for_others_does_not_hide_a_hang_for_ever() -> None:
    found = found_after(every_look(gpu_busy=True), 2 * GPU_S)
    assert found is not None
    assert abs(found[0] - GPU_S) <= LOOK_EVERY_S


def test_a_ledger_that_cannot_be_read_is_no_hang() -> None:
    unread = (Sight(now_s=float(at), sign=None, cpu_s=0.0, process_state="S") for at in range(1000))
    assert found_after(unread, 999.0) is None


@given(
    gaps=st.lists(st.floats(0.01, 500.0), max_size=30),
    states=st.lists(st.sampled_from("RSDT"), min_size=31, max_size=31),
)
def test_time_in_which_nobody_looked_does_not_count(gaps: list[float], states: list[str]) -> None:
    progress, now_s = Progress(), 0.0
    for looks, (gap_s, state) in enumerate(zip([0.0, *gaps], states, strict=False)):
        now_s += gap_s
        found = progress.look(Sight(now_s=now_s, sign=1.0, cpu_s=0.0, process_state=state))
        assert not found or looks >= min(STOPPED_S, IDLE_S) / (2 * LOOK_EVERY_S)


@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.0, 6.0)), min_size=1, max_size=200))
def test_signs_of_life_at_any_pace_are_none(looks: list[tuple[float, float]]) -> None:
    """Whoever gives a sign at least every 6 s is never taken for dead, however often it is looked at."""
    progress, now_s, sign_s = Progress(), 0.0, 0.0
    for gap_s, age_s in looks:
        now_s += gap_s
        sign_s = max(sign_s, now_s - age_s)
        assert not progress.look(Sight(now_s=now_s, sign=sign_s, cpu_s=0.0, process_state="S"))
