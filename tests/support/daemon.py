"""A real seedanced with all its processes and the synthetic engine, in a folder of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from support.fd_store import FdStore

from seedance.daemon import control
from seedance.daemon.client import Client
from seedance.daemon.keys import hash_key, new_key

TIMEOUT_S = 30.0
DRIVERS = ("io_uring", "epoll")
PART = 5
_MARK = "SEEDANCE_TEST_DAEMON"

# Table → key → value; JSON's literals are TOML's.
_CONFIG: dict[str, dict[str, Any]] = {
    "listen": {"tcp": ["127.0.0.1:0"], "unix": "http.sock"},
    "paths": {"state": "state", "run": "run", "tenants": "tenants.d"},
    "engine": {"kind": "synthetic"},
    "engine.gpu": {},
    "engine.synthetic": {"tokens_per_s": 200},
    "kernel": {"limits": "off"},
    "worker": {},
    "http": {},
}


def _config(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, usual in _CONFIG.items():
        lines.append(f"[{name}]")
        values = {**usual, **tables.get(name, {})}
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items()]
    return "\n".join([*lines, ""])


def part_of(whole: int, driver: str) -> int:
    """Return how often to do what takes many to show: all on the first driver, a part on the other.

    What the drivers have of their own shows in few; the rest is the same code.
    """
    return whole if driver == DRIVERS[0] else whole // PART


class Daemon:
    """The daemon; `keys` are those of its tenants."""

    def __init__(
        self,
        folder: Path,
        *,
        io: str = "auto",
        idle_timeout: str = "5min",
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        store: FdStore | None = None,
    ) -> None:
        """`tables` are tables of the configuration, for what differs from the usual.

        `store` is what a service manager keeps for it, and gives it at each start.
        """
        self._store = store
        self.folder = folder
        self.config = folder / "seedanced.toml"
        self.keys: dict[str, str] = {}
        self.log = folder / "log"
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tenants.d").mkdir()
        tables = dict(tables or {})
        tables["worker"] = {"io": io, "idle_timeout": idle_timeout, **tables.get("worker", {})}
        self.config.write_text(_config(tables))

    def add_tenant(self, name: str, limits: str = "") -> None:
        """Write a tenant's file; a running daemon learns of it by a reload."""
        self.keys.setdefault(name, new_key())
        self.tenant_file(name).write_text(f'keys = ["{hash_key(self.keys[name])}"]\n{limits}')

    def tenant_file(self, name: str) -> Path:
        return self.folder / "tenants.d" / f"{name}.toml"

    def start(self, timeout_s: float = TIMEOUT_S) -> float:
        """Start it, and wait until it says that it is ready; returns the seconds that took.

        `timeout_s` is for each of its steps that it tells of.
        """
        self._address = ""
        started = time.monotonic()
        if self._store is not None:
            self._store.ready.clear()
            with self._store.handed(self._command()) as (command, fds), self.log.open("ab") as log:
                self._spawn(command, self._store.path, log, fds)
            assert self._store.ready.wait(timeout_s)
            return time.monotonic() - started
        path = self.folder / "notify.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications, self.log.open("ab") as log:
            notifications.bind(str(path))
            notifications.settimeout(timeout_s)
            self._spawn(self._command(), path, log)
            while b"READY=1" not in notifications.recv(4096):
                pass
        return time.monotonic() - started

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "seedance.daemon", "--config", str(self.config), "--hints"]

    def _spawn(self, command: list[str], notify: Path, log: IO[bytes], fds: Collection[int] = ()) -> None:
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify), _MARK: self._mark}
        environment.pop("JOURNAL_STREAM", None)
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self, pid: int) -> None:
        """Kill one of its processes, and wait until all that it had is closed."""
        assert pid > 0, "it is not running"
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the main process to end; returns its exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def processes(self) -> list[int]:
        """Return the ids of all living processes that descend from the daemon, the daemon included."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def status(self) -> control.StatusReport:
        reply = self.ask(control.GetStatus())
        assert isinstance(reply, control.StatusReport)
        return reply

    def ask(self, request: control.Request) -> control.Reply:
        return control.ask(str(self.folder / "run" / control.SOCKET_NAME), request)

    def reload(self) -> control.Reloaded:
        reply = self.ask(control.Reload())
        assert isinstance(reply, control.Reloaded)
        return reply

    def tenant(self, name: str) -> control.TenantStatus:
        return next(tenant for tenant in self.status().tenants if tenant.quota.tenant == name)

    def child(self, name: str) -> control.ProcessStatus:
        return next(process for process in self.status().processes if process.name == name)

    @property
    def address(self) -> str:
        """The first address that it listens on, which stays the same until it is started again."""
        if not self._address:
            self._address = self.status().listeners[0]
        return self._address

    def client(self, tenant: str) -> Client:
        return Client(self.address, self.keys[tenant])

    def text(self, tenant: str, tokens: int = 5, content: str = "Hello") -> str:
        """Return what a short chat of this tenant gives."""
        messages = [{"role": "user", "content": content}]
        return "".join(self.client(tenant).chat(messages, model="synthetic", max_tokens=tokens, seed=1))

    def descriptors(self) -> dict[str, int]:
        """Return how many descriptors each process has open, by the name of its command."""
        return {
            Path(f"/proc/{pid}/comm").read_text().strip(): len(os.listdir(f"/proc/{pid}/fd"))
            for pid in self.processes()
        }

    def is_at_rest(self) -> bool:
        """Whether nothing is left of any request: no connection, stream or KV block, no buffer out of its pool."""
        status = self.status()
        engine, gateway = status.engine.statistics, status.gateway
        if engine is None or engine.running or engine.waiting or engine.kv_blocks_used:
            return False
        if gateway.greeting or gateway.waiting or gateway.held:
            return False
        for tenant in status.tenants:
            if tenant.connections or tenant.used.streams:
                return False
            io = tenant.io
            # The one flow is the engine channel.
            if io is not None and (io.flows != 1 or io.buffers_free != io.buffers_total):
                return False
        return True

    def stop(self) -> None:
        """End it as an operator does, and see that nothing of it stays."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0
        assert self.processes() == []
        assert {path.name for path in self.folder.rglob("*") if path.is_socket()} <= {"notify.sock"}

    def close(self) -> None:
        """End whatever is left of it, by force."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(TIMEOUT_S)


class Http:
    """One keep-alive connection, with a key for each request."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)

    def get(self, path: str, key: str | None = None) -> tuple[int, Any]:
        """Return the status and the JSON of the answer."""
        self._connection.request("GET", path, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        response = self._connection.getresponse()
        return response.status, msgspec.json.decode(response.read())

    @property
    def local_port(self) -> int:
        port: int = self._connection.sock.getsockname()[1]
        return port

    def close(self) -> None:
        self._connection.close()


def wait_until(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come true in time"
        time.sleep(0.01)


@contextlib.contextmanager
def running(folder: Path, *tenants: str, **settings: Any) -> Iterator[Daemon]:
    """Run a daemon with these tenants."""
    daemon = Daemon(folder, **settings)
    try:
        for tenant in tenants:
            daemon.add_tenant(tenant)
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@contextlib.contextmanager
def working(folder: Path, limits: Mapping[str, str], **settings: Any) -> Iterator[Daemon]:
    """Run a daemon with tenants of these limits, each with a worker from the start, and stop it in the end."""
    with running(folder, **settings) as daemon:
        for tenant, text in limits.items():
            daemon.add_tenant(tenant, text)
        daemon.reload()
        for tenant in limits:
            daemon.text(tenant)
        yield daemon
        daemon.stop()
