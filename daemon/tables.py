"""The daemon's status for people: tables on a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seedance.daemon.control import StatusReport, TenantStatus
from seedance.errors import ConfigError
from seedance.qos.quota import Quota

_NONE: Final = "-"


def print_status(report: StatusReport, console: Console) -> None:
    """Print all of a report that a person wants to see at once."""
    console.print(_overview(report))
    console.print(_tenants(report.tenants))
    for name, reason in report.limits_off.items():
        console.print(f"limit off: {name}: {escape(reason)}", highlight=False)
    for bad in report.bad_files:
        error = str(ConfigError(bad.path, bad.key, bad.reason))
        after = "its last good quota is in force" if bad.kept else "the tenant is not served"
        console.print(f"bad file: {escape(error)} ({after})", highlight=False)


def print_tenants(report: StatusReport, console: Console) -> None:
    """Print the quota of each tenant."""
    table = Table("tenant", "class", "keys", "streams", "tokens/s", "tokens/min", "requests/min", "context", box=None)
    for tenant in report.tenants:
        quota = tenant.quota
        table.add_row(
            quota.tenant,
            quota.scheduling_class,
            str(len(quota.keys)),
            *(_limit(value) for value in _limits(quota)),
        )
    console.print(table)


def _limits(quota: Quota) -> tuple[int | None, ...]:
    tokens = quota.tokens
    return tokens.streams, tokens.per_second, tokens.per_minute, quota.requests.per_minute, tokens.context


def _limit(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _overview(report: StatusReport) -> Table:
    table = Table.grid(padding=(0, 2))
    engine, gateway = report.engine, report.gateway
    table.add_row("seedanced", f"{report.version}, pid {report.pid}, up {_duration(report.uptime_s)}")
    table.add_row("listening", ", ".join(report.listeners))
    table.add_row("engine", escape(engine.state + (f": {engine.detail}" if engine.detail else "")))
    if engine.model is not None:
        table.add_row("model", f"{engine.model.name} ({engine.model.engine}), {engine.model.max_model_len:,} tokens")
    counted = engine.statistics
    if counted is not None:
        table.add_row("running", f"{counted.running:,} streams, {counted.waiting:,} waiting, {counted.tokens:,} tokens")
        if counted.kv_blocks_total:
            table.add_row("KV blocks", f"{counted.kv_blocks_used or 0:,} of {counted.kv_blocks_total:,} used")
    table.add_row(
        "gateway",
        f"{gateway.driver or 'not running'}: {gateway.accepted:,} accepted, {gateway.refused:,} refused;"
        f" now {gateway.greeting:,} greeting, {gateway.waiting:,} waiting, {gateway.held:,} held",
    )
    table.add_row(
        "processes",
        ", ".join(
            f"{process.name} {process.pid or 'down'}" + (f" (restarts: {process.restarts})" if process.restarts else "")
            for process in report.processes
        ),
    )
    return table


def _tenants(tenants: list[TenantStatus]) -> Table:
    columns = ("class", "worker", "io", "open", "streams", "requests", "refused", "prompt", "output")
    table = Table("tenant", *columns, box=None, pad_edge=False, collapse_padding=True)  # fits into 80 columns
    for tenant in tenants:
        used = tenant.used
        counts = (tenant.connections, used.streams, used.requests, used.refused, used.prompt_tokens, used.output_tokens)
        table.add_row(
            tenant.quota.tenant,
            tenant.quota.scheduling_class,
            str(tenant.worker_pid or _NONE),
            tenant.driver or _NONE,
            *(f"{count:,}" for count in counts),
        )
    return table


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    if hour:
        return f"{hour} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{seconds:.1f} s"
