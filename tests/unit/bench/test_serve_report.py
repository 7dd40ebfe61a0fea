from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from bench.processes import BenchError
from bench.serve_report import ClientReport, combined, parse_report


def report(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "date": "2026-11-30T03:41:28Z",
        "num_prompts": 2,
        "completed": 2,
        "failed": 0,
        "duration": 2.0,
        "output_lens": [4, 4],
        "ttfts": [0.5, 0.25],
        "itls": [[0.1, 0.2, 0.3], [0.1, 0.1]],
        "start_times": [0.0, 0.5],
        "steady_state": None,
    }
    return json.dumps({**fields, **changes}).encode()


def client(began_s: float, arrivals_s: list[float], *, duration_s: float = 10.0, tokens: int = 4) -> ClientReport:
    gaps = tuple(later - earlier for earlier, later in pairwise(arrivals_s))
    return ClientReport(began_s, duration_s, tokens, (arrivals_s[0],), gaps, tuple(arrivals_s))


def test_a_report_tells_when_each_event_came() -> None:
    read = parse_report(report(), 100.0, 4)
    assert (read.began_s, read.duration_s, read.tokens) == (98.0, 2.0, 8)
    assert read.first_tokens_s == (0.5, 0.25)
    assert read.gaps_s == (0.1, 0.2, 0.3, 0.1, 0.1)
    assert read.arrivals_s == pytest.approx((0.5, 0.6, 0.8, 1.1, 0.75, 0.85, 0.95))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"failed": 1, "completed": 1}, "1 of 2 requests were answered"),
        ({"output_lens": [4, 3]}, r"answers have \[3\] tokens, not 4"),
        ({"itls": None}, "cannot read the load client's report"),
    ],
)
def test_a_report_with_anything_missing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_report(report(**changes), 100.0, 4)


def test_one_client_is_rated_over_its_whole_run() -> None:
    sample = combined([client(0.0, [1.0, 1.1, 1.3, 1.4], duration_s=2.0)])
    assert sample.tokens_per_s == pytest.approx(2.0)
    assert sample.tokens_per_event == 1.0
    assert sample.itl_p99_ms == pytest.approx(200.0)
    assert sample.itl_p50_ms == pytest.approx(100.0)
    assert sample.ttft_median_ms == pytest.approx(1000.0)


def test_several_clients_are_rated_over_the_time_in_which_all_of_them_ran() -> None:
    early = client(0.0, [1.0, 3.0, 4.0, 5.0], duration_s=6.0)
    late = client(2.0, [1.0, 2.0, 3.0, 7.0], duration_s=8.0)
    # From 2 to 6: three events of the early one (3, 4, 5) and three of the late one (3, 4, 5).
    assert combined([early, late]).tokens_per_s == pytest.approx(6 / 4)


def test_merged_tokens_count_as_what_they_are() -> None:
    sample = combined([client(0.0, [1.0, 2.0], duration_s=4.0, tokens=8)])
    assert sample.tokens_per_event == 4.0
    assert sample.tokens_per_s == 2.0


def test_clients_that_never_ran_together_cannot_be_rated() -> None:
    with pytest.raises(BenchError, match="no time in which all clients ran"):
        combined([client(0.0, [1.0, 2.0], duration_s=3.0), client(4.0, [1.0, 2.0])])
