from __future__ import annotations

from bench.million import on_paper

RESULT = {
    "user_bytes_per_connection": 1000,
    "others_bytes_per_connection": 50,
    "kernel_bytes_per_connection": 4500,
    "rest_cpu_us_per_connection_s": 2.5,
    "accepts_per_s": 3000.0,
}


def test_a_million_take_a_million_times_as_much() -> None:
    text = on_paper(RESULT)
    for row in (
        "| memory of the workers, GB | 1.0 |",
        "| memory of the daemon's other processes, GB | 0.05 |",
        "| memory of the kernel, GB | 4.5 |",
        "| processors busy with pings and pongs | 2.5 |",
        "| until all have come, at the rate above, s | 334 |",
        "fs.nr_open = 1100000 ",
    ):
        assert row in text


def test_without_a_figure_there_is_nothing_on_paper() -> None:
    assert on_paper({key: value for key, value in RESULT.items() if key != "accepts_per_s"}) == ""
