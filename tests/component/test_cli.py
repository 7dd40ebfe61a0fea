"""`seedanced` and `seedancectl` as an operator uses them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running

from seedance import __version__
from seedance.daemon.client import ApiRefused, Client


def _run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "160", **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _seedanced(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("seedance.daemon", *arguments)


def _ctl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("seedance.daemon.ctl", "--config", str(folder / "seedanced.toml"), *arguments)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "acme", "globex") as daemon:
        (daemon.folder / "keys.env").write_text(f"SEEDANCE_KEY_ACME={daemon.keys['acme']}\n")
        yield daemon


def test_status_for_people_and_for_programs(daemon: Daemon) -> None:
    daemon.text("acme")
    shown = _ctl(daemon.folder, "status")
    assert shown.returncode == 0, shown.stderr
    assert "ready" in shown.stdout
    row = next(line.split() for line in shown.stdout.splitlines() if line.strip().startswith("acme"))
    assert int(row[2]) == daemon.tenant("acme").worker_pid
    report = json.loads(_ctl(daemon.folder, "status", "--json").stdout)
    assert report["engine"]["state"] == "ready"
    assert [tenant["quota"]["tenant"] for tenant in report["tenants"]] == ["acme", "globex"]


def test_tenants_lists_quotas(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "tenants")
    assert shown.returncode == 0, shown.stderr
    assert next(line for line in shown.stdout.splitlines() if "globex" in line).split()[1:4] == ["silver", "1", "64"]


def test_chat_and_infer_stream_to_the_terminal(daemon: Daemon) -> None:
    for arguments in (("chat", "Hello"), ("infer", "Once upon")):
        shown = _ctl(daemon.folder, *arguments, "--max-tokens", "5")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.strip()
        over_unix = _ctl(
            daemon.folder, *arguments, "--address", f"unix:{daemon.folder}/http.sock", "--key", daemon.keys["globex"]
        )
        assert over_unix.returncode == 0, over_unix.stderr


def test_an_interrupted_chat_ends_quietly_and_its_stream_with_it(daemon: Daemon) -> None:
    argv = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config)]
    with subprocess.Popen(
        [*argv, "chat", "Hello", "--max-tokens", "10000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(20) == 0
        assert rest.decode().endswith(" …\n")
        assert process.stderr.read() == b""


def test_a_talk_goes_on_until_the_input_ends(daemon: Daemon) -> None:
    argv = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config), "chat", "--max-tokens", "3"]
    done = subprocess.run(argv, input="Hello\n\nAgain\n", capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("synthetic; Ctrl-C ends an answer")
    assert done.stdout.count("> ") == 4


def test_without_a_key_the_way_to_one_is_told(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "chat", "Hello", "--tenant", "nobody")
    assert shown.returncode == 1
    assert "seedancectl key new" in shown.stderr


def test_a_new_key_works_at_once_and_the_file_keeps_its_shape(daemon: Daemon) -> None:
    path = daemon.tenant_file("globex")
    path.write_text("# a comment\n" + path.read_text())
    path.chmod(0o640)
    made = _ctl(daemon.folder, "key", "new", "globex")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert Client(daemon.address, key).model() == "synthetic"
    assert daemon.client("globex").model() == "synthetic"
    text = path.read_text()
    assert text.startswith("# a comment\n")
    assert key not in text
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_key_for_a_new_tenant_makes_the_tenant(daemon: Daemon) -> None:
    key = _ctl(daemon.folder, "key", "new", "newcomer").stdout.strip()
    assert Client(daemon.address, key).model() == "synthetic"
    assert daemon.tenant_file("newcomer").stat().st_mode & 0o777 == 0o600
    daemon.tenant_file("newcomer").unlink()
    assert _ctl(daemon.folder, "reload").stdout.splitlines() == ["added: none", "changed: none", "removed: newcomer"]
    with pytest.raises(ApiRefused):
        Client(daemon.address, key).model()


def test_a_key_for_what_is_no_name_is_refused(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "key", "new", "../escape")
    assert shown.returncode == 1
    assert "cannot take '../escape' as a name" in shown.stderr.replace('"', "'")


def test_reload_and_check_name_a_bad_file(daemon: Daemon) -> None:
    bad = daemon.tenant_file("bad")
    bad.write_text('class = "tin"')
    try:
        shown = _ctl(daemon.folder, "reload")
        assert shown.returncode == 1
        assert f"cannot use '{bad}', key 'class'" in shown.stderr
        assert f"bad file: cannot use '{bad}'" in _ctl(daemon.folder, "status").stdout.replace("\n", " ")
        for checked in (_ctl(daemon.folder, "check"), _seedanced("--config", str(daemon.config), "--check-config")):
            assert checked.returncode == 78
            assert str(bad) in checked.stderr
    finally:
        bad.unlink()
    assert _ctl(daemon.folder, "reload").returncode == 0
    assert _ctl(daemon.folder, "check").returncode == 0
    assert _seedanced("--config", str(daemon.config), "--check-config").returncode == 0


def test_a_reload_says_that_the_configuration_itself_needs_a_restart(daemon: Daemon) -> None:
    before = daemon.config.read_text()
    try:
        daemon.config.write_text(before.replace('"127.0.0.1:0"', '"127.0.0.1:1"'))
        shown = _ctl(daemon.folder, "reload")
        assert (shown.returncode, shown.stderr) == (0, f"'{daemon.config}' has changed; that counts after a restart\n")
        daemon.config.write_text(before + "[no.such]\n")
        assert "no" in daemon.reload().note
    finally:
        daemon.config.write_text(before)
    assert daemon.reload().note == ""


def test_a_second_daemon_on_the_same_folder_is_refused(daemon: Daemon) -> None:
    shown = _seedanced("--config", str(daemon.config))
    assert shown.returncode == 78
    assert "another seedanced runs" in shown.stderr
    assert daemon.text("acme")


def test_a_port_in_use_is_told_in_one_line(daemon: Daemon, tmp_path: Path) -> None:
    port = daemon.address.rpartition(":")[2]
    assert _run("seedance.daemon.ctl", "init", str(tmp_path), "--port", port).returncode == 0
    shown = _seedanced("--config", str(tmp_path / "seedanced.toml"))
    assert shown.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in shown.stderr
    assert "choose another address" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_stop_ends_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        assert _ctl(tmp_path, "stop").stdout == f"seedanced, pid {daemon.pid}, is stopping\n"
        assert daemon.wait() == 0
        assert daemon.processes() == []


def test_without_a_daemon_the_question_is_whether_it_runs(tmp_path: Path) -> None:
    assert _run("seedance.daemon.ctl", "init", str(tmp_path), "--port", "1").returncode == 0
    for arguments in (("status",), ("reload",), ("stop",), ("chat", "Hello")):
        shown = _ctl(tmp_path, *arguments)
        assert shown.returncode == 1
        assert shown.stderr.startswith("seedancectl: cannot connect to seedanced at ")
        assert shown.stderr.endswith("is it running?\n")
        assert len(shown.stderr.splitlines()) == 1
    made = _ctl(tmp_path, "key", "new", "acme")
    assert made.returncode == 0
    assert made.stdout.startswith("sk-seed-")
    assert "counts from its next start" in made.stderr


def test_init_writes_what_seedanced_takes(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shown = _run("seedance.daemon.ctl", "init", str(folder), "--engine", "synthetic")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == f"run it with: seedanced --config {folder}/seedanced.toml"
    assert _seedanced("--config", str(folder / "seedanced.toml"), "--check-config").returncode == 0
    again = _run("seedance.daemon.ctl", "init", str(folder), "--engine", "synthetic")
    assert again.stdout.splitlines() == shown.stdout.splitlines()[-1:]
    assert _run("seedance.daemon.ctl", "init", str(folder), "--engine", "vllm").returncode == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nkind = 'synthetic'\n[listen]\ntpc = []\n", "key 'listen.tpc'"),
        ("[engine]\nkind = 'synthetic'\n[paths]\ntenants = 'none'\n", "none'"),
        ("[[", "TOML"),
        (None, "cannot find it"),
    ],
)
def test_a_wrong_configuration_exits_with_78_and_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "seedanced.toml"
    if text is not None:
        path.write_text(text.replace("[paths]", f"[paths]\nrun = '{tmp_path}/run'\nstate = '{tmp_path}/state'"))
    shown = _seedanced("--config", str(path))
    assert shown.returncode == 78, shown.stderr
    assert words in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.stderr


def test_versions() -> None:
    assert _seedanced("--version").stdout == f"seedanced, version {__version__}\n"
    assert _run("seedance.daemon.ctl", "--version").stdout == f"seedancectl, version {__version__}\n"


def test_the_service_manager_is_told_how_it_goes(tmp_path: Path) -> None:
    assert _run("seedance.daemon.ctl", "init", str(tmp_path), "--port", "0").returncode == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        with subprocess.Popen(
            [sys.executable, "-m", "seedance.daemon", "--config", str(tmp_path / "seedanced.toml")],
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "JOURNAL_STREAM": "1:2",
                "WATCHDOG_USEC": "200000",
            },
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as process:
            told = []
            while "READY=1\n" not in told:
                told.append(manager.recv(4096).decode())
            assert "WATCHDOG=1\n" in told
            assert any(text.startswith("STATUS=engine starting") for text in told)
            process.send_signal(signal.SIGHUP)
            while not told[-1].startswith("RELOADING=1\nMONOTONIC_USEC="):
                told.append(manager.recv(4096).decode())
            while told[-1] != "READY=1\n":
                told.append(manager.recv(4096).decode())
            process.send_signal(signal.SIGTERM)
            while told[-1] != "STOPPING=1\n":
                told.append(manager.recv(4096).decode())
            assert process.wait(20) == 0
            assert process.stderr is not None
            log = process.stderr.read().decode().splitlines()
            assert any(line.startswith("<6>seedanced: ready after") for line in log)
