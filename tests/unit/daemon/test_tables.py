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
    StepReport,
    TenantStatus,
)
from seedance.daemon.doctor.judge import Finding
from seedance.daemon.network import ListenerStatus
from seedance.daemon.tables import (
    print_findings,
    print_keys,
    print_limits,
    print_status,
    print_tenant,
    print_tenants,
    quota_values,
)
from seedance.engine.adapter import EngineState, EngineStatistics
from seedance.engine.request import ModelInfo
from seedance.engine.scheduling import TenantStatistics
from seedance.qos.gpu import Gpu, MigInstance
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota, RequestQuota, TokenQuota, load
from seedance.qos.usage import TenantUsage

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
        steps=StepReport(beat_age_s=0.25, count=1_000, total_s=9.0, histogram=[0] * 12 + [600, 380, 20] + [0] * 17),
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
    limits_off={"cpu": "not [now]", "pids": "nor [now]", "cpuset": "not [now]"},
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
        "1,000, half of them within 4.1 ms, 99% within 16.4 ms; last sign of life 0.2 s ago",
        "io_uring: 10 accepted, 2 refused; now 0 greeting, 0 waiting, 5 held",
        "gateway 43 (restarts: 2), zygote down",
        "limit off: cpu, cpuset: not [now]",
        "bad file: cannot use '/t/[bold]a.toml', key 'keys': cannot take [this] (its last good quota is in force)",
        "bad file: cannot use '/t/b.toml': cannot read it (the tenant is not served)",
    ):
        assert words in text
    row = next(line for line in text.splitlines() if line.strip().startswith("acme")).split()
    assert row == ["acme", "silver", "44", "io_uring", "5", "3", "30", "1", "1,000", "2,000"]


def test_status_of_a_dead_engine() -> None:
    engine = EngineReport(state="dead", detail="killed [by] SIGKILL", model=None, statistics=None)
    text = _printed(msgspec.structs.replace(REPORT, engine=engine, uptime_s=59.96))
    assert "dead: killed [by] SIGKILL" in text
    assert "KV blocks" not in text
    assert "steps" not in text
    assert "prefix cache" not in text


def test_status_says_what_the_prefix_cache_is_good_for() -> None:
    tenants = [
        msgspec.structs.replace(REPORT.tenants[0], engine=ENGINE),
        msgspec.structs.replace(REPORT.tenants[0], engine=msgspec.structs.replace(ENGINE, cached_tokens=0)),
        REPORT.tenants[0],
    ]
    text = _printed(msgspec.structs.replace(REPORT, tenants=tenants))
    assert "prefix cache 3,000 tokens of prompts, 60% of them" in " ".join(text.split())


def test_status_shows_the_gpus_of_this_machine() -> None:
    whole = Gpu(
        name="H200 [x]", uuid="GPU-1", memory_bytes=150 * 10**9, used_bytes=40 * 10**9, busy=0.93, has_mig=False
    )
    parts = tuple(MigInstance(uuid=f"MIG-{n}", memory_bytes=10**9) for n in range(2))
    divided = msgspec.structs.replace(whole, name="H100", busy=None, has_mig=True, instances=parts)
    unknown = msgspec.structs.replace(whole, name="", memory_bytes=None, used_bytes=None)
    out = io.StringIO()
    print_status(REPORT, Console(file=out, width=200), [whole, divided, unknown])
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "GPU H200 [x]: 40.0GB of 150GB used, 93% busy" in lines
    assert "GPU H100: 40.0GB of 150GB used, 2 MIG instances" in lines
    assert "GPU unnamed: memory not known, 93% busy" in lines


def test_an_engine_that_has_made_no_step_yet() -> None:
    steps = StepReport(beat_age_s=0.0, count=0, total_s=0.0, histogram=[0] * 32)
    engine = msgspec.structs.replace(REPORT.engine, steps=steps)
    text = _printed(msgspec.structs.replace(REPORT, engine=engine))
    assert "steps 0; last sign of life 0.0 s ago" in " ".join(text.split())


def test_an_idle_tenant_has_no_worker() -> None:
    tenant = msgspec.structs.replace(REPORT.tenants[0], worker_pid=0, driver="")
    text = _printed(msgspec.structs.replace(REPORT, tenants=[tenant]))
    assert next(line for line in text.splitlines() if line.strip().startswith("acme")).split()[2:4] == ["-", "-"]


def test_tenants_show_their_limits() -> None:
    out = io.StringIO()
    limited = load('[cpu]\nmax = "50%"\n[network]\negress = "8Mbit"\n', "globex.toml", "globex")
    print_tenants([REPORT.tenants[0].quota, limited], Console(file=out, width=200))
    rows = [line.split() for line in out.getvalue().splitlines()[1:]]
    assert rows == [
        ["acme", "silver", "0", "64", "-", "-", "6,000", "-", "-", "-", "-"],
        ["globex", "silver", "0", "64", "-", "-", "-", "50%", "-", "8Mbit", "-"],
    ]


EVERYTHING = """
best_effort = true
group = "shared"
[cpu]
max = "150%"
burst = "20ms"
cpuset = "0-1,5"
[memory]
max = "2GiB"
high = "1536MiB"
[network]
egress = "50Mbit"
ingress = "1500kbit"
connections = 2000
[gpu]
share = "25%"
kv = "12.5%"
[tokens]
per_second = 1500
streams = "unlimited"
[session]
resume_for = "90min"
"""


def test_limits_are_shown_as_they_are_written() -> None:
    assert quota_values(load(EVERYTHING, "acme.toml", "acme")) == {
        "cpu.max": "150%",
        "cpu.burst": "20ms",
        "cpu.cpuset": "0-1,5",
        "memory.max": "2GiB",
        "memory.high": "1536MiB",
        "network.egress": "50Mbit",
        "network.ingress": "1500kbit",
        "network.connections": "2,000",
        "gpu.share": "25%",
        "gpu.kv": "12.5%",
        "tokens.per_second": "1,500",
        "requests.queue": "128",
        "session.resume_for": "90min",
    }


ENGINE = TenantStatistics(
    step_s=12.5,
    prompt_tokens=1_000,
    cached_tokens=3_000,
    output_tokens=2_000,
    held_s=3.0,
    preemptions=2,
    recomputed_tokens=640,
    queue_s=2.0,
    started=8,
    running=3,
    waiting=1,
    kv_blocks=17,
    is_held=False,
)


def test_a_tenant_shows_what_is_set_what_is_enforced_and_what_is_used() -> None:
    usage = TenantUsage(
        cpu_s=12.34,
        cpu_throttled=7,
        cpu_throttled_s=0.56,
        memory_bytes=123_456_789,
        egress_bytes=5000,
        egress_packets=9,
    )
    tenant = msgspec.structs.replace(
        REPORT.tenants[0],
        quota=load(EVERYTHING, "acme.toml", "acme"),
        mark=0x5EED0001,
        usage=usage,
        enforced={"cpu.max": "150000 100000", "egress_bytes_per_s": "6250000"},
        engine=ENGINE,
    )
    out = io.StringIO()
    off = {"memory": "no [controller]", "pids": "no [controller]"}
    print_tenant(tenant, "/t/[x]/acme.toml", off, Console(file=out, width=200))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    for words in (
        "tenant acme",
        "file /t/[x]/acme.toml",
        "class silver, weight 200",
        "group shared",
        "best effort limits that this machine cannot keep are left out",
        "limit network.egress = 50Mbit",
        "worker pid 44, io_uring",
        "socket mark 0x5eed0001",
        "in the kernel cpu.max = 150000 100000",
        "in the kernel egress_bytes_per_s = 6250000",
        "used CPU: 12.3 s",
        "used CPU throttled: 7 times, 0.6 s",
        "used memory now: 123MB",
        "used egress: 5,000 bytes in 9 packets",
        "used tokens: 1,000 of prompts, 2,000 of output",
        "used engine: 12.5 s in its steps, 3.0 s held back",
        "used engine queue: 0.250 s each, for 8 requests",
        "used engine preempted: 2 times, 640 tokens read again",
        "used prefix cache: 3,000 tokens of prompts, 75% of them",
        "used KV blocks now: 17",
        "not kept: memory.max: no [controller]",
        "not kept: memory.high: no [controller]",
    ):
        assert words in lines, lines
    assert not any("pids" in line for line in lines), "no limit of this tenant"
    assert not any("round trip" in line or "CUDA" in line for line in lines), "what is not counted is not shown"


def test_limits_as_the_kernel_has_them() -> None:
    out = io.StringIO()
    report = msgspec.structs.replace(REPORT, limits=["lo: clsact [egress]"], notes={"egress": "policed, not paced"})
    enforced = {"acme": {"cpu.max": "50000 100000", "pids.max": "4096"}, "idle": {}}
    print_limits(enforced, report, Console(file=out, width=80))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[1:] == [
        "acme cpu.max 50000 100000",
        "acme pids.max 4096",
        "idle - -",
        "attached: lo: clsact [egress]",
        "limit off: cpu, cpuset: not [now]",
        "limit off: pids: nor [now]",
        "note: egress: policed, not paced",
    ]


def test_findings_have_what_to_do_below_them() -> None:
    out = io.StringIO()
    findings = [Finding("ok", "kernel", "7.0"), Finding("fail", "bpf", "no [x]", "do [y]")]
    print_findings(findings, Console(file=out, width=20))
    assert out.getvalue().splitlines() == [
        "ok    kernel  7.0",
        "fail  bpf     no [x]",
        "              → do [y]",
        "1 ok, 0 warn, 1 fail",
    ]


def test_keys_are_shown_by_their_hash() -> None:
    out = io.StringIO()
    print_keys([("acme", "sha256:" + "a" * 64), ("b", "sha256:" + "b" * 64)], Console(file=out, width=40))
    assert out.getvalue() == f"acme  {'a' * 64}\nb     {'b' * 64}\n", "no line is cut on a narrow terminal"


def test_listeners_show_what_is_in_force_and_what_is_not() -> None:
    listener = ListenerStatus(name="[::1]:80", settings={"congestion": "bbr"}, off={"busy_poll": "not [here]"})
    text = _printed(msgspec.structs.replace(REPORT, listener_settings=[listener], notes={"a": "[b]"}))
    assert "listener [::1]:80: congestion = bbr\n" in text
    assert "setting off: [::1]:80: busy_poll: not [here]\n" in text
    assert "note: a: [b]\n" in text


def test_uptimes() -> None:
    texts = {seconds: _printed(msgspec.structs.replace(REPORT, uptime_s=seconds)) for seconds in (1.23, 61, 90_000)}
    assert "up 1.2 s" in texts[1.23]
    assert "up 1 min 1 s" in texts[61]
    assert "up 1 d 1 h" in texts[90_000]
