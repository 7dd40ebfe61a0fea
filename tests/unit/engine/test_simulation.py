"""What the policy promises, seen on a simulated engine."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from support.plain_policy import PlainPolicy
from support.workloads import PRICES, Clients, merged, run, run_clients, settings, steadily

from seedance.engine.admission import WindowSettings
from seedance.engine.cost import StepLoad
from seedance.engine.policy import Policy
from seedance.engine.scheduling import TenantLimits
from seedance.engine.simulation import SimulatedTenant, Simulation
from seedance.engine.simulation_report import Durations, Report
from seedance.engine.trace import Arrival
from seedance.qos.limiter import TenantLimiter
from seedance.qos.quota import Quota, TokenQuota

pytestmark = pytest.mark.unit


def seconds(value: float | None) -> float:
    assert value is not None
    return value


def test_hard_shares_of_engine_time_hold_with_everybody_backlogged() -> None:
    shares = {"a": 0.1, "b": 0.3, "c": 0.6}
    report = run_clients(
        dict.fromkeys(shares, Clients(count=100)),
        30.0,
        limits={name: TenantLimits(share=share) for name, share in shares.items()},
    )
    assert report.busy_s > 0.98 * report.end_s
    for name, share in shares.items():
        assert report.tenants[name].share == pytest.approx(share, abs=0.03)
        assert report.tenants[name].step_s <= share * report.end_s + 0.2 * share + 0.05


def test_a_hard_share_is_hard_on_an_idle_engine() -> None:
    report = run_clients({"a": Clients(count=10)}, 20.0, limits={"a": TenantLimits(share=0.25)})
    assert report.busy_s / report.end_s == pytest.approx(0.25, abs=0.02)


def test_weights_divide_the_engine() -> None:
    weights = {"a": 100.0, "b": 200.0, "c": 400.0}
    report = run_clients(
        dict.fromkeys(weights, Clients(count=100)),
        40.0,
        limits={name: TenantLimits(weight=weight) for name, weight in weights.items()},
    )
    for name, weight in weights.items():
        assert report.tenants[name].share == pytest.approx(weight / 700, rel=0.05)


def test_large_requests_win_nothing() -> None:
    clients = {
        "large": Clients(count=100, prompt_tokens=8000, output_tokens=1000),
        "small": Clients(count=100, prompt_tokens=100, output_tokens=100),
    }
    report = run_clients(clients, 60.0)
    assert report.tenants["large"].share == pytest.approx(0.5, abs=0.025)


def test_idle_time_saves_nothing_up() -> None:
    crowd = Clients(count=100)
    setting = settings()
    policy = Policy(setting, 0.0)

    def again(tenant: str, now_s: float) -> Arrival | None:
        return crowd.arrival(tenant, now_s) if tenant != "away" or now_s > 600 else None

    away = [crowd.arrival("away", 0.0) for _ in range(5)]
    back = [crowd.arrival("away", 600.0) for _ in range(100)]
    # The other one works all the time; to keep this short most of that time is one slow step.
    slow = Simulation(
        policy,
        setting,
        PRICES,
        {"away": SimulatedTenant(), "busy": SimulatedTenant()},
        next_arrival=again,
        slowdown=lambda number: 580 / PRICES.fixed_s if number == 1000 else 1.0,
    )
    slow.run([*away, *[crowd.arrival("busy", 0.0) for _ in range(100)]], 600.0)
    before = policy.statistics(slow.now_s)
    assert before[1].waiting == before[1].running == 0
    report = slow.run(back, slow.now_s + 20.0)
    after = policy.statistics(slow.now_s)
    charged_s = {row: after[row].step_s - before[row].step_s for row in (1, 2)}
    assert report.tenants["away"].finished > 5
    assert charged_s[1] <= charged_s[2] + 1.0
    assert charged_s[1] >= 0.4 * sum(charged_s.values())


def test_a_lone_tenant_below_its_share_runs_as_without_us() -> None:
    trace = [
        Arrival(at_s=0.02 * i, tenant="a", prompt_tokens=100 + 61 * i % 900, output_tokens=20 + 37 * i % 200)
        for i in range(500)
    ]
    setting = settings()
    ours = run(trace, limits={"a": TenantLimits(share=1.0)}, setting=setting)
    plain = run(trace, setting=setting, policy=PlainPolicy(setting))
    assert ours.output_tokens == plain.output_tokens
    assert ours.end_s <= plain.end_s / 0.98


def test_a_backlogged_lone_tenant_gets_what_a_plain_engine_gives() -> None:
    setting = settings()
    clients = {"a": Clients(count=200, prompt_tokens=500)}
    ours = run_clients(clients, 20.0, setting=setting)
    plain = run_clients(clients, 20.0, setting=setting, policy=PlainPolicy(setting))
    assert ours.output_tokens >= 0.98 * plain.output_tokens


FLOOD_FROM_S: Final = 3.0


def flood(until_s: float) -> list[Arrival]:
    """Return long prompts at ten times what the engine can read."""
    cost_s = PRICES.cost_s(StepLoad(requests=1, prefill_tokens=8000, attention=32_000.0))
    return steadily("a", cost_s / 10, until_s, 8000, 50, from_s=FLOOD_FROM_S)


def test_a_noisy_neighbour_is_hardly_noticed() -> None:
    short = steadily("b", 1.0, 40.0, 200, 20, from_s=0.5)
    setting = settings()
    solo = run(short, until_s=40.0, setting=setting).tenants["b"]
    report = run(merged(short, flood(40.0)), until_s=40.0, setting=setting)
    beside = report.tenants["b"]
    chunk_s = setting.step_target_s
    assert seconds(beside.first_token_p99_s) <= 1.15 * seconds(solo.first_token_p99_s) + chunk_s
    assert seconds(beside.between_tokens_p99_s) <= 1.3 * seconds(solo.between_tokens_p99_s)
    left_s = report.end_s - FLOOD_FROM_S - beside.step_s
    assert report.tenants["a"].step_s >= 0.95 * left_s


def test_without_us_the_neighbour_is_noticed() -> None:
    short = steadily("b", 1.0, 20.0, 200, 20, from_s=0.5)
    setting = settings()
    solo = run(short, until_s=20.0, setting=setting).tenants["b"]
    beside = run(merged(short, flood(20.0)), setting=setting, until_s=20.0, policy=PlainPolicy(setting)).tenants["b"]
    assert beside.first_token_p99_s is None or beside.first_token_p99_s > 10 * seconds(solo.first_token_p99_s)


def test_an_urgent_request_gets_a_slot_when_all_are_taken() -> None:
    low = [Arrival(at_s=0.0, tenant="low", prompt_tokens=200, output_tokens=1000) for _ in range(32)]
    urgent = Arrival(at_s=3.0, tenant="high", prompt_tokens=300, output_tokens=20, priority=1)
    limits = {"low": TenantLimits(weight=100), "high": TenantLimits(weight=400)}
    report = run([*low, urgent], limits=limits, setting=settings(slots=32))
    load = StepLoad(requests=31, decodes=31, context_tokens=31 * 1200)
    step_s = PRICES.cost_s(load)
    load.add_prefill(300, 0)
    assert seconds(report.tenants["high"].first_token_p99_s) <= PRICES.cost_s(load) + 3 * step_s
    assert report.tenants["low"].preemptions == 1
    assert report.tenants["low"].finished == 32
    assert report.tenants["low"].output_tokens == 32_000


def test_an_urgent_request_of_a_lower_class_takes_no_slot() -> None:
    high = [Arrival(at_s=0.0, tenant="high", prompt_tokens=200, output_tokens=300) for _ in range(8)]
    urgent = Arrival(at_s=1.0, tenant="low", prompt_tokens=300, output_tokens=20, priority=1)
    limits = {"low": TenantLimits(weight=100), "high": TenantLimits(weight=400)}
    report = run([*high, urgent], limits=limits, setting=settings(slots=8))
    assert report.tenants["high"].preemptions == 0


AT_ONCE_S: Final = 0.001
CLASSES: Final = {"gold": TenantLimits(weight=400), "bronze": TenantLimits(weight=100)}


def crowd(count: int, prompt_tokens: int, output_tokens: int) -> Clients:
    return Clients(count=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def with_and_without_deadlines(
    greedy: Clients, other: Clients, slots: int, limits: dict[str, TenantLimits] | None = None
) -> tuple[Report, Report]:
    """Return 30 s of two tenants, where the first puts deadlines on all its requests, and where it does not."""
    pressing = msgspec.structs.replace(greedy, deadline_s=AT_ONCE_S)
    first, second = limits or {"greedy": TenantLimits(), "other": TenantLimits()}
    runs = [
        run_clients({first: clients, second: other}, 30.0, limits=limits, setting=settings(slots=slots))
        for clients in (pressing, greedy)
    ]
    return runs[0], runs[1]


@pytest.mark.parametrize("prompt_tokens", [200, 2000])
@pytest.mark.parametrize("output_tokens", [100, 1000])
def test_deadlines_take_no_output_from_a_lower_class(prompt_tokens: int, output_tokens: int) -> None:
    gold, bronze = crowd(32, prompt_tokens, 100), crowd(32, 2000, output_tokens)
    pressing, plain = with_and_without_deadlines(gold, bronze, 16, CLASSES)
    assert pressing.tenants["bronze"].output_tokens >= 0.95 * plain.tenants["bronze"].output_tokens
    assert pressing.tenants["bronze"].preemptions == pressing.tenants["bronze"].recomputed_tokens == 0


@pytest.mark.parametrize(
    ("slots", "flood", "other"),
    [
        (64, crowd(100, 2000, 100), crowd(1, 200, 20)),
        (64, crowd(100, 2000, 100), crowd(8, 1000, 50)),
        (16, crowd(32, 2000, 100), crowd(6, 1000, 50)),
        (16, crowd(32, 500, 100), crowd(9, 500, 100)),
        (64, crowd(100, 1000, 100), crowd(100, 1000, 100)),
    ],
    ids=["light", "light at times", "waits at times", "waits mostly", "a flood too"],
)
def test_deadlines_take_no_output_from_an_equal_tenant(slots: int, flood: Clients, other: Clients) -> None:
    pressing, plain = with_and_without_deadlines(flood, other, slots)
    assert pressing.tenants["other"].output_tokens >= 0.95 * plain.tenants["other"].output_tokens


@pytest.mark.parametrize("output_tokens", [300, 1000])
def test_what_is_read_anew_is_charged_to_the_class_that_took_the_slot(output_tokens: int) -> None:
    many = steadily("low", 0.001, 0.5, 2000, output_tokens)
    now = steadily("now", 0.3, 30.0, 200, 20, from_s=1.0)
    costs_s = []
    for priority in (1, 0):
        limits = {"low": TenantLimits(weight=100), "now": TenantLimits(weight=400, priority=priority)}
        report = run(merged(many, now), limits=limits, setting=settings(slots=4), until_s=30.0)
        low = report.tenants["low"]
        assert (low.preemptions > 20) == (priority > 0)
        costs_s.append(low.step_s / low.output_tokens)
    assert costs_s[0] == pytest.approx(costs_s[1], rel=0.05)


def ramp() -> list[Arrival]:
    arrivals: list[Arrival] = []
    at_s = 0.0
    while at_s < 40:
        at_s += 1 / (1 + at_s)
        i = len(arrivals)
        arrivals.append(
            Arrival(at_s=at_s, tenant=f"t{i % 5}", prompt_tokens=100 + 37 * i % 300, output_tokens=50 + 53 * i % 200)
        )
    return arrivals


def bursts() -> list[Arrival]:
    return [
        Arrival(
            at_s=2.0 * burst + 0.01 * i,
            tenant=f"t{i % 5}",
            prompt_tokens=100 + 37 * i % 300,
            output_tokens=50 + 53 * i % 200,
        )
        for burst in range(20)
        for i in range(1 + 17 * burst % 60)
    ]


def median_first_token_s(report: Report) -> float:
    """Return the mean of the tenants' medians, weighted by their requests."""
    weighted = sum(tenant.finished * seconds(tenant.first_token_p50_s) for tenant in report.tenants.values())
    return weighted / sum(tenant.finished for tenant in report.tenants.values())


@pytest.mark.parametrize("trace", [ramp(), bursts()], ids=["ramp", "bursts"])
def test_the_adaptive_window_beats_a_static_batch_of_32(trace: list[Arrival]) -> None:
    adaptive = run(trace, setting=settings(slots=256))
    static = run(trace, setting=settings(slots=256, window=WindowSettings(static_batch=32)))
    assert median_first_token_s(adaptive) <= 0.75 * median_first_token_s(static)
    assert adaptive.output_tokens == static.output_tokens
    assert adaptive.end_s <= static.end_s * 1.001


def test_a_tenant_keeps_to_its_kv_blocks() -> None:
    setting = settings(slots=64, kv_blocks=1000)
    clients = {"a": Clients(count=40, prompt_tokens=300, output_tokens=300), "b": Clients(count=40)}
    report = run_clients(clients, 20.0, limits={"a": TenantLimits(kv_share=0.2)}, setting=setting)
    assert report.tenants["a"].kv_blocks <= 200
    assert report.tenants["a"].finished > 0
    assert report.tenants["b"].kv_blocks > 400


def test_kv_exhaustion_loses_nothing() -> None:
    trace = [Arrival(at_s=0.0, tenant=f"t{i % 3}", prompt_tokens=100 + i, output_tokens=400) for i in range(60)]
    report = run(trace, setting=settings(slots=64, kv_blocks=300))
    assert sum(tenant.finished for tenant in report.tenants.values()) == 60
    assert report.output_tokens == 60 * 400
    assert sum(tenant.preemptions for tenant in report.tenants.values()) > 0


def test_a_token_rate_paces_running_streams() -> None:
    report = run_clients(
        {"a": Clients(count=8, prompt_tokens=10, output_tokens=500), "b": Clients(count=8)},
        30.0,
        limits={"a": TenantLimits(tokens_per_s=100)},
    )
    entry = report.tenants["a"]
    assert entry.output_tokens + entry.prompt_tokens == pytest.approx(100 * 30, rel=0.02)
    # All streams of the tenant advance alike.
    assert seconds(entry.between_tokens_p50_s) == pytest.approx(8 / 100, rel=0.2)


def test_a_token_budget_ends_streams_within_a_step_of_tokens() -> None:
    quota = Quota(tenant="a", tokens=TokenQuota(per_minute=1000))
    tenants = {"a": SimulatedTenant(limiter=TenantLimiter(quota))}
    trace = [Arrival(at_s=0.0, tenant="a", prompt_tokens=1, output_tokens=1000, max_tokens=1000) for _ in range(20)]
    setting = settings()
    report = Simulation(Policy(setting, 0.0), setting, PRICES, tenants).run(trace)
    entry = report.tenants["a"]
    assert 1000 <= entry.output_tokens + 20 <= 1020
    assert (entry.quota_exceeded, entry.finished, entry.unfinished) == (20, 0, 0)
    assert tenants["a"].limiter is not None
    assert tenants["a"].limiter.statistics().streams == 0  # type: ignore[attr-defined]


def test_a_full_queue_refuses() -> None:
    setting = settings(slots=2)
    trace = [Arrival(at_s=0.0, tenant="a", prompt_tokens=10, output_tokens=10) for _ in range(10)]
    report = Simulation(Policy(setting, 0.0), setting, PRICES, {"a": SimulatedTenant(queue=4)}).run(trace)
    assert (report.tenants["a"].refused, report.tenants["a"].finished) == (6, 4)


def test_a_full_queue_of_all_tenants_leaves_each_its_part() -> None:
    setting = settings(slots=2)
    trace = [
        Arrival(at_s=0.0, tenant=tenant, prompt_tokens=10, output_tokens=10) for tenant in ("flood",) * 20 + ("b",) * 6
    ]
    report = Simulation(Policy(setting, 0.0), setting, PRICES, queue=8).run(trace)
    assert (report.tenants["flood"].finished, report.tenants["flood"].refused) == (8, 12)
    assert (report.tenants["b"].finished, report.tenants["b"].refused) == (2, 4)


def test_thousands_of_tenants() -> None:
    trace = [
        Arrival(at_s=0.01 * i, tenant=f"t{i * 7919 % 3000}", prompt_tokens=50, output_tokens=10) for i in range(3000)
    ]
    report = run(trace, setting=settings(slots=256))
    assert len(report.tenants) == 3000
    assert all(tenant.finished == tenant.requests for tenant in report.tenants.values())


def test_quantiles_are_exact_to_half_a_percent() -> None:
    durations = Durations()
    for i in range(1, 1001):
        durations.add(i / 1000)
    assert durations.quantile(0.5) == pytest.approx(0.5, rel=0.005)
    assert durations.quantile(0.99) == pytest.approx(0.99, rel=0.005)
    assert Durations().quantile(0.5) is None


def test_a_report_is_json() -> None:
    report = run([Arrival(at_s=0.0, tenant="a", prompt_tokens=5, output_tokens=2)])
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
