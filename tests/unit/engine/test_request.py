from __future__ import annotations

from typing import Any

import pytest

from seedance.engine.request import FinishReason, Sampling

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("emitted", "sampling", "room", "end"),
    [
        ([], {}, 10, None),
        ([5], {}, 10, None),
        ([5, 6, 7, 8], {}, 10, LENGTH),
        ([5, 6], {}, 2, LENGTH),
        ([5, 1], {}, 10, STOP),
        ([1, 5], {}, 10, None),
        ([5, 1], {"ignore_eos": True}, 10, None),
        ([5, 9], {"stop_token_ids": (9,), "ignore_eos": True}, 10, STOP),
        ([5, 9], {"stop_token_ids": (9,), "min_tokens": 2}, 10, None),
        ([5, 6, 9], {"stop_token_ids": (9,), "min_tokens": 2}, 10, STOP),
        ([5, 6, 7, 1], {}, 4, STOP),
    ],
)
def test_end_of_a_generation(emitted: list[int], sampling: dict[str, Any], room: int, end: FinishReason | None) -> None:
    assert Sampling(max_tokens=4, **sampling).end_of(emitted, room, (1,)) is end
