"""What a daemon records of its requests can be replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.daemon import running, wait_until
from support.raw_http import Connection, request
from support.synthetic import MODEL

from seedance.engine.trace import Arrival, parse


def read(path: Path) -> list[Arrival]:
    with path.open("rb") as file:
        return list(parse(file, str(path)))


def test_a_recorded_trace_is_simulated(tmp_path: Path) -> None:
    tables = {"engine": {"trace": "1MiB"}, "engine.synthetic": {"tokens_per_s": 200}}
    with running(tmp_path / "d", "acme", "globex", tables=tables) as daemon:
        trace = daemon.folder / "state" / "engine" / "trace.jsonl"

        def complete(tenant: str, max_tokens: int, fields: dict[str, str] | None = None) -> Connection:
            connection = Connection(daemon.address)
            body = {"model": MODEL, "prompt": [300] * 40, "max_tokens": max_tokens}
            connection.send(request("POST", "/v1/completions", daemon.keys[tenant], body, fields))
            return connection

        with complete("acme", 30) as connection:
            assert connection.response().status == 200
        with complete("globex", 5, {"X-Deadline-Ms": "5000"}) as connection:
            assert connection.response().status == 200
        left = complete("acme", 4_000)
        wait_until(lambda: daemon.tenant("acme").used.output_tokens > 40)
        left.close()
        wait_until(lambda: len(read(trace)) == 3)
        first, second, third = read(trace)
        assert (first.tenant, first.prompt_tokens, first.output_tokens, first.max_tokens) == ("acme", 40, 30, 30)
        assert (second.tenant, second.output_tokens) == ("globex", 5)
        assert second.deadline_s is not None
        assert 4.0 < second.deadline_s <= 5.0
        assert (third.max_tokens, 10 < third.output_tokens < 4_000) == (4_000, True)
        assert all(0 < arrival.rtt_s < 1 for arrival in (first, second, third)), "as the kernel has measured it"
        with complete("acme", 4_000):
            wait_until(lambda: daemon.tenant("acme").used.streams == 1)
            daemon.stop()
        assert len(read(trace)) == 4, "what ran when it was stopped is there too"
        simulate = ["simulate", str(daemon.folder / "tenants.d"), str(trace), "--json"]
        ctl = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config), *simulate]
        done = subprocess.run(ctl, capture_output=True, text=True, check=True, timeout=60)
        report = json.loads(done.stdout)
        assert {name: tenant["finished"] for name, tenant in report["tenants"].items()} == {"acme": 3, "globex": 1}
        assert report["output_tokens"] == sum(arrival.output_tokens for arrival in read(trace))
