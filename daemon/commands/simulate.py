"""`seedancectl simulate`: what quotas would do to a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import click
import msgspec
from rich.console import Console
from rich.table import Table

from seedance.daemon import tenants
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console, print_json
from seedance.engine import trace as traces
from seedance.engine.cost import UNMEASURED, CostModel, Prices
from seedance.engine.policy import Policy
from seedance.engine.scheduling import PolicySettings, limits_of
from seedance.engine.simulation import SimulatedTenant, Simulation
from seedance.engine.simulation_report import Report
from seedance.engine.trace import Arrival
from seedance.errors import ConfigError
from seedance.qos.limiter import TenantLimiter
from seedance.qos.quota import BUILT_IN_CLASSES, Quota, SchedulingClass, load_directory


def simulate(
    quotas: Mapping[str, Quota],
    arrivals: Iterable[Arrival],
    settings: PolicySettings,
    prices: Prices = UNMEASURED,
    until_s: float = float("inf"),
    queue: int = 0,
) -> Report:
    """Return how the tenants of a trace would fare under these quotas.

    Tenants without a quota have no limits. `queue` bounds the requests of all that wait, 0 for no bound. The trace
    begins at 0 s of virtual time. Raises ConfigError where the trace does when it is read.
    """
    known = {
        name: SimulatedTenant(limits=limits_of(quota), limiter=TenantLimiter(quota), queue=quota.requests.queue)
        for name, quota in quotas.items()
    }
    policy = Policy(settings, 0.0, CostModel(prices))
    return Simulation(policy, settings, prices, known, queue=queue).run(arrivals, until_s)


@click.command("simulate", epilog=example("simulate tenants.d day.jsonl", "simulate /etc/seedance/tenants.d - --json"))
@click.argument("quotas", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("trace", type=click.File("rb"))
@click.option("--slots", type=click.IntRange(1, 65_536), default=256, show_default=True, help="Requests at once.")
@click.option("--kv-blocks", type=click.IntRange(1), default=65_536, show_default=True, help="Blocks of the KV cache.")
@click.option("--block-tokens", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens of a block.")
@click.option("--step-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Tokens of one step.")
@click.option("--queue", type=click.IntRange(1), default=None, help="Bound of waiting requests; none without it.")
@click.option(
    "--step-target",
    "step_target_s",
    type=click.FloatRange(0, min_open=True),
    default=0.03,
    show_default=True,
    metavar="SECONDS",
    help="How long a step that reads prompts may take while several tenants are there.",
)
@click.option(
    "--prices",
    type=click.File("rb"),
    help='What things in a step take, in seconds, as JSON: {"fixed_s": …, "mixed_s": …, "prefill_s": …, "decode_s": …,'
    ' "context_s": …, "attention_s": …}. Without it, those of a very small model.',
)
@click.option("--until", "until_s", type=click.FloatRange(0), default=None, metavar="SECONDS", help="When to stop.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def command(  # noqa: PLR0913, PLR0917 - one for each option
    context: Context,
    quotas: Path,
    trace: BinaryIO,
    slots: int,
    kv_blocks: int,
    block_tokens: int,
    step_tokens: int,
    queue: int | None,
    step_target_s: float,
    prices: BinaryIO | None,
    until_s: float | None,
    as_json: bool,
) -> None:
    """Show how tenants would fare with the tenant files in directory QUOTAS, were the requests in TRACE to come.

    The scheduler that runs in the engine is run here in virtual time on a simulated engine: an hour takes some
    seconds. TRACE has lines of JSON: the first {"format": "seedance-trace", "version": 1}, then one for each request,
    {"at_s": 0.25, "tenant": "acme", "prompt_tokens": 512, "output_tokens": 128}. Nothing of a running daemon is
    changed.
    """
    loaded = load_directory(tenants.read_files(quotas), _classes(context))
    if loaded.errors:
        raise loaded.errors[0]
    settings = PolicySettings(
        slots=slots,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        step_target_s=step_target_s,
    )
    report = simulate(
        loaded.quotas,
        traces.parse(trace, trace.name),
        settings,
        UNMEASURED if prices is None else _read_prices(prices.read(), prices.name),
        float("inf") if until_s is None else until_s,
        queue or 0,
    )
    if as_json:
        print_json(report)
    else:
        print_report(report, console())


def print_report(report: Report, console: Console) -> None:
    """Print a report as a table, the largest shares of the engine first."""
    busy = report.busy_s / report.end_s if report.end_s else 0.0
    console.print(f"{report.end_s:.1f} s simulated, engine busy {busy:.1%}, {report.output_tokens} tokens put out")
    columns = ("requests", "refused", "over quota", "left", "share", "held", "queue", "first p50", "first p99")
    table = Table("tenant", *columns, "next p50", "next p99", "preempted", box=None, pad_edge=False)
    for name, entry in sorted(report.tenants.items(), key=lambda item: -item[1].step_s):
        table.add_row(
            name,
            str(entry.requests),
            str(entry.refused),
            str(entry.quota_exceeded),
            str(entry.unfinished),
            f"{entry.share:.1%}",
            f"{entry.held_s:.1f} s",
            _milliseconds(entry.queue_s),
            _milliseconds(entry.first_token_p50_s),
            _milliseconds(entry.first_token_p99_s),
            _milliseconds(entry.between_tokens_p50_s),
            _milliseconds(entry.between_tokens_p99_s),
            str(entry.preemptions),
        )
    console.print(table)


def _milliseconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s * 1e3:.1f} ms"


def _classes(context: Context) -> Mapping[str, SchedulingClass]:
    """Return the daemon's scheduling classes, or the built-in ones on a machine without a daemon."""
    return context.config().classes if Path(context.path).exists() else BUILT_IN_CLASSES


def _read_prices(text: bytes, path: str) -> Prices:
    try:
        prices = msgspec.json.decode(text, type=Prices)
    except msgspec.DecodeError as exc:
        example_text = msgspec.json.encode(UNMEASURED).decode()
        raise ConfigError(path, "", f"cannot read prices: {exc}; write e.g. {example_text}") from exc
    if min(msgspec.structs.astuple(prices)) < 0 or prices.fixed_s + prices.decode_s <= 0:
        raise ConfigError(path, "", "cannot take negative prices, nor steps that take no time; write what was measured")
    return prices
