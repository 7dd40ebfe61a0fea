"""The control socket, both ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seedance.daemon.control import (
    MAX_CONNECTIONS,
    CancelLoad,
    ControlServer,
    EngineReport,
    Failed,
    GatewayReport,
    GetModel,
    GetStatus,
    ListenerStatus,
    LoadModel,
    ModelReport,
    Reload,
    Reloaded,
    Reply,
    Request,
    StatusReport,
    Stop,
    Stopping,
    TenantStatus,
    ask,
    listen,
)
from seedance.daemon.sockets import listen_unix
from seedance.engine.model_load import LoadOrder, LoadState
from seedance.errors import KernelError, ResourceBroken
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota
from seedance.qos.usage import TenantUsage

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NOBODY = pwd.getpwnam("nobody")


def _tenant(name: str) -> TenantStatus:
    return TenantStatus(
        quota=Quota(tenant=name),
        mark=1,
        worker_pid=0,
        driver="",
        connections=0,
        used=LimiterStatistics(),
        usage=TenantUsage(cpu_s=1.5),
        enforced={"cpu.max": "50000 100000"},
    )


STATUS = StatusReport(
    version="1",
    pid=2,
    uptime_s=3.0,
    config="/c",
    listeners=["127.0.0.1:80"],
    engine=EngineReport(state="ready", detail="", model=None, statistics=None),
    gateway=GatewayReport(driver="epoll"),
    processes=[],
    tenants=[_tenant("acme"), _tenant("globex")],
    bad_files=[],
    limits_off={},
    notes={"egress": "policed"},
    limits=["eth0: fq"],
    listener_settings=[ListenerStatus(name="127.0.0.1:80", settings={"nodelay": "true"}, off={"congestion": "no"})],
)


MODEL = ModelReport(model=None, state="ready", source="/srv/b", configured="/srv/a")


async def _answer(request: Request) -> Reply:
    match request:
        case Reload():
            return Failed("cannot read the folder")
        case Stop():
            return Stopping(7)
        case GetStatus():
            return STATUS
        case LoadModel():
            return msgspec.structs.replace(MODEL, load=LoadState(order=request.order))
        case GetModel():
            return MODEL
        case CancelLoad():
            return Failed("cannot cancel: no model is being loaded")


@contextlib.contextmanager
def _served(where: str, answer: Any = _answer, group: int | None = None) -> Iterator[None]:
    """Run a server in a thread."""
    server = ControlServer(listen(where, group), answer, group)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        await server.start()
        started.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
    assert not Path(where).exists()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """The path of a server's socket."""
    where = str(tmp_path / "control.sock")
    with _served(where):
        yield where


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(path)
    return sock


def _exchange(path: str, request: str, body: bytes = b"") -> tuple[int, dict[str, str], Any]:
    """Send one request on a connection of its own; return the status, the fields and the JSON of the answer."""
    with _connect(path) as sock:
        with contextlib.suppress(BrokenPipeError):  # what is too long is answered before it is all in
            sock.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
            sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        with sock.makefile("rb") as file:
            head, _, rest = file.read().partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    return int(line.split()[1]), dict(field.split(": ") for field in fields), rest and msgspec.json.decode(rest)


def test_each_request_gets_its_reply(path: str) -> None:
    assert ask(path, Stop()) == Stopping(7)
    assert ask(path, Reload()) == Failed("cannot read the folder")
    assert ask(path, GetStatus()) == STATUS
    assert ask(path, GetModel()) == MODEL
    assert ask(path, CancelLoad()) == Failed("cannot cancel: no model is being loaded")
    order = LoadOrder(path="/srv/c", policy="continue", drain_s=3.0, needs_manifest=True)
    reply = ask(path, LoadModel(order))
    assert isinstance(reply, ModelReport)
    assert reply.load == LoadState(order=order)


def test_a_reload_that_went_well(tmp_path: Path) -> None:
    async def answer(_: Request) -> Reply:
        return Reloaded(added=["acme"], changed=[], removed=[], bad_files=[])

    with _served(str(tmp_path / "s"), answer):
        assert ask(str(tmp_path / "s"), Reload()) == Reloaded(added=["acme"], changed=[], removed=[], bad_files=[])


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        (["/v1/status"], 200, "uptime_s"),
        (["-X", "POST", "/v1/stop"], 200, "pid"),
        (["-d", "", "/v1/stop"], 200, "pid"),
        (["-d", "{}", "/v1/stop"], 200, "pid"),
        (["/v1/tenants/acme"], 200, "enforced"),
        (["/v1/tenants/nobody"], 404, "error"),
    ],
)
def test_curl_speaks_it_too(path: str, arguments: list[str], code: int, key: str) -> None:
    *options, place = arguments
    done = subprocess.run(
        ["curl", "-sS", "--unix-socket", path, "-w", "%{http_code}", *options, f"http://localhost{place}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    body, _, shown = done.stdout.rpartition("\n")
    assert shown == str(code)
    assert key in msgspec.json.decode(body)


def test_tenants_are_a_part_of_the_status(path: str) -> None:
    status, fields, body = _exchange(path, "GET /v1/tenants")
    assert (status, fields["Content-Type"]) == (200, "application/json")
    assert msgspec.convert(body["tenants"], list[TenantStatus]) == STATUS.tenants
    assert msgspec.convert(_exchange(path, "GET /v1/tenants/globex")[2], TenantStatus) == STATUS.tenants[1]
    assert _exchange(path, "GET /v1/tenants?x=1")[0] == 200


@pytest.mark.parametrize(
    ("request_line", "body", "status", "code", "text"),
    [
        ("GET /", b"", 404, "not_found", "cannot find '/'; there are /v1/status, /v1/tenants, /v1/model, "),
        ("GET /v1/tenants/", b"", 404, "not_found", "cannot find '/v1/tenants/'"),
        ("GET /v1/tenants/x", b"", 404, "not_found", "cannot find the tenant 'x'; /v1/tenants lists them"),
        ("GET /v1/stop", b"", 405, "method_not_allowed", "cannot do GET here; use POST"),
        ("DELETE /v1/tenants/acme", b"", 405, "method_not_allowed", "cannot do DELETE here; use GET"),
        ("POST /v1/stop", b'{"now":true}', 400, "invalid_request", "cannot take a body"),
        ("POST /v1/model/load", b"", 400, "invalid_request", "cannot read the body"),
        ("POST /v1/model/load", b'{"path": "/a", "policy": "x"}', 400, "invalid_request", "cannot read the body"),
        ("POST /v1/model/load", b'{"path": "/a", "force": true}', 400, "invalid_request", "cannot read the body"),
        ("POST /v1/stop", b"x" * 70_000, 413, "invalid_request", "cannot"),
        ("GET  /v1/status", b"", 400, "protocol_error", "cannot"),
        ("GET /" + "x" * 2000, b"", 414, "invalid_request", "cannot"),
        ("POST /v1/reload", b"", 500, "failed", "cannot read the folder"),
    ],
)
def test_what_cannot_be_done_says_why(
    path: str, request_line: str, body: bytes, status: int, code: str, text: str
) -> None:
    found, fields, answer = _exchange(path, request_line, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"].startswith(text)
    assert fields.get("Allow") == ({"G": "POST", "D": "GET, HEAD"}[request_line[0]] if status == 405 else None)
    assert ask(path, Stop()) == Stopping(7)


def test_a_head_request_gets_no_body(path: str) -> None:
    status, fields, body = _exchange(path, "HEAD /v1/status")
    assert (status, body) == (200, b"")
    assert int(fields["Content-Length"]) > 100


def test_a_connection_carries_many_requests_in_order(path: str) -> None:
    one = b"POST /v1/%s HTTP/1.1\r\nHost: x\r\n\r\n"
    with _connect(path) as sock:
        sock.sendall(one % b"stop" * 2 + one % b"nothing")
        sock.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
        with sock.makefile("rb") as file:
            lines = [line.split()[1] for line in file.read().split(b"\n") if line.startswith(b"HTTP/1.1 ")]
    assert lines == [b"200", b"200", b"404", b"200"]


def test_while_an_answer_is_not_taken_no_other_is_made(tmp_path: Path) -> None:
    made = 0

    async def answer(_: Request) -> Reply:
        nonlocal made
        made += 1
        return Failed("cannot " + "x" * 1_000_000)

    with _served(str(tmp_path / "s"), answer), _connect(str(tmp_path / "s")) as sock:
        sock.sendall(b"POST /v1/reload HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert sock.recv(4) == b"HTTP"
        with _connect(str(tmp_path / "s")) as other:  # once it is answered, the first has had its turn
            other.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert other.recv(4) == b"HTTP"
        assert made == 1


def test_a_bug_in_the_daemon_is_an_answer_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: Request) -> Reply:
        raise KeyError("inside")

    with _served(str(tmp_path / "s"), answer):
        assert ask(str(tmp_path / "s"), Reload()) == Failed("cannot answer: seedanced's log says why")
    assert caplog.messages == ["cannot answer POST /v1/reload"]


def test_connections_are_bounded(path: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(_connect(path))
        with pytest.raises(ResourceBroken, match="cannot get an answer"):
            ask(path, Stop())
    for _ in range(1000):  # until the server has seen that they are gone
        with contextlib.suppress(ResourceBroken):
            assert ask(path, Stop()) == Stopping(7)
            return
    pytest.fail("it answers nobody any more")


def test_an_open_connection_does_not_keep_the_server(tmp_path: Path) -> None:
    where = str(tmp_path / "control.sock")
    with contextlib.ExitStack() as stack:
        with _served(where):
            sock = stack.enter_context(_connect(where))
            sock.sendall(b"POST /v1/stop HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1000).endswith(b'{"reply":"stop","pid":7}\n')
        assert sock.recv(1000) == b""


_AS_NOBODY = """
import sys
from seedance.daemon.control import Stop, ask
from seedance.daemon.privileges import Account, become
path, uid, gid, *groups = sys.argv[1:]
ask(path, Stop())  # brings all that is imported late, which the user may not be able to read
become(Account("nobody", int(uid), int(gid), tuple(map(int, groups)), "/"), with_groups=True)
try:
    print(ask(path, Stop()))
except Exception as exc:
    print(exc)
"""


def _asked_as(path: str, uid: int, gid: int, *groups: int) -> str:
    arguments = [path, *map(str, (uid, gid, *groups))]
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def open_path() -> Iterator[str]:
    """A place for a socket that every user can reach: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="seedance-control-") as folder:
        os.chmod(folder, 0o755)
        yield f"{folder}/s"


@needs_root
def test_without_a_group_nobody_but_root_is_answered(open_path: str) -> None:
    uid, gid = NOBODY.pw_uid, NOBODY.pw_gid
    with _served(open_path):
        assert os.stat(open_path).st_mode & 0o777 == 0o600
        assert "Permission denied): may this user?" in _asked_as(open_path, uid, gid)
        os.chmod(open_path, 0o666)  # the second lock
        assert "cannot answer this user" in _asked_as(open_path, uid, gid)
        assert "cannot answer this user" in _asked_as(open_path, uid, 0, 0)  # root's group is not root


@needs_root
def test_members_of_the_group_are_answered(open_path: str) -> None:
    uid, gid, group = NOBODY.pw_uid, NOBODY.pw_gid, 54321
    with _served(open_path, group=group):
        status = os.stat(open_path)
        assert (status.st_mode & 0o777, status.st_gid) == (0o660, group)
        assert "may this user?" in _asked_as(open_path, uid, gid)
        assert _asked_as(open_path, uid, group) == "Stopping(pid=7)"
        assert _asked_as(open_path, uid, gid, 1, group) == "Stopping(pid=7)"
        os.chmod(open_path, 0o666)
        assert "cannot answer this user" in _asked_as(open_path, uid, gid, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give files away")
def test_a_group_that_is_not_ones_own_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="to group 0: Operation not permitted"):
        listen(str(tmp_path / "s"), 0)
    assert not (tmp_path / "s").exists()


def test_where_nobody_listens_the_question_is_whether_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ResourceBroken, match="is it running\\?"):
        ask(str(tmp_path / "none"), GetStatus())


def test_an_answer_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    where = str(tmp_path / "sock")
    with listen_unix(where, 0o600) as listener:
        listener.setblocking(True)

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"what?\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ResourceBroken, match="cannot read the answer"):
            ask(where, GetStatus())
        thread.join()
