"""The daemon's status for people: tables on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seedance.daemon.control import StatusReport, StepReport, TenantStatus
from seedance.daemon.doctor.judge import Finding
from seedance.daemon.model_tables import load_text, model_text
from seedance.daemon.quantities import exact_duration, exact_rate, exact_size, scaled
from seedance.engine.scheduling import NOTHING_COUNTED
from seedance.errors import ConfigError
from seedance.qos.gpu import Gpu
from seedance.qos.plan import cpu_list, unenforceable
from seedance.qos.quota import LIMITS, Quota
from seedance.qos.toml import Field
from seedance.qos.usage import TenantUsage

_NONE: Final = "-"


def print_status(report: StatusReport, console: Console, gpus: Sequence[Gpu] = ()) -> None:
    """Print all of a report that a person wants to see at once; `gpus` are those of this machine."""
    overview = _overview(report)
    for gpu in gpus:
        overview.add_row("GPU", escape(_gpu(gpu)))
    console.print(overview)
    console.print(_tenants(report.tenants))
    for listener in report.listener_settings:
        settings = ", ".join(f"{key} = {value}" for key, value in listener.settings.items())
        console.print(f"listener {escape(listener.name)}: {escape(settings)}", soft_wrap=True)
        for key, reason in listener.off.items():
            console.print(f"setting off: {escape(listener.name)}: {key}: {escape(reason)}", soft_wrap=True)
    _print_off(report.limits_off, console)
    _print_notes(report, console)
    for bad in report.bad_files:
        error = str(ConfigError(bad.path, bad.key, bad.reason))
        after = "its last good quota is in force" if bad.kept else "the tenant is not served"
        console.print(f"bad file: {escape(error)} ({after})", soft_wrap=True)


def print_tenants(quotas: Sequence[Quota], console: Console) -> None:
    """Print the quota of each tenant."""
    columns = ("tenant", "class", "keys", "streams", "tokens/s", "/min", "requests/min", "CPU", "memory")
    table = Table(*columns, "egress", "ingress", box=None, pad_edge=False, collapse_padding=True)
    for quota in quotas:
        shown = quota_values(quota)
        table.add_row(
            quota.tenant,
            quota.scheduling_class,
            str(len(quota.keys)),
            *(_limit(value) for value in _limits(quota)),
            *(shown.get(key, _NONE) for key in ("cpu.max", "memory.max", "network.egress", "network.ingress")),
        )
    console.print(table)


def print_quota(quota: Quota, path: str, console: Console) -> None:
    """Print all that one tenant's file and its class say."""
    console.print(_quota(quota, path))


def print_tenant(tenant: TenantStatus, path: str, limits_off: Mapping[str, str], console: Console) -> None:
    """Print one tenant: its quota, what the kernel has of it, and what it has used."""
    table = _quota(tenant.quota, path)
    table.add_row("worker", f"pid {tenant.worker_pid}, {tenant.driver}" if tenant.worker_pid else "none")
    table.add_row("socket mark", f"{tenant.mark:#x}")
    for name, value in tenant.enforced.items():
        table.add_row("in the kernel", f"{name} = {escape(value)}")
    for name, value in usage_values(tenant):
        table.add_row("used", f"{name}: {value}")
    console.print(table)
    for key, reason in not_kept(tenant.quota, limits_off):
        console.print(f"not kept: {key}: {escape(reason)}", soft_wrap=True)


def _quota(quota: Quota, path: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("tenant", quota.tenant)
    table.add_row("file", escape(path))
    table.add_row("class", f"{quota.scheduling_class}, weight {quota.weight}")
    table.add_row("keys", str(len(quota.keys)))
    if quota.group is not None:
        table.add_row("group", quota.group)
    if quota.best_effort:
        table.add_row("best effort", "limits that this machine cannot keep are left out")
    for key, value in quota_values(quota).items():
        table.add_row("limit", f"{key} = {value}")
    return table


def quota_values(quota: Quota) -> dict[str, str]:
    """Return every limit that is set, by its key in the tenant's file, and written as there."""
    values = {}
    for table, fields in LIMITS.items():
        assert isinstance(fields, Mapping)
        for key, field in fields.items():
            assert isinstance(field, Field)
            value = getattr(getattr(quota, table), field.name)
            if value not in (None, ()):
                values[f"{table}.{key}"] = _written(field.name, value)
    return values


def not_kept(quota: Quota, limits_off: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the keys of a tenant's limits that nothing keeps here, each with the reason."""
    return unenforceable(quota, limits_off)


def _written(name: str, value: Any) -> str:
    if name == "cpuset":
        return cpu_list(value)
    if name == "max_cores" or name.endswith("share"):
        return f"{value * 100:.6g}%"
    if name.endswith("_bytes_per_s"):
        return exact_rate(value)
    if name.endswith("_bytes"):
        return exact_size(value)
    return exact_duration(value) if name.endswith("_s") else f"{value:,}"


def usage_values(tenant: TenantStatus) -> list[tuple[str, str]]:
    """Return what a tenant has used since the daemon's start, and what it has now, without what was never counted."""
    used, usage, engine = tenant.used, tenant.usage or TenantUsage(), tenant.engine or NOTHING_COUNTED
    prompt_and_output = f"{used.prompt_tokens:,} of prompts, {used.output_tokens:,} of output"
    queue = f"{engine.queue_s / max(engine.started, 1):.3f} s each, for {engine.started:,} requests"
    preempted = f"{engine.preemptions:,} times, {engine.recomputed_tokens:,} tokens read again"
    throttled = f"{usage.cpu_throttled:,} times, {usage.cpu_throttled_s:.1f} s"
    entries: list[tuple[str, str, object]] = [
        ("streams now", f"{used.streams:,}", True),
        ("connections now", f"{tenant.connections:,}", True),
        ("requests", f"{used.requests:,}, {used.refused:,} refused", True),
        ("tokens", prompt_and_output, True),
        ("engine", f"{engine.step_s:.1f} s in its steps, {engine.held_s:.1f} s held back", engine.step_s),
        ("engine queue", queue, engine.started),
        ("engine preempted", preempted, engine.preemptions),
        ("prefix cache", _cached(engine.cached_tokens, engine.prompt_tokens), engine.cached_tokens),
        ("KV blocks now", f"{engine.kv_blocks:,}", engine.kv_blocks),
        ("CPU", f"{usage.cpu_s:.1f} s", usage.cpu_s),
        ("CPU throttled", throttled, usage.cpu_throttled),
        ("CPU waited for", f"{usage.run_queue_s:.3f} s in run queues", usage.run_queue_s),
        ("memory now", scaled(usage.memory_bytes, "B"), usage.memory_bytes),
        ("memory at most", scaled(usage.memory_peak_bytes, "B"), usage.memory_peak_bytes),
        ("out of memory", f"{usage.oom_kills:,} kills", usage.oom_kills),
        ("tasks now", f"{usage.tasks:,}", usage.tasks),
        ("egress", _traffic(usage.egress_bytes, usage.egress_packets), usage.egress_packets),
        ("egress delayed", f"{usage.egress_delayed_packets:,} packets", usage.egress_delayed_packets),
        ("egress dropped", f"{usage.egress_dropped_packets:,} packets", usage.egress_dropped_packets),
        ("ingress", _traffic(usage.ingress_bytes, usage.ingress_packets), usage.ingress_packets),
        ("ingress dropped", f"{usage.ingress_dropped_packets:,} packets", usage.ingress_dropped_packets),
        ("round trip", f"{usage.rtt_us / 1000:.3f} ms, {usage.min_rtt_us / 1000:.3f} ms at least", usage.rtt_us),
        ("ACK interval", f"{usage.ack_interval_us / 1000:.3f} ms", usage.ack_interval_us),
        ("retransmits", f"{usage.retransmits:,}", usage.retransmits),
        ("CUDA", f"{usage.cuda_launches:,} launches, {usage.cuda_bytes:,} bytes allocated", usage.cuda_launches),
    ]
    return [(name, text) for name, text, counted in entries if counted]


def _traffic(size_bytes: int, packets: int) -> str:
    return f"{size_bytes:,} bytes in {packets:,} packets"


def print_keys(keys: Sequence[tuple[str, str]], console: Console) -> None:
    """Print tenants with the hashes of their keys, each on a line that can be copied from whole."""
    width = max((len(tenant) for tenant, _ in keys), default=0)
    for tenant, hashed in keys:
        console.print(f"{tenant:<{width}}  {escape(hashed.removeprefix('sha256:'))}", soft_wrap=True)


def print_limits(enforced: Mapping[str, Mapping[str, str]], report: StatusReport, console: Console) -> None:
    """Print what the kernel has for these tenants, what is attached where, and what is off."""
    table = Table("tenant", "in the kernel", "value", box=None, pad_edge=False)
    for tenant, values in enforced.items():
        for name, value in values.items() or ((_NONE, _NONE),):
            table.add_row(tenant, name, escape(value))
    console.print(table)
    for line in report.limits:
        console.print(f"attached: {escape(line)}", soft_wrap=True)
    _print_off(report.limits_off, console)
    _print_notes(report, console)


def _print_off(limits_off: Mapping[str, str], console: Console) -> None:
    names: dict[str, list[str]] = {}
    for name, reason in limits_off.items():
        names.setdefault(reason, []).append(name)
    for reason, off in names.items():
        console.print(f"limit off: {', '.join(off)}: {escape(reason)}", soft_wrap=True)


def _print_notes(report: StatusReport, console: Console) -> None:
    for name, note in report.notes.items():
        console.print(f"note: {escape(name)}: {escape(note)}", soft_wrap=True)


def print_tools(tools: Mapping[str, str], console: Console) -> None:
    """Print the tools of `seedancectl trace`, and what each is for."""
    table = Table.grid(padding=(0, 2))
    for name, purpose in tools.items():
        table.add_row(name, escape(purpose))
    console.print(table)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print what `seedancectl doctor` found, a line each, with what to do below it, and how many of which kind."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.word]
        word = f"[{style}]{finding.word:<4}[/]"
        console.print(f"{word}  {finding.name:<{width}}  {escape(finding.found)}", soft_wrap=True)
        if finding.advice:
            console.print(f"{'':<{width + 8}}→ {escape(finding.advice)}", soft_wrap=True)
    counts = Counter(finding.word for finding in findings)
    console.print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")


def _limits(quota: Quota) -> tuple[int | None, ...]:
    tokens = quota.tokens
    return tokens.streams, tokens.per_second, tokens.per_minute, quota.requests.per_minute


def _limit(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _overview(report: StatusReport) -> Table:
    table = Table.grid(padding=(0, 2))
    engine, gateway = report.engine, report.gateway
    table.add_row("seedanced", f"{report.version}, pid {report.pid}, up {_duration(report.uptime_s)}")
    table.add_row("listening", ", ".join(report.listeners))
    table.add_row("engine", escape(engine.state + (f": {engine.detail}" if engine.detail else "")))
    if engine.model is not None:
        table.add_row("model", escape(model_text(engine.model)))
    if engine.load is not None:
        table.add_row("loading", escape(load_text(engine.load)))
    counted = engine.statistics
    if counted is not None:
        table.add_row("running", f"{counted.running:,} streams, {counted.waiting:,} waiting, {counted.tokens:,} tokens")
        if counted.kv_blocks_total:
            table.add_row("KV blocks", f"{counted.kv_blocks_used or 0:,} of {counted.kv_blocks_total:,} used")
    if engine.steps is not None:
        table.add_row("steps", _steps(engine.steps))
    cached, read = (
        sum(getattr(tenant.engine or NOTHING_COUNTED, name) for tenant in report.tenants)
        for name in ("cached_tokens", "prompt_tokens")
    )
    if cached:
        table.add_row("prefix cache", _cached(cached, read))
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


def _steps(steps: StepReport) -> str:
    half, most = (f"{steps.within_s(share) * 1e3:.3g} ms" for share in (0.5, 0.99))
    times = f", half of them within {half}, 99% within {most}" if steps.count else ""
    return f"{steps.count:,}{times}; last sign of life {steps.beat_age_s:.1f} s ago"


def _gpu(gpu: Gpu) -> str:
    busy = "" if gpu.busy is None else f", {gpu.busy:.0%} busy"
    divided = f", {len(gpu.instances)} MIG instances" if gpu.has_mig else ""
    memory = "memory not known"
    if gpu.used_bytes is not None and gpu.memory_bytes is not None:
        memory = f"{scaled(gpu.used_bytes, 'B')} of {scaled(gpu.memory_bytes, 'B')} used"
    return f"{gpu.name or 'unnamed'}: {memory}{busy}{divided}"


def _cached(cached_tokens: int, read_tokens: int) -> str:
    return f"{cached_tokens:,} tokens of prompts, {cached_tokens / max(cached_tokens + read_tokens, 1):.0%} of them"


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
