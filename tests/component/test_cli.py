"""`seedanced` and `seedancectl` as an operator uses them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running
from support.model_dir import write_model

from seedance import __version__
from seedance.daemon import ctl, hints
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
    """Run a command as its process would, without the half second that one needs to begin."""
    argv = ["--config", str(folder / "seedanced.toml"), *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = ctl.run(argv)
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())


def _ctl_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("seedance.daemon.ctl", "--config", str(folder / "seedanced.toml"), *arguments)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "acme", "globex") as daemon:
        (daemon.folder / "keys.env").write_text(f"SEEDANCE_KEY_ACME={daemon.keys['acme']}\n")
        yield daemon


def test_status_for_people_and_for_programs(daemon: Daemon) -> None:
    daemon.text("acme")
    shown = _ctl_process(daemon.folder, "status")
    assert shown.returncode == 0, shown.stderr
    assert "ready" in shown.stdout
    row = next(line.split() for line in shown.stdout.splitlines() if line.strip().startswith("acme"))
    assert int(row[2]) == daemon.tenant("acme").worker_pid
    report = json.loads(_ctl(daemon.folder, "status", "--json").stdout)
    assert report["engine"]["state"] == "ready"
    assert [tenant["quota"]["tenant"] for tenant in report["tenants"]] == ["acme", "globex"]


def test_tenant_list_and_show(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "tenant", "list")
    assert shown.returncode == 0, shown.stderr
    assert next(line for line in shown.stdout.splitlines() if "globex" in line).split()[1:4] == ["silver", "1", "64"]
    quotas = json.loads(_ctl(daemon.folder, "tenant", "list", "--json").stdout)
    assert [quota["tenant"] for quota in quotas] == ["acme", "globex"]
    shown = _ctl(daemon.folder, "tenant", "show", "globex")
    assert shown.returncode == 0, shown.stderr
    assert f"file         {daemon.tenant_file('globex')}" in shown.stdout
    assert "limit        tokens.streams = 64" in shown.stdout
    report = json.loads(_ctl(daemon.folder, "tenant", "show", "globex", "--json").stdout)
    assert (report["quota"]["tenant"], report["enforced"]) == ("globex", {})
    unknown = _ctl(daemon.folder, "tenant", "show", "nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("seedancectl: cannot find tenant 'nobody': there is no '")


def test_a_tenant_is_added_and_served_and_removed(daemon: Daemon) -> None:
    path = daemon.tenant_file("newcomer")
    options = ("--class", "bronze", "--cpu", "50%", "--egress", "8Mbit", "--streams", "4", "--context", "512")
    added = _ctl(daemon.folder, "tenant", "add", "newcomer", *options)
    assert added.returncode == 0, added.stderr
    key = added.stdout.strip()
    assert Client(daemon.address, key).model() == "synthetic"
    assert (path.stat().st_mode & 0o777, key in path.read_text()) == (0o600, False)
    quota = daemon.tenant("newcomer").quota
    assert (quota.scheduling_class, quota.cpu.max_cores, quota.network.egress_bytes_per_s) == ("bronze", 0.5, 1_000_000)
    assert (quota.tokens.streams, quota.tokens.context) == (4, 512)

    again = _ctl(daemon.folder, "tenant", "add", "newcomer")
    assert (again.returncode, again.stdout) == (1, "")
    assert "cannot add tenant 'newcomer'" in again.stderr

    unasked = _ctl(daemon.folder, "tenant", "remove", "newcomer")
    assert unasked.returncode == 2
    assert "say --yes" in unasked.stderr
    assert path.exists()

    removed = _ctl(daemon.folder, "tenant", "remove", "newcomer", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert "limit   network.egress = 8Mbit" in removed.stdout
    assert removed.stdout.endswith(f"removed {path}\n")
    assert not path.exists()
    with pytest.raises(ApiRefused):
        Client(daemon.address, key).model()
    gone = _ctl(daemon.folder, "tenant", "remove", "newcomer", "--yes")
    assert (gone.returncode, gone.stdout) == (78, "")
    assert gone.stderr.startswith(f"seedancectl: cannot use '{path}': cannot find it")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--cpu", "50"), 2, "seedancectl: cannot use --cpu: cannot read 50 as a percentage"),
        (("--streams", "many"), 2, "seedancectl: cannot use --streams: "),
        (("--class", "tin"), 2, 'seedancectl: cannot use --class: cannot take "tin"'),
        (("--group", "A B"), 2, "seedancectl: cannot use --group: "),
    ],
)
def test_a_tenant_with_a_wrong_limit_is_not_added(
    daemon: Daemon, options: tuple[str, ...], status: int, words: str
) -> None:
    shown = _ctl(daemon.folder, "tenant", "add", "wrong", *options)
    assert (shown.returncode, shown.stdout) == (status, "")
    assert shown.stderr.startswith(words)
    assert len(shown.stderr.splitlines()) == 1
    assert not daemon.tenant_file("wrong").exists()


def test_a_revoked_key_is_refused_at_once_and_the_others_work_on(daemon: Daemon) -> None:
    path = daemon.tenant_file("globex")
    before = path.read_text()
    made = [_ctl(daemon.folder, "key", "new", "globex").stdout.strip() for _ in range(3)]
    listed = _ctl(daemon.folder, "key", "list", "globex").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["globex"] * 4
    assert _ctl(daemon.folder, "key", "revoke").stdout.splitlines()[-4:] == listed

    revoked = _ctl(daemon.folder, "key", "revoke", made[0])  # the key itself
    assert revoked.returncode == 0, revoked.stderr
    assert revoked.stdout.startswith("revoked a key of tenant 'globex' (sha256:")
    second = listed[2].split()[1][:12]  # the start of a hash, as listed
    assert _ctl(daemon.folder, "key", "revoke", second, "--tenant", "globex").returncode == 0
    for key in made[:2]:
        with pytest.raises(ApiRefused):
            Client(daemon.address, key).model()
    assert Client(daemon.address, made[2]).model() == "synthetic"
    assert daemon.client("globex").model() == "synthetic"

    for wrong in (made[0], second, "abc"):
        shown = _ctl(daemon.folder, "key", "revoke", wrong)
        assert (shown.returncode, shown.stdout) == (1, "")
        assert shown.stderr.startswith("seedancectl: cannot find this key")
    assert _ctl(daemon.folder, "key", "revoke", made[2]).returncode == 0
    assert path.read_text() == before


def test_a_key_in_a_file_that_is_wrong_stays_in_force_and_that_is_told(daemon: Daemon) -> None:
    key = _ctl(daemon.folder, "key", "new", "globex").stdout.strip()
    path = daemon.tenant_file("globex")
    right = path.read_text()
    path.write_text(right + "nonsense = 1\n")
    try:
        shown = _ctl(daemon.folder, "key", "revoke", key)
        assert (shown.returncode, shown.stdout) == (78, "")
        assert "stays in force until the file is right" in shown.stderr
        assert "key 'nonsense'" in shown.stderr
    finally:
        path.write_text(right)
    assert _ctl(daemon.folder, "key", "revoke", key).returncode == 0


def test_limits_show_and_what_is_off(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "limits", "show")
    assert shown.returncode == 0, shown.stderr
    assert "limit off: " in shown.stdout
    report = json.loads(_ctl(daemon.folder, "limits", "show", "acme", "--json").stdout)
    assert report["tenants"] == {"acme": {}}
    assert report["off"] == daemon.status().limits_off
    assert _ctl(daemon.folder, "limits", "show", "nobody").returncode == 1


def test_limits_of_a_running_daemon_are_not_removed(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "limits", "remove")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("seedancectl: cannot remove the limits of a running seedanced; stop it first")


def test_top_sees_tokens_and_processor_time(daemon: Daemon) -> None:
    argv = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config)]
    chat = [*argv, "chat", "Hello", "--max-tokens", "10000"]
    with subprocess.Popen(chat, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        try:
            seen = json.loads(_ctl(daemon.folder, "top", "--once", "--json", "--interval", "0.5").stdout)
            table = _ctl(daemon.folder, "top", "--once", "--interval", "0.5", "--sort", "tokens").stdout
        finally:
            process.kill()
    first = seen["tenants"][0]
    assert (first["tenant"], first["streams"]) == ("acme", 1)
    assert 0.5 <= seen["elapsed_s"] < 10
    assert 20 < first["output_tokens_per_s"] < 400  # the engine makes 200 a second
    assert first["rss_bytes"] > 10_000_000
    assert first["cpu"] > 0
    assert table.splitlines()[1].split()[:3] == ["tenant", "streams", "tokens/s"]
    assert table.splitlines()[2].split()[:2] == ["acme", "1"]


def test_top_draws_until_it_is_interrupted(daemon: Daemon) -> None:
    ours, its = pty.openpty()
    argv = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config), "top", "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "20"}
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=subprocess.PIPE, env=environment) as process:
        os.close(its)
        try:
            drawn = b""
            while drawn.count(b"globex") < 2:
                drawn += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
            os.close(ours)
    assert b"seedanced" in drawn


def test_trace_lists_its_tools(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "trace")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split()[0] == "ack_interval"
    for name in ("ack_interval", "egress_delay", "run_queue"):
        helped = _ctl_process(daemon.folder, "trace", name, "--help")
        assert helped.returncode == 0, helped.stderr
        assert "Usage: seedancectl trace " + name in helped.stdout


def test_doctor_tells_the_truth_about_this_machine(daemon: Daemon) -> None:
    shown = _ctl_process(daemon.folder, "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(shown.stdout)}
    assert shown.returncode == int(any(finding["word"] == "fail" for finding in found.values())), shown.stderr
    assert found["kernel"]["found"] == os.uname().release
    assert str(daemon.pid) in found["seedanced"]["found"]
    assert found["configuration"]["word"] == "ok"
    assert found["model"]["found"] == "the synthetic engine needs none"
    assert (found["io_uring"]["word"] == "ok") == (daemon.status().gateway.driver == "io_uring")
    assert (found["btf"]["word"] == "ok") == Path("/sys/kernel/btf/vmlinux").exists()
    assert (found["systemd"]["word"] == "warn") or Path("/run/systemd/system").exists()
    if os.geteuid() == 0:
        assert (found["fq"]["found"] == "egress is paced") == _takes("fq")
        assert (found["tc"]["word"] == "ok") == _takes("clsact")


def _takes(kind: str) -> bool:
    """Say whether a device in a network namespace of its own takes this qdisc, according to `tc`."""
    script = f"ip link set lo up && tc qdisc add dev lo {'root fq' if kind == 'fq' else kind}"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, check=False)
    return done.returncode == 0


def test_doctor_of_a_configuration_that_is_wrong_fails(tmp_path: Path) -> None:
    (tmp_path / "seedanced.toml").write_text("[engine]\nkind = 'none'\n")
    shown = _ctl_process(tmp_path, "doctor")
    assert shown.returncode == 1
    assert shown.stdout.startswith("fail  configuration")
    assert "key 'engine.kind'" in shown.stdout.splitlines()[0]


def test_a_reader_that_goes_is_no_error(daemon: Daemon) -> None:
    command = f"{sys.executable} -m seedance.daemon.ctl --config {daemon.config} status --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"{", b"")


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
    made = _ctl_process(daemon.folder, "key", "new", "globex")
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
    assert _ctl(daemon.folder, "reload").returncode == 0
    with pytest.raises(ApiRefused):
        Client(daemon.address, key).model()


def test_a_key_for_what_is_no_name_is_refused(daemon: Daemon) -> None:
    shown = _ctl(daemon.folder, "key", "new", "../escape")
    assert shown.returncode == 2
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
    for arguments in (("status",), ("reload",), ("stop",), ("chat", "Hello"), ("top",), ("limits", "show")):
        shown = _ctl(tmp_path, *arguments)
        assert shown.returncode == 1
        assert shown.stderr.startswith("seedancectl: cannot connect to seedanced at ")
        assert shown.stderr.endswith("is it running?\n")
        assert len(shown.stderr.splitlines()) == 1
    made = _ctl(tmp_path, "key", "new", "acme")
    assert made.returncode == 0
    assert made.stdout.startswith("sk-seed-")
    assert "counts from its next start" in made.stderr
    shown = _ctl(tmp_path, "tenant", "show", "acme")
    assert shown.returncode == 0
    assert "limit  cpu.max = 200%" in shown.stdout.replace("limit   ", "limit  ")
    assert "This is what the file says." in shown.stderr
    assert "acme" in _ctl(tmp_path, "tenant", "list").stdout


def test_init_writes_what_seedanced_takes(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shown = _run("seedance.daemon.ctl", "init", str(folder), "--engine", "synthetic")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == f"run it with: {hints.typed('seedanced')} --config {folder}/seedanced.toml"
    assert _seedanced("--config", str(folder / "seedanced.toml"), "--check-config").returncode == 0
    again = _run("seedance.daemon.ctl", "init", str(folder), "--engine", "synthetic")
    assert again.stdout.splitlines() == shown.stdout.splitlines()[-1:]
    assert _run("seedance.daemon.ctl", "init", str(folder), "--engine", "vllm").returncode == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nkind = 'synthetic'\n[listen]\ntpc = []\n", "key 'listen.tpc'"),
        ("[engine]\nkind = 'synthetic'\n[kernel]\nlimits = 'off'\n[paths]\ntenants = 'none'\n", "none'"),
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


def test_a_model_that_is_cut_off_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path = tmp_path / "seedanced.toml"
    path.write_text("[engine]\nmodel = './model'\n[kernel]\nlimits = 'off'\n[paths]\nrun = 'run'\nstate = 'state'\n")
    (tmp_path / "tenants.d").mkdir()
    assert _seedanced("--config", str(path), "--check-config").returncode == 0
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for arguments in ((), ("--check-config",)):
        shown = _seedanced("--config", str(path), *arguments)
        assert shown.returncode == 78
        [line] = shown.stderr.splitlines()
        assert f"cannot use '{weights}': it is cut off" in line


@pytest.mark.parametrize("folder", ["state", "run"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, folder: str) -> None:
    assert _run("seedance.daemon.ctl", "init", str(tmp_path), "--port", "0").returncode == 0
    (tmp_path / folder).write_text("a file in its place")
    shown = _seedanced("--config", str(tmp_path / "seedanced.toml"))
    assert shown.returncode == 1
    last = shown.stderr.splitlines()[-1]
    assert "error   seedanced: cannot " in last
    assert str(tmp_path / folder) in last


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--confg", "x"), "no such option '--confg'"),
        (("x",), "got unexpected extra argument (x)"),
        (("--log-level", "loud"), "'loud' is not one of 'debug'"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    shown = _seedanced(*arguments)
    assert shown.returncode == 2
    assert shown.stdout == ""
    [line] = shown.stderr.splitlines()
    assert line.startswith("seedanced: cannot understand the command line: ")
    assert told in line
    assert line.endswith("; see `seedanced --help`")


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
            assert any(" info    seedanced: ready after " in line for line in log)  # that is no journal
