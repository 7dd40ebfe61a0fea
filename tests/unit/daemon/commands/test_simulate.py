"""What quotas would do to a trace; the command line itself is thin."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from seedance.daemon.commands.simulate import print_report, simulate
from seedance.engine.scheduling import PolicySettings
from seedance.engine.trace import Arrival
from seedance.qos.quota import load

pytestmark = pytest.mark.unit

SETTINGS = PolicySettings(slots=16, kv_blocks=4096)


def requests(tenant: str, every_s: float, until_s: float) -> list[Arrival]:
    times = itertools.takewhile(lambda at_s: at_s < until_s, (every_s * i for i in itertools.count()))
    return [Arrival(at_s=at_s, tenant=tenant, prompt_tokens=100, output_tokens=50) for at_s in times]


def test_quotas_of_every_kind_take_effect() -> None:
    quotas = {
        "paced": load("[tokens]\nper_second = 200", "paced.toml", "paced"),
        "few": load("[requests]\nper_minute = 5", "few.toml", "few"),
        "shared": load('[gpu]\nshare = "20%"', "shared.toml", "shared"),
    }
    trace = sorted(
        (arrival for tenant in (*quotas, "free") for arrival in requests(tenant, 0.2, 20.0)),
        key=lambda arrival: arrival.at_s,
    )
    report = simulate(quotas, trace, SETTINGS, until_s=20.0)
    paced, few, shared = (report.tenants[name] for name in ("paced", "few", "shared"))
    assert paced.prompt_tokens + paced.output_tokens <= 200 * 20 + 200
    assert paced.refused > 0
    assert (few.finished, few.refused) == (5, 95)
    assert shared.step_s <= 0.2 * 20 + 0.2
    assert report.tenants["free"].finished >= 95


def test_a_bounded_queue_refuses() -> None:
    trace = [Arrival(at_s=0.0, tenant="acme", prompt_tokens=100, output_tokens=50) for _ in range(40)]
    report = simulate({}, trace, SETTINGS, queue=30)
    assert (report.tenants["acme"].finished, report.tenants["acme"].refused) == (30, 10)


def test_a_report_is_a_table() -> None:
    report = simulate({}, requests("acme", 0.5, 5.0), SETTINGS)
    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert "500 tokens put out" in lines[0]
    assert lines[1].split()[:2] == ["tenant", "requests"]
    assert lines[2].split()[:3] == ["acme", "10", "0"]
    assert "100.0%" in lines[2]
