from __future__ import annotations

import pytest

from bench.processes import BenchError
from bench.uring import LOADS, Refused, Run, run_of, summary


def run_with(cpu_us: float, p99_us: float = 0.0) -> Run:
    return Run(operations_per_s=1e6 / cpu_us, cpu_us_per_operation=cpu_us, enters_per_operation=0.5, p99_us=p99_us)


def test_a_run_is_what_server_and_client_say() -> None:
    done = "done operations=2000 ns=500000000 p50_ns=1000 p99_ns=20000"
    run = run_of("fan", 64, "served cpu_ns=8000000 bytes=20 enters=1000", done)
    assert run == Run(operations_per_s=4000.0, cpu_us_per_operation=4.0, enters_per_operation=0.5, p99_us=20.0)


def test_what_was_taken_only_the_server_knows() -> None:
    done = "done operations=0 ns=1000000000 p50_ns=0 p99_ns=0"
    run = run_of("take", 1000, "served cpu_ns=5000 bytes=5000 enters=10", done)
    assert (run.operations_per_s, run.cpu_us_per_operation, run.enters_per_operation) == (5.0, 1.0, 2.0)


def test_a_run_in_which_nothing_was_done_is_refused() -> None:
    with pytest.raises(BenchError, match="nothing was done"):
        run_of("fan", 64, "served cpu_ns=1 bytes=0 enters=1", "done operations=0 ns=1 p50_ns=0 p99_ns=0")
    with pytest.raises(BenchError, match="should begin with 'served'"):
        run_of("fan", 64, "killed", "done operations=0 ns=1 p50_ns=0 p99_ns=0")


def test_ratios_are_formed_within_rounds() -> None:
    runs = {
        "default": [run_with(2.0, 10.0), run_with(4.0, 10.0), run_with(3.0, 10.0)],
        "zc": [run_with(4.0, 5.0), run_with(4.0, 5.0), run_with(9.0, 20.0)],
        "napi": [Refused("Invalid argument")] * 3,
    }
    result = summary([{"link": "veth", "qdisc": "tbf", "load": "fan 64", "runs": runs}])
    assert result["cpu_us_per_operation"] == {"veth, fan 64": 3.0}
    assert result["cpu_ratio"] == {"veth, fan 64": {"zc": 2.0}}
    assert result["rate_ratio"] == {"veth, fan 64": {"zc": 0.5}}
    assert result["p99_ratio"] == {"veth, fan 64": {"zc": 0.5}}
    assert result["refused"] == {"napi": "Invalid argument"}
    assert result["qdisc"] == {"veth": "tbf"}


def test_every_option_is_tried_under_some_load() -> None:
    options = {option for options in LOADS.values() for option in options}
    assert options == {"taskrun", "coop", "zc", "min-wait", "busy-poll", "napi", "bundle"}
