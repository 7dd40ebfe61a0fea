"""The whole daemon as real processes with the synthetic engine: tenants, deaths, reloads, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, Http, running, wait_until
from support.mps import control_daemon
from support.slices import slice_s, slices_missing

from seedance.daemon import control
from seedance.daemon.client import ApiRefused, Client
from seedance.daemon.doctor.probe import gather
from seedance.daemon.process import SERVING_SLICE_S, WORKER_SLICE_S
from seedance.errors import ResourceBroken

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests that leave it as able as before."""
    with running(tmp_path_factory.mktemp("daemon"), "acme", "globex", "initech") as daemon:
        yield daemon


def test_each_tenant_is_served_by_a_worker_of_its_own(daemon: Daemon) -> None:
    assert daemon.text("acme")
    assert daemon.text("acme") == daemon.text("globex")
    acme, globex = daemon.tenant("acme"), daemon.tenant("globex")
    assert 0 != acme.worker_pid != globex.worker_pid != 0
    assert acme.used.output_tokens == 10
    assert globex.used.output_tokens == 5
    assert {acme.worker_pid, globex.worker_pid} <= set(daemon.processes())
    assert Path(f"/proc/{acme.worker_pid}/comm").read_text() == "seed-w:acme\n"


@pytest.mark.skipif(slices_missing() != "", reason=slices_missing())
def test_who_serves_everybody_is_let_in_first(daemon: Daemon) -> None:
    assert daemon.text("acme")
    shared = [slice_s(daemon.child(name).pid) for name in ("gateway", "engine host")]
    assert shared == [SERVING_SLICE_S] * 2
    assert SERVING_SLICE_S < slice_s(daemon.tenant("acme").worker_pid) == WORKER_SLICE_S < slice_s(daemon.pid)


def test_who_gives_up_privileges_has_one_thread(daemon: Daemon) -> None:
    pids = {process.name: process.pid for process in daemon.status().processes}
    assert len(pids) >= 3
    threads = {name: len(list(Path(f"/proc/{pid}/task").iterdir())) for name, pid in pids.items()}
    assert threads == dict.fromkeys(pids, 1)


def test_a_websocket_is_handed_over_too(daemon: Daemon) -> None:
    assert "".join(daemon.client("acme").infer("Hello", max_tokens=5))


def test_the_unix_socket_serves_as_well(daemon: Daemon) -> None:
    client = Client(f"unix:{daemon.folder}/http.sock", daemon.keys["acme"])
    assert client.model() == "synthetic"
    assert "".join(client.chat(MESSAGES, model="synthetic", max_tokens=3))


def test_a_connection_goes_to_whose_key_each_request_shows(daemon: Daemon) -> None:
    http = Http(daemon.address)
    assert http.get("/healthz") == (200, {"status": "ok"})
    port = http.local_port
    for tenant in ("acme", "globex", "acme", "initech"):
        status, body = http.get("/v1/models", daemon.keys[tenant])
        assert (status, body["data"][0]["id"]) == (200, "synthetic")
        assert daemon.tenant(tenant).connections == 1
    status, body = http.get("/v1/models", "sk-seed-of-nobody-at-all")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert daemon.tenant("initech").connections == 0
    http.close()
    assert port


def test_an_unknown_path_is_not_found_but_only_with_a_key(daemon: Daemon) -> None:
    http = Http(daemon.address)
    status, body = http.get("/nowhere", daemon.keys["acme"])
    assert (status, body["error"]["code"]) == (404, "not_found")
    http.close()
    http = Http(daemon.address)
    assert http.get("/nowhere")[0] == 401
    http.close()


def test_a_killed_worker_is_followed_by_another_one(daemon: Daemon) -> None:
    daemon.text("acme")
    others = daemon.text("globex"), daemon.tenant("globex").worker_pid
    pid = daemon.tenant("acme").worker_pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: daemon.tenant("acme").worker_pid != pid)
    assert daemon.text("acme")  # waits for the new worker
    assert daemon.tenant("acme").worker_pid not in (0, pid)
    assert (daemon.text("globex"), daemon.tenant("globex").worker_pid) == others
    assert "worker of tenant 'acme'" in daemon.log.read_text()
    assert "killed by SIGKILL" in daemon.log.read_text()


def _answers(daemon: Daemon, tenant: str) -> bool:
    try:
        return bool(daemon.text(tenant))
    except (ApiRefused, ResourceBroken):
        return False


def test_workers_that_come_and_go_leave_no_descriptor_behind(daemon: Daemon) -> None:
    def descriptors() -> dict[str, int]:
        pids = {process.name: process.pid for process in daemon.status().processes} | {"supervisor": daemon.pid}
        return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()}

    daemon.text("acme")
    before = descriptors()
    for _ in range(3):
        pid = daemon.tenant("acme").worker_pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: daemon.tenant("acme").worker_pid != pid)
        assert daemon.text("acme")
    wait_until(lambda: descriptors() == before)


def test_a_killed_gateway_leaves_streams_and_workers_alone(daemon: Daemon) -> None:
    daemon.text("acme")
    worker, gateway, address = daemon.tenant("acme").worker_pid, daemon.child("gateway"), daemon.address
    stream = daemon.client("acme").chat(MESSAGES, model="synthetic", max_tokens=100)
    next(stream)
    os.kill(gateway.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{gateway.pid}").exists())  # while it ends, its ring may still accept
    assert Client(address, daemon.keys["acme"]).model() == "synthetic"  # waits in the listener's backlog
    assert "".join(stream)
    assert daemon.tenant("acme").worker_pid == worker
    assert daemon.child("gateway").pid not in (0, gateway.pid)
    assert daemon.child("gateway").restarts == gateway.restarts + 1


def test_a_killed_engine_host_comes_back_for_the_same_workers(daemon: Daemon) -> None:
    daemon.text("acme")
    worker, host = daemon.tenant("acme").worker_pid, daemon.child("engine host")
    stream = daemon.client("acme").chat(MESSAGES, model="synthetic", max_tokens=100)
    next(stream)
    os.kill(host.pid, signal.SIGKILL)
    assert "".join(stream)
    wait_until(lambda: _answers(daemon, "acme"))
    assert daemon.tenant("acme").worker_pid == worker
    assert daemon.child("engine host").pid not in (0, host.pid)


def test_a_killed_zygote_takes_no_worker_with_it(daemon: Daemon) -> None:
    daemon.text("acme")
    worker, zygote = daemon.tenant("acme").worker_pid, daemon.child("zygote")
    os.kill(zygote.pid, signal.SIGKILL)
    assert daemon.text("acme")
    assert daemon.tenant("acme").worker_pid == worker
    daemon.add_tenant("late")
    assert daemon.reload().added == ["late"]
    assert daemon.text("late")
    # Its parent is gone, so its end is the supervisor's to see.
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: _answers(daemon, "acme"))
    wait_until(lambda: worker not in daemon.processes())


def test_a_bad_file_changes_nothing_but_its_own_line_in_status(daemon: Daemon) -> None:
    daemon.text("acme")
    good = daemon.tenant_file("acme").read_text()
    daemon.tenant_file("acme").write_text(good + "[tokens]\nstreems = 3\n")
    daemon.add_tenant("globex", "[tokens]\nstreams = 7\n")
    daemon.tenant_file("broken").write_text("keys = 3")
    reloaded = daemon.reload()
    assert (reloaded.added, reloaded.changed, reloaded.removed) == ([], ["globex"], [])
    acme, broken = reloaded.bad_files
    assert (Path(acme.path).name, acme.key, acme.kept) == ("acme.toml", "tokens.streems", True)
    assert "streams" in acme.reason
    assert (Path(broken.path).name, broken.kept) == ("broken.toml", False)
    assert daemon.status().bad_files == reloaded.bad_files
    assert daemon.text("acme")
    assert daemon.tenant("globex").quota.tokens.streams == 7
    daemon.tenant_file("broken").unlink()
    daemon.tenant_file("acme").write_text(good)
    assert daemon.reload().bad_files == []


def test_a_changed_quota_counts_for_the_running_worker(daemon: Daemon) -> None:
    daemon.add_tenant("hooli", "[requests]\nper_minute = 100\n")
    daemon.reload()
    daemon.text("hooli")
    daemon.add_tenant("hooli", "[requests]\nper_minute = 1\n")
    assert daemon.reload().changed == ["hooli"]
    with pytest.raises(ApiRefused) as refused:
        daemon.text("hooli")
    assert refused.value.status == 429


def test_a_tenant_without_a_file_is_no_tenant_after_sighup(daemon: Daemon) -> None:
    daemon.add_tenant("brief")
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: any(tenant.quota.tenant == "brief" for tenant in daemon.status().tenants))
    daemon.text("brief")
    worker = daemon.tenant("brief").worker_pid
    daemon.tenant_file("brief").unlink()
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: worker not in daemon.processes())
    with pytest.raises(ApiRefused) as refused:
        daemon.text("brief")
    assert refused.value.status == 401


def test_a_new_tenants_first_request_is_nearly_as_fast_as_its_second(daemon: Daemon) -> None:
    names = [f"cold{number}" for number in range(5)]
    for name in names:
        daemon.add_tenant(name)
    daemon.reload()
    address = daemon.address
    cold: list[float] = []
    warm: list[float] = []
    for name in names:
        for figures in (cold, warm, warm):
            started = time.perf_counter()
            http = Http(address)
            assert http.get("/v1/models", daemon.keys[name])[0] == 200
            figures.append(time.perf_counter() - started)
            http.close()
    more_ms = 1000 * (statistics.median(cold) - statistics.median(warm))
    print(f"first byte: cold {1000 * statistics.median(cold):.1f} ms, warm {1000 * statistics.median(warm):.1f} ms")
    assert more_ms < 100


def test_status_says_what_is_not_applied(daemon: Daemon) -> None:
    off = daemon.status().limits_off
    assert "gpu" not in off
    assert {off[limit] for limit in ("cpu", "memory", "egress", "ingress")} == {'[kernel] limits is "off"'}


def test_the_control_socket_answers_nonsense_and_goes_on(daemon: Daemon) -> None:
    path = daemon.folder / "run" / control.SOCKET_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        sock.sendall(b"nonsense\r\n\r\n")
        with sock.makefile("rb") as replies:
            assert replies.readline() == b"HTTP/1.1 400 Bad Request\r\n"
    assert daemon.status().pid == daemon.pid


def test_an_idle_worker_leaves_and_its_successor_remembers(tmp_path: Path) -> None:
    with running(tmp_path, idle_timeout="100ms") as daemon:
        daemon.add_tenant("acme", "[requests]\nper_minute = 2\n")
        daemon.reload()
        daemon.text("acme")
        first = daemon.tenant("acme").worker_pid
        wait_until(lambda: first not in daemon.processes())
        assert daemon.tenant("acme").worker_pid == 0
        daemon.text("acme")
        with pytest.raises(ApiRefused) as refused:
            daemon.text("acme")
        assert refused.value.status == 429
        assert daemon.tenant("acme").used.requests == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_two_seconds(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "acme") as daemon:
        stream = daemon.client("acme").chat(MESSAGES, model="synthetic", max_tokens=10_000)
        next(stream)
        assert len(daemon.processes()) == 5
        started = time.monotonic()
        daemon.signal(number)
        assert daemon.wait() == 0
        assert time.monotonic() - started < 2
        assert daemon.processes() == []
        with pytest.raises((ApiRefused, ResourceBroken, OSError)):
            list(stream)
        left = {path.name for path in (tmp_path / "run").iterdir()}
        assert left <= {"seedanced.lock", "engine"}
        assert not (tmp_path / "http.sock").exists()


def test_the_control_socket_ends_it_too(tmp_path: Path) -> None:
    with running(tmp_path, "acme") as daemon:
        assert daemon.ask(control.Stop()) == control.Stopping(daemon.pid)
        assert daemon.wait() == 0
        assert daemon.processes() == []


def test_with_the_supervisor_killed_nobody_stays(tmp_path: Path) -> None:
    with running(tmp_path, "acme") as daemon:
        daemon.text("acme")
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: daemon.processes() == [], 10)
        daemon.start()  # what it left behind is no obstacle
        assert daemon.text("acme")


def test_on_epoll_it_is_the_same_daemon(tmp_path: Path) -> None:
    with running(tmp_path, "acme", io="epoll") as daemon:
        assert daemon.text("acme")
        assert daemon.status().gateway.driver == "epoll"
        assert daemon.tenant("acme").driver == "epoll"


def test_the_first_ready_prints_three_commands_that_work(tmp_path: Path) -> None:
    with running(tmp_path, "acme") as daemon:
        wait_until(lambda: "infer" in daemon.log.read_text())
        log = daemon.log.read_text()
        assert "curl -N http://127.0.0.1:" in log
        assert "seedancectl" in log
        assert "ready after" in log


def test_an_engine_whose_part_of_a_gpu_nothing_keeps_does_not_run(tmp_path: Path) -> None:
    directory = tmp_path / "mps"
    part = {"device": "0", "threads": "50%", "mps_directory": str(directory)}
    with contextlib.ExitStack() as stack:
        with control_daemon(directory):
            daemon = stack.enter_context(running(tmp_path / "d", "acme", tables={"engine.gpu": part}))
            assert daemon.text("acme")
            assert "engine.gpu" not in daemon.status().limits_off
            assert gather(str(daemon.config)).mps_error == ""
        daemon.kill(daemon.child("engine host").pid)
        wait_until(lambda: "engine.gpu.threads" in daemon.status().engine.detail)
        status = daemon.status()
        assert status.engine.state == "dead"
        assert f"CUDA_MPS_PIPE_DIRECTORY={directory} nvidia-cuda-mps-control -d`" in status.engine.detail
        assert status.limits_off["engine.gpu"] == gather(str(daemon.config)).mps_error
        assert status.limits_off["engine.gpu"] in status.engine.detail
        with control_daemon(directory):
            wait_until(lambda: _answers(daemon, "acme"))
            daemon.stop()
