from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import payloads, report
from bench.contender import Idle, Received, Run, latencies, read_times, run_of
from bench.fanout import Size, idle_bytes, ratios, summary, warnings
from bench.processes import BenchError, Spent


def received(*, messages: int = 640, lost: int = 0) -> Received:
    return Received(
        messages=messages,
        bytes=messages * 40,
        payload_bytes=messages * 38,
        reads=messages,
        segments=messages,
        start_ns=1_000,
        first_ns=2_000,
        last_ns=1_001_000,
        busy_ns=500_000,
        lost=lost,
    )


def run(rate: float, *, merged: float = 1.0, busy: float = 0.5) -> Run:
    return Run(
        connections=64,
        steps=10,
        messages_per_s=rate,
        server_cpu_us_per_message=3.0,
        server_user_us_per_message=0.5,
        client_busy=busy,
        messages_per_segment=merged,
        payload_bytes_per_message=38.0,
        late_sends=0,
    )


def test_spread_is_the_median_and_its_quartiles() -> None:
    assert report.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == report.Spread(3.0, 2.0, 4.0, 5)
    assert report.spread([7.0]) == report.Spread(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert report.percentile(list(range(100, 0, -1)), percent) == expected


def test_a_ratio_is_put_below_its_key_with_quartiles_beside() -> None:
    result: dict[str, Any] = {"ratio": {"other": {"64": 1.0}}}
    report.add_ratio(result, "ratio", ["peer", "64"], [1.0, 2.0, 3.0])
    report.add_ratio(result, "alone", [], [1.0, 2.0, 3.0])
    assert result == {
        "ratio": {"other": {"64": 1.0}, "peer": {"64": 2.0}},
        "ratio_quartiles": {"peer": {"64": [1.5, 2.5]}},
        "alone": 2.0,
        "alone_quartiles": [1.5, 2.5],
    }


def test_a_command_can_be_repeated() -> None:
    assert report.command_of("wire", []) == "make bench-wire"
    assert report.command_of("wire", ["--tokens", "64"]) == 'make bench-wire BENCH_ARGS="--tokens 64"'


def test_a_result_is_kept_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.publish("wire", {"fm_bytes_per_token": 22.0}, tmp_path / "build")
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "build" / "wire.result.json").read_text()) == printed
    assert (printed["bench"], printed["fm_bytes_per_token"]) == ("wire", 22.0)
    assert {"date", "command"} <= set(printed)


def test_run_of_counts_from_the_begin_of_the_first_step_to_the_last_arrival() -> None:
    made = run_of(received(), 64, 10, Spent(cpu_ns=1_920_000, user_ns=640_000))
    assert made.messages_per_s == pytest.approx(640 / 1e-3)
    assert made.server_cpu_us_per_message == pytest.approx(3.0)
    assert made.server_user_us_per_message == pytest.approx(1.0)
    assert made.client_busy == pytest.approx(0.5)


def test_run_of_refuses_a_run_with_other_messages_than_were_sent() -> None:
    with pytest.raises(BenchError, match="639 messages arrived, not 640"):
        run_of(received(messages=639), 64, 10, Spent())


def test_latencies_pair_each_arrival_with_the_begin_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "times"
    starts, first, second = (100, 200), (110, 230), (150, 205)
    path.write_bytes(b"".join(value.to_bytes(8, "little") for value in (*starts, *first, *second)))
    times = read_times(path)
    assert latencies(times[:2], times, 2, 2) == [10, 30, 50, 5]


def test_payloads_are_the_same_for_the_same_seed_and_within_their_bounds(tmp_path: Path) -> None:
    payloads.save(tmp_path / "a")
    payloads.save(tmp_path / "b")
    loaded = payloads.load(tmp_path / "a")
    assert loaded == payloads.load(tmp_path / "b")
    assert len(loaded) == payloads.COUNT
    sizes = {len(payload) for payload in loaded}
    assert (min(sizes), max(sizes)) == (payloads.MIN_BYTES, payloads.MAX_BYTES)


def test_each_round_begins_with_another_contender() -> None:
    assert [report.turn("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert report.turn("abc", 2) == ["c", "a", "b"]


def test_idle_bytes_are_the_average_and_that_of_the_second_half() -> None:
    assert idle_bytes(Idle(connections=100, none_bytes=1_000, half_bytes=51_000, all_bytes=91_000)) == (900, 800)


def test_ratios_are_formed_within_rounds_and_the_best_python_server_counts() -> None:
    size = Size(
        connections=64,
        idle={"seedance": Idle(64, 0, 6400, 12800)},
        runs={
            "seedance": [run(200.0), run(300.0), run(240.0)],
            "c-liburing": [run(250.0), run(300.0), run(300.0)],
            "uvicorn": [run(100.0), run(100.0), run(100.0)],
            "websockets-broadcast": [run(120.0), run(150.0), run(120.0)],
            "picows": [run(400.0), run(400.0), run(400.0)],
        },
        latency_ns={"seedance": {"50": 100_000, "90": 200_000, "99": 310_000}},
    )
    assert ratios(size.runs, "c-liburing") == [0.8, 1.0, 0.8]
    result = summary([size])
    assert result["ratio_c_liburing"] == {"64": 0.8}
    assert result["best_python"] == {"64": "websockets-broadcast"}
    assert result["ratio_best_python"] == {"64": 2.0}
    assert result["idle_bytes_per_connection"] == 200
    assert result["step_to_socket_p99_us"] == {"64": 310.0}
    assert result["warnings"] == []


def test_a_merging_server_and_a_busy_client_are_told() -> None:
    size = Size(connections=64, runs={"seedance": [run(1.0, merged=2.0)], "uvicorn": [run(1.0, busy=0.99)]})
    told = warnings([size])
    assert any("seedance: 2.0 messages in a TCP segment" in text for text in told)
    assert any("uvicorn: the client used 99%" in text for text in told)
