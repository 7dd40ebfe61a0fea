"""Rates between two samples."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from seedance.daemon.control import EngineReport, GatewayReport, StatusReport, TenantStatus
from seedance.daemon.top import ProcessSample, Rates, Sample, TenantRates, parse_process, rates, table
from seedance.engine.scheduling import NOTHING_COUNTED, TenantStatistics
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota
from seedance.qos.usage import TenantUsage


def _tenant(name: str = "acme", tokens: tuple[int, int] = (0, 0), pid: int = 44, **usage: Any) -> TenantStatus:
    return TenantStatus(
        quota=Quota(tenant=name),
        mark=1,
        worker_pid=pid,
        driver="io_uring",
        connections=5,
        used=LimiterStatistics(prompt_tokens=tokens[0], output_tokens=tokens[1], requests=1, refused=0, streams=3),
        usage=TenantUsage(**usage) if usage else None,
    )


def _sample(
    uptime_s: float, *tenants: TenantStatus, pid: int = 42, processes: dict[int, ProcessSample] | None = None
) -> Sample:
    report = StatusReport(
        version="1.2.3",
        pid=pid,
        uptime_s=uptime_s,
        config="/etc/x",
        listeners=[],
        engine=EngineReport(state="ready", detail="", model=None, statistics=None),
        gateway=GatewayReport(driver="io_uring"),
        processes=[],
        tenants=list(tenants),
        bad_files=[],
        limits_off={},
    )
    return Sample(report=report, processes=processes or {})


def _counted(**counters: float) -> TenantStatistics:
    return msgspec.structs.replace(NOTHING_COUNTED, **counters)


def _only(before: Sample, after: Sample) -> TenantRates:
    (tenant,) = rates(before, after).tenants
    return tenant


def test_rates_are_differences_over_the_time_between() -> None:
    before = _tenant(
        tokens=(100, 1000),
        cpu_s=10.0,
        cpu_throttled=7,
        egress_bytes=1000,
        ingress_bytes=50,
        egress_dropped_packets=1,
        ingress_dropped_packets=2,
        rtt_us=9,
    )
    after = _tenant(
        tokens=(140, 1200),
        cpu_s=11.0,
        cpu_throttled=12,
        egress_bytes=5000,
        ingress_bytes=90,
        egress_dropped_packets=5,
        ingress_dropped_packets=4,
        rtt_us=2500,
    )
    before = msgspec.structs.replace(before, engine=_counted(step_s=1.0, held_s=5.0, cached_tokens=10))
    counted = _counted(step_s=1.5, held_s=6.0, prompt_tokens=30, cached_tokens=20)
    after = msgspec.structs.replace(after, engine=counted)
    found = rates(_sample(100.0, before), _sample(102.0, after, processes={44: ProcessSample(cpu_s=5, rss_bytes=4096)}))
    assert (found.elapsed_s, found.engine, found.pid) == (2.0, "ready", 42)
    assert found.tenants == [
        TenantRates(
            tenant="acme",
            connections=5,
            streams=3,
            prompt_tokens_per_s=20.0,
            output_tokens_per_s=100.0,
            engine=0.25,
            held=0.5,
            cached=0.25,
            cpu=0.5,
            throttled=0.25,
            rss_bytes=4096,
            egress_bytes_per_s=2000.0,
            ingress_bytes_per_s=20.0,
            rtt_us=2500,
            drops_per_s=3.0,
        )
    ]
    assert found.tenants[0].tokens_per_s == 120.0


def test_throttled_is_never_more_than_all_of_the_time() -> None:
    assert _only(_sample(1, _tenant(cpu_throttled=0)), _sample(2, _tenant(cpu_throttled=999))).throttled == 1.0


def test_without_a_group_the_worker_tells_its_processor_time() -> None:
    before = _sample(1.0, _tenant(), processes={44: ProcessSample(cpu_s=1.0, rss_bytes=1)})
    after = _sample(3.0, _tenant(), processes={44: ProcessSample(cpu_s=2.0, rss_bytes=1)})
    assert _only(before, after).cpu == 0.5
    other = _sample(3.0, _tenant(pid=45), processes={45: ProcessSample(cpu_s=2.0, rss_bytes=1)})
    assert _only(before, other).cpu == 0.0, "another worker's time is not compared with"


def test_nothing_measured_is_not_zero() -> None:
    found = _only(_sample(1.0, _tenant(pid=0)), _sample(2.0, _tenant(pid=0)))
    assert (found.rtt_us, found.rss_bytes) == (None, None)


def test_a_counter_that_began_anew_counts_from_there() -> None:
    before = _sample(1.0, _tenant(tokens=(0, 5000), egress_bytes=9999))
    after = _sample(2.0, _tenant(tokens=(0, 30), egress_bytes=70))
    found = _only(before, after)
    assert (found.output_tokens_per_s, found.egress_bytes_per_s) == (30.0, 70.0)


def test_a_new_tenant_has_no_rates_yet() -> None:
    after = _sample(2.0, _tenant("acme", (0, 100)), _tenant("new", (0, 5000), cpu_s=9.0))
    found = {tenant.tenant: tenant for tenant in rates(_sample(1.0, _tenant("acme")), after).tenants}
    assert (found["new"].output_tokens_per_s, found["new"].cpu) == (0.0, 0.0)
    assert found["acme"].output_tokens_per_s == 100.0


@pytest.mark.parametrize("after", [_sample(0.5, _tenant(tokens=(0, 9))), _sample(9, _tenant(tokens=(0, 9)), pid=43)])
def test_nobody_has_rates_after_a_restart(after: Sample) -> None:
    found = rates(_sample(1.0, _tenant()), after)
    assert found.elapsed_s == 0.0
    assert found.tenants[0].output_tokens_per_s == 0.0


@pytest.mark.parametrize(("sort", "order"), [("cpu", ["b", "a", "c"]), ("tokens", ["c", "a", "b"])])
def test_who_uses_most_comes_first(sort: str, order: list[str]) -> None:
    before = _sample(0.0, *(_tenant(name, (0, 0), cpu_s=1.0) for name in "abc"))
    after = _sample(
        1.0,
        _tenant("c", (50, 50), cpu_s=1.0),
        _tenant("a", (0, 1), cpu_s=1.5),
        _tenant("b", (0, 0), cpu_s=3.0),
    )
    assert [tenant.tenant for tenant in rates(before, after, sort=sort).tenants] == order


def test_a_process_whose_name_is_no_help() -> None:
    stat = "44 (a) (b c) S 1 44 44 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 12345 1000000 300 18446744073709551615 1"
    assert parse_process(stat, ticks_per_s=100, page_bytes=4096) == ProcessSample(cpu_s=3.0, rss_bytes=300 * 4096)


def test_the_table_fits_into_80_columns() -> None:
    busy = TenantRates(
        tenant="a-tenant-with-a-rather-long-name",
        connections=2000,
        streams=1234,
        prompt_tokens_per_s=90_000,
        output_tokens_per_s=9_999,
        engine=0.25,
        held=0.75,
        cached=0.42,
        cpu=15.99,
        throttled=1.0,
        rss_bytes=123_456_789,
        egress_bytes_per_s=125_000_000,
        ingress_bytes_per_s=12_345_678,
        rtt_us=123_456,
        drops_per_s=54_321,
    )
    idle = msgspec.structs.replace(busy, tenant="idle", rss_bytes=None, rtt_us=None, streams=0, drops_per_s=0)
    shown = Rates(version="1.2.3", pid=42, uptime_s=9, engine="[ready]", elapsed_s=2, tenants=[busy, idle])
    out = io.StringIO()
    Console(file=out, width=80).print(table(shown))
    lines = out.getvalue().splitlines()
    head = "seedanced 1.2.3, engine [ready]: 1,234 streams, 199,998 tokens/s, CPU 3198%"
    busy_row = "1,234 99,999 25% 1599% 100% 123MB 1.0Gbit 98.8Mbit 123.5ms 54,321"
    idle_row = "idle 0 99,999 25% 1599% 100% - 1.0Gbit 98.8Mbit - 0"
    assert (lines[0].strip(), len(lines)) == (head, 4)
    assert " ".join(lines[2].split()[1:]) == busy_row
    assert " ".join(lines[3].split()) == idle_row


def test_a_wide_screen_shows_more() -> None:
    found = rates(_sample(0.0, _tenant()), _sample(1.0, _tenant()))
    (tenant,) = found.tenants
    shown = msgspec.structs.replace(found, tenants=[msgspec.structs.replace(tenant, held=0.75, cached=0.42)])
    out = io.StringIO()
    Console(file=out, width=100).print(table(shown, 100))
    _, head, row = out.getvalue().splitlines()
    assert (head.split()[-2:], row.split()[-2:]) == (["held", "cached"], ["75%", "42%"])
