"""Status for people."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from seedance.daemon.control import (
    BadFile,
    EngineReport,
    GatewayReport,
    ProcessStatus,
    StatusReport,
    TenantStatus,
)
from seedance.daemon.tables import print_status, print_tenants
from seedance.engine.adapter import EngineState, EngineStatistics
from seedance.engine.request import ModelInfo
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota, RequestQuota, TokenQuota

REPORT = StatusReport(
    version="1.2.3",
    pid=42,
    uptime_s=3725,
    config="/etc/x",
    listeners=["127.0.0.1:8000"],
    engine=EngineReport(
        state="ready",
        detail="",
        model=ModelInfo(
            name="tiny", tokenizer_dir="", max_model_len=32768, vocab_size=9, eos_token_ids=(), created=0, engine="vllm"
        ),
        statistics=EngineStatistics(
            state=EngineState.READY, running=3, waiting=1, kv_blocks_total=1000, kv_blocks_used=7, tokens=12345
        ),
    ),
    gateway=GatewayReport(driver="io_uring", accepted=10, refused=2, held=5),
    processes=[ProcessStatus(name="gateway", pid=43, restarts=2), ProcessStatus(name="zygote", pid=0, restarts=0)],
    tenants=[
        TenantStatus(
            quota=Quota(tenant="acme", tokens=TokenQuota(streams=64), requests=RequestQuota(per_minute=6000)),
            mark=1,
            worker_pid=44,
            driver="io_uring",
            connections=5,
            used=LimiterStatistics(prompt_tokens=1000, output_tokens=2000, requests=30, refused=1, streams=3),
        )
    ],
    bad_files=[
        BadFile(path="/t/[bold]a.toml", key="keys", reason="cannot take [this]", kept=True),
        BadFile(path="/t/b.toml", key="", reason="cannot read it", kept=False),
    ],
    limits_off={"cpu": "not [now]"},
)


def _printed(report: StatusReport) -> str:
    out = io.StringIO()
    print_status(report, Console(file=out, width=200))
    return out.getvalue()


def test_status_shows_what_a_person_asks_first() -> None:
    text = _printed(REPORT)
    for words in (
        "1.2.3, pid 42, up 1 h 2 min",
        "127.0.0.1:8000",
        "tiny (vllm), 32,768 tokens",
        "3 streams, 1 waiting, 12,345 tokens",
        "7 of 1,000 used",
        "io_uring: 10 accepted, 2 refused; now 0 greeting, 0 waiting, 5 held",
        "gateway 43 (restarts: 2), zygote down",
        "limit off: cpu: not [now]",
        "bad file: cannot use '/t/[bold]a.toml', key 'keys': cannot take [this] (its last good quota is in force)",
        "bad file: cannot use '/t/b.toml': cannot read it (the tenant is not served)",
    ):
        assert words in text
    row = next(line for line in text.splitlines() if line.strip().startswith("acme")).split()
    assert row == ["acme", "silver", "44", "io_uring", "5", "3", "30", "1", "1,000", "2,000"]


def test_status_of_a_dead_engine_and_an_idle_tenant() -> None:
    engine = EngineReport(state="dead", detail="killed [by] SIGKILL", model=None, statistics=None)
    tenant = msgspec.structs.replace(REPORT.tenants[0], worker_pid=0, driver="")
    text = _printed(msgspec.structs.replace(REPORT, engine=engine, tenants=[tenant], uptime_s=59.96))
    assert "dead: killed [by] SIGKILL" in text
    assert "KV blocks" not in text
    assert next(line for line in text.splitlines() if line.strip().startswith("acme")).split()[2:4] == ["-", "-"]


def test_tenants_show_their_limits() -> None:
    out = io.StringIO()
    print_tenants(REPORT, Console(file=out, width=200))
    row = out.getvalue().splitlines()[1].split()
    assert row == ["acme", "silver", "0", "64", "-", "-", "6,000", "-"]


def test_uptimes() -> None:
    texts = {seconds: _printed(msgspec.structs.replace(REPORT, uptime_s=seconds)) for seconds in (1.23, 61, 90_000)}
    assert "up 1.2 s" in texts[1.23]
    assert "up 1 min 1 s" in texts[61]
    assert "up 1 d 1 h" in texts[90_000]
