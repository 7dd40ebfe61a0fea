"""`seedancectl top` and `doctor`: what goes on, and whether this machine is fit for it."""

from __future__ import annotations

import sys
import time

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from seedance.daemon import tables
from seedance.daemon import top as top_rates
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console, print_json
from seedance.daemon.doctor.judge import examine, exit_status
from seedance.errors import ResourceBroken


@click.command(epilog=example("top", "top --once --sort tokens", "top --json --interval 5"))
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--sort", type=click.Choice(top_rates.SORTS), default="cpu", show_default=True, help="Who comes first.")
@click.option("--once", is_flag=True, help="Watch for one interval, print that, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each interval.")
@click.pass_obj
def top(context: Context, interval: float, sort: str, once: bool, as_json: bool) -> None:
    """Watch what each tenant uses; Ctrl-C ends it.

    CPU and "capped" are the tenant's cgroup's: 100% is one core, and the part of its 0.1 s periods in which it
    reached its limit. Where no cgroup counts, CPU is its worker's. RSS is the worker's. Egress and ingress count bytes
    on the wire. RTT is the smoothed round-trip time of its connections; drops are packets over a limit. A screen of 100
    columns also has the part of the time in which it was held out of the engine's steps, and the part of its prompts
    that was in the prefix cache.
    """
    before = _sample(context)
    screen = console()
    try:
        if once or as_json or not screen.is_terminal:
            _print(context, before, interval, sort, once=once, as_json=as_json)
        else:
            _live(context, before, interval, sort, screen)
    except KeyboardInterrupt:
        return


def _sample(context: Context) -> top_rates.Sample:
    report = context.status()
    pids = {tenant.worker_pid for tenant in report.tenants if tenant.worker_pid}
    return top_rates.Sample(report=report, processes=top_rates.read_processes(pids))


def _print(
    context: Context, before: top_rates.Sample, interval: float, sort: str, *, once: bool, as_json: bool
) -> None:
    while True:
        time.sleep(interval)
        after = _sample(context)
        found = top_rates.rates(before, after, sort=sort)
        if as_json:
            click.echo(msgspec.json.encode(found).decode())
            sys.stdout.flush()
        else:
            screen = console()
            screen.print(top_rates.table(found, screen.width))
        if once:
            return
        before = after


def _live(context: Context, before: top_rates.Sample, interval: float, sort: str, screen: Console) -> None:
    """Draw until interrupted; a daemon that does not answer for a while, because it restarts, is waited for."""
    waiting: RenderableType = Text(f"watching for {interval:g} s; Ctrl-C ends it")
    with Live(waiting, console=screen, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            time.sleep(interval)
            try:
                after = _sample(context)
            except ResourceBroken as exc:
                live.update(Text(str(exc)), refresh=True)
                continue
            found = top_rates.rates(before, after, sort=sort)
            live.update(top_rates.table(found, screen.width), refresh=True)
            before = after


@click.command(epilog=example("doctor", "doctor --json"))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_obj
def doctor(context: Context, as_json: bool) -> int:
    """Say what this machine lacks, and what to do.

    Each line begins with ok, warn (something is left out) or fail (seedanced would not start, or not keep what the
    tenants' files promise). Exits with 1 when something fails. As root it can try more.
    """
    # What it tries brings half of the daemon and pyroute2, which no other command should wait for.
    from seedance.daemon.doctor import probe  # noqa: PLC0415

    findings = examine(probe.gather(context.path))
    if as_json:
        print_json(findings)
    else:
        tables.print_findings(findings, console())
    return exit_status(findings)
