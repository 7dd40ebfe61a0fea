from __future__ import annotations

import pytest

from bench.idle import MOST_PER_TENANT, Phase, Round, phase_of, summary, tenants_for
from bench.processes import BenchError
from bench.synthetic import Memory, parts


def phase(p99_us: int) -> Phase:
    return Phase(
        messages=1000,
        gap_p50_us=50_000,
        gap_p99_us=p99_us,
        gap_p999_us=2 * p99_us,
        tokens_per_message=1.0,
        others_cpu_share=p99_us / 1e6,
    )


def round_of(without_us: int, with_us: list[int], *, workers: int = 900_000, dropped: int = 0) -> Round:
    return Round(
        connections=1000,
        without=phase(without_us),
        connect_s=0.5,
        grown=Memory(workers, 100_000, 8_000_000),
        rest_cpu_us_per_s=2500.0,
        held=[phase(one) for one in with_us],
        held_s=40.0,
        dropped=dropped,
    )


@pytest.mark.parametrize(
    ("connections", "descriptors", "tenants"), [(100_000, 20_000, 8), (14_000, 20_000, 1), (100_000, 1 << 20, 8)]
)
def test_there_are_as_many_tenants_as_descriptors_and_ports_ask_for(
    connections: int, descriptors: int, tenants: int
) -> None:
    assert tenants_for(connections, descriptors) == tenants
    assert max(parts(connections, tenants)) <= min(MOST_PER_TENANT, descriptors)


def test_a_phase_has_percentiles_and_tells_what_was_put_together() -> None:
    seen = phase_of(list(range(1, 1001)), streams=10, seconds=10.0, others_cpu_share=0.5)
    assert seen.others_cpu_share == 0.5
    assert (seen.gap_p50_us, seen.gap_p99_us, seen.gap_p999_us) == (500, 990, 999)
    assert seen.tokens_per_message == pytest.approx(2.0)  # 10 streams, 20 tokens/s, 10 s: 2,000 tokens


def test_streams_that_bring_next_to_nothing_are_no_phase() -> None:
    with pytest.raises(BenchError, match="10 streams brought 3 messages in 10 s"):
        phase_of([1, 2, 3], streams=10, seconds=10.0, others_cpu_share=0.0)


def test_the_ratio_is_formed_within_rounds_and_memory_is_the_first_rounds() -> None:
    rounds = [round_of(50_000, [55_000]), round_of(100_000, [100_000, 110_000, 120_000], workers=0, dropped=2)]
    result = summary(rounds, tenants=1, streams=10)
    assert result["gap_p99_ratio"] == pytest.approx(1.1)
    assert result["user_bytes_per_connection"] == 900
    assert result["kernel_bytes_per_connection"] == 4000
    assert result["kernel_bytes_both_ends"] == 8000
    assert result["accepts_per_s"] == 2000.0
    assert result["rest_cpu_us_per_connection_s"] == pytest.approx(2.5)
    assert result["others_cpu_share_without"] == pytest.approx(0.075)  # the median of 0.05 and 0.1
    assert result["others_cpu_share_with"] == pytest.approx(0.105)  # of 0.055, 0.1, 0.11 and 0.12
    assert result["dropped"] == 2
