"""An hour under the host's watch, in virtual time: whatever keeps an engine from its steps, only a hang is one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.watched_engine import Span, WatchedEngine, at_saturation

HOUR_S = 3600.0
on_both = pytest.mark.parametrize("on_gpu", [False, True], ids=["processor", "gpu"])


@on_both
def test_nothing_is_a_hang_in_an_hour_at_saturation(tmp_path: Path, on_gpu: bool) -> None:
    """Prompts of 120 s are in it, and all the pauses that an engine makes."""
    engine = WatchedEngine(tmp_path)
    spans = list(at_saturation(Random(1), HOUR_S, on_gpu=on_gpu))
    assert sum(span.seconds == 120.0 for span in spans) > 2
    assert engine.run(spans) is None
    assert engine.loop.time() >= HOUR_S
    assert engine.steps > 5_000
    engine.close()


@on_both
@pytest.mark.parametrize("state", ["S", "T"])
def test_a_hang_after_that_is_seen_in_time(tmp_path: Path, on_gpu: bool, state: str) -> None:
    engine = WatchedEngine(tmp_path)
    spans = list(at_saturation(Random(3), HOUR_S / 6, on_gpu=on_gpu))
    hang = Span(60.0, cpu=0.0, state=state, gpu_busy=False if on_gpu else None)
    found_s = engine.run([*spans, hang])
    assert found_s is not None
    assert 0.0 < found_s - sum(span.seconds for span in spans) <= 10.0
    engine.close()
