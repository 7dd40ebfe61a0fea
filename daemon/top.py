"""`seedancectl top`: what each tenant uses right now, from two samples a moment apart."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from rich.markup import escape
from rich.table import Table

from seedance.daemon.control import StatusReport, TenantStatus
from seedance.daemon.quantities import scaled
from seedance.engine.scheduling import NOTHING_COUNTED
from seedance.qos.quota import CPU_PERIOD_S
from seedance.qos.usage import TenantUsage

SORTS: Final = ("cpu", "tokens")

_NONE: Final = "-"
_WIDE: Final = 100
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """One process: the processor time that it has used since its start, and its resident memory."""

    cpu_s: float
    rss_bytes: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the daemon, and at its workers' processes by their ids."""

    report: StatusReport
    processes: Mapping[int, ProcessSample]


class TenantRates(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant uses. `cpu` counts cores, `throttled` is the part of cpu.max's periods that ended in waiting.

    `engine` is its part of the engine's time, `held` the part of the time in which it was kept out of the steps,
    `cached` the part of its prompts that was in the prefix cache.

    `rtt_us` is None where it is not measured, and `rss_bytes` where no worker runs.
    """

    tenant: str
    connections: int
    streams: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    engine: float
    held: float
    cached: float
    cpu: float
    throttled: float
    rss_bytes: int | None
    egress_bytes_per_s: float
    ingress_bytes_per_s: float
    rtt_us: int | None
    drops_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and of output, as the quota counts them."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """All tenants, over the `elapsed_s` seconds between two samples; 0 after a restart between them."""

    version: str
    pid: int
    uptime_s: float
    engine: str
    elapsed_s: float
    tenants: list[TenantRates]


def read_processes(pids: Iterable[int]) -> dict[int, ProcessSample]:
    """Return what /proc says of these processes; one that is gone is left out."""
    samples = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        samples[pid] = parse_process(stat, ticks_per_s=_TICKS_PER_S, page_bytes=_PAGE_BYTES)
    return samples


def parse_process(stat: str, *, ticks_per_s: int, page_bytes: int) -> ProcessSample:
    """Read /proc/PID/stat (proc_pid_stat(5)): utime and stime are fields 14 and 15, rss is field 24.

    The second field is a name in parentheses, which may hold spaces and parentheses itself.
    """
    fields = stat.rpartition(")")[2].split()  # from field 3 on
    return ProcessSample(
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_per_s, rss_bytes=int(fields[21]) * page_bytes
    )


def rates(before: Sample, after: Sample, *, sort: str = "cpu") -> Rates:
    """Return what was used between two samples, the tenant that uses most first.

    A counter that went back began anew in between, so that what it shows now is what was used. A tenant that is new
    has no rates yet, nor has anybody after the daemon's restart.
    """
    old, new = before.report, after.report
    same = old.pid == new.pid and new.uptime_s > old.uptime_s
    known = {tenant.quota.tenant: tenant for tenant in old.tenants} if same else {}
    elapsed_s = new.uptime_s - old.uptime_s if same else 0.0
    found = []
    for tenant in new.tenants:
        earlier = known.get(tenant.quota.tenant, tenant)
        processes = before.processes.get(earlier.worker_pid), after.processes.get(tenant.worker_pid)
        found.append(_tenant_rates(earlier, tenant, *processes, elapsed_s=elapsed_s or 1.0))
    found.sort(key=lambda tenant: tenant.tenant)
    found.sort(key=lambda tenant: tenant.cpu if sort == "cpu" else tenant.tokens_per_s, reverse=True)
    return Rates(
        version=new.version,
        pid=new.pid,
        uptime_s=new.uptime_s,
        engine=new.engine.state,
        elapsed_s=elapsed_s,
        tenants=found,
    )


def _tenant_rates(
    old: TenantStatus,
    new: TenantStatus,
    old_process: ProcessSample | None,
    new_process: ProcessSample | None,
    *,
    elapsed_s: float,
) -> TenantRates:
    def rate(earlier: float, later: float) -> float:
        return (later - earlier if later >= earlier else later) / elapsed_s

    before, after = old.usage or TenantUsage(), new.usage or TenantUsage()
    engine_before, engine = old.engine or NOTHING_COUNTED, new.engine or NOTHING_COUNTED
    drops = after.egress_dropped_packets + after.ingress_dropped_packets
    cached = rate(engine_before.cached_tokens, engine.cached_tokens)
    prompt = cached + rate(engine_before.prompt_tokens, engine.prompt_tokens)
    cpu = rate(before.cpu_s, after.cpu_s)
    if not after.cpu_s and new_process and old_process and old.worker_pid == new.worker_pid:  # no group counts it
        cpu = rate(old_process.cpu_s, new_process.cpu_s)
    return TenantRates(
        tenant=new.quota.tenant,
        connections=new.connections,
        streams=new.used.streams,
        prompt_tokens_per_s=rate(old.used.prompt_tokens, new.used.prompt_tokens),
        output_tokens_per_s=rate(old.used.output_tokens, new.used.output_tokens),
        engine=rate(engine_before.step_s, engine.step_s),
        held=min(1.0, rate(engine_before.held_s, engine.held_s)),
        cached=cached / prompt if prompt else 0.0,
        cpu=cpu,
        throttled=min(1.0, rate(before.cpu_throttled, after.cpu_throttled) * CPU_PERIOD_S),
        rss_bytes=new_process.rss_bytes if new_process else None,
        egress_bytes_per_s=rate(before.egress_bytes, after.egress_bytes),
        ingress_bytes_per_s=rate(before.ingress_bytes, after.ingress_bytes),
        rtt_us=after.rtt_us or None,
        drops_per_s=rate(before.egress_dropped_packets + before.ingress_dropped_packets, drops),
    )


def table(shown: Rates, width: int = 80) -> Table:
    """Return the rates as a table that fits into 80 columns; with a wider screen it has more of them."""
    is_wide = width >= _WIDE
    tokens_per_s = sum(tenant.tokens_per_s for tenant in shown.tenants)
    streams = sum(tenant.streams for tenant in shown.tenants)
    cpu = sum(tenant.cpu for tenant in shown.tenants)
    made = Table(
        title=f"seedanced {shown.version}, engine {escape(shown.engine)}:"
        f" {streams:,} streams, {tokens_per_s:,.0f} tokens/s, CPU {cpu:.0%}",
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("tenant", overflow="ellipsis")  # the one that may wrap is the one that gets narrower
    for name in (
        "streams",
        "tokens/s",
        "engine",
        "CPU",
        "capped",
        "RSS",
        "egress",
        "ingress",
        "RTT",
        "drops/s",
        *(("held", "cached") if is_wide else ()),
    ):
        made.add_column(name, justify="right", no_wrap=True)
    for tenant in shown.tenants:
        made.add_row(
            tenant.tenant,
            f"{tenant.streams:,}",
            f"{tenant.tokens_per_s:,.0f}",
            f"{tenant.engine:.0%}",
            f"{tenant.cpu:.0%}",
            f"{tenant.throttled:.0%}",
            _NONE if tenant.rss_bytes is None else scaled(tenant.rss_bytes, "B"),
            scaled(tenant.egress_bytes_per_s * 8, "bit"),
            scaled(tenant.ingress_bytes_per_s * 8, "bit"),
            _NONE if tenant.rtt_us is None else f"{tenant.rtt_us / 1000:.1f}ms",
            f"{tenant.drops_per_s:,.0f}",
            *((f"{tenant.held:.0%}", f"{tenant.cached:.0%}") if is_wide else ()),
        )
    return made
