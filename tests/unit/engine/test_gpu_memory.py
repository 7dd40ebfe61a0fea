from __future__ import annotations

import pytest

from seedance.engine.gpu_memory import Action, Watermark

N, H, S, M, R = Action.NONE, Action.HOLD, Action.SHRINK, Action.MOVE, Action.RELEASE


@pytest.mark.parametrize(
    ("used", "actions"),
    [
        ([0.5, 0.94, 0.9], [N, N, N]),
        ([0.95, 0.96, 0.94, 0.92], [H, N, N, R]),
        ([0.95] * 9, [H, N, S, N, N, M, N, N, N]),
        ([0.95, 0.95, 0.95, 0.5, 0.95, 0.95], [H, N, S, R, H, N]),
        ([0.95, 0.94, 0.94, 0.94, 0.94, 0.94, 0.94], [H, N, N, N, N, N, N]),
        ([0.95, None, None, 0.95, None, 0.5], [H, N, N, S, N, R]),
    ],
    ids=["below", "for a moment", "for good", "shrinking helps", "just below", "NVML is silent"],
)
def test_each_thing_is_done_once_and_in_turn(used: list[float | None], actions: list[Action]) -> None:
    watermark = Watermark(0.95)
    assert [watermark.look(3.0 * number, part) for number, part in enumerate(used)] == actions
