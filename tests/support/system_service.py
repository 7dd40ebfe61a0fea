"""seedanced as an administrator has it: installed, under systemd, with its files in /etc/seedance."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from seedance.daemon.keys import hash_key, new_key

UNIT: Final = "seedanced.service"
CONFIG: Final = Path("/etc/seedance/seedanced.toml")
TENANTS: Final = Path("/etc/seedance/tenants.d")
STATE: Final = Path("/var/lib/seedance")
CGROUP: Final = Path("/sys/fs/cgroup/seedance.slice/seedanced.service")
PINS: Final = Path("/sys/fs/bpf/seedance")
PORT: Final = 8000
TIMEOUT_S: Final = 300.0
"""For a start, a stop, an answer: under emulation a Python process takes seconds to start."""

# Table → key → value; JSON's literals are TOML's.
_TABLES: Final[dict[str, dict[str, Any]]] = {
    "listen": {"tcp": [f"0.0.0.0:{PORT}"]},
    "engine": {"kind": "synthetic"},
    "engine.synthetic": {"tokens_per_s": 100},
    "daemon": {"user": "seedance", "group": "seedance-admin"},
}


def command(*words: str, check: bool = True) -> str:
    """Run a command and return its output. Raises AssertionError with all that it wrote when it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def systemctl(*words: str, check: bool = True) -> str:
    """Run systemctl; a start that fails also shows the unit's journal."""
    try:
        return command("systemctl", *words, check=check)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{command('journalctl', '-b', '-u', UNIT, '-n', '60', '--no-pager')}") from None


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> float:
    """Wait until a condition holds; return the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


class Service:
    """The installed service and its files; `keys` are those of its tenants."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def configure(self, tables: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write the configuration; `tables` say what differs from the usual."""
        tables = tables or {}
        lines = []
        for name in dict.fromkeys((*_TABLES, *tables)):
            lines.append(f"[{name}]")
            values = {**_TABLES.get(name, {}), **tables.get(name, {})}
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        CONFIG.write_text("\n".join([*lines, ""]))

    def add_tenant(self, name: str, limits: str = "") -> str:
        """Write a tenant's file, by way of a rename as editors do, and return the tenant's key."""
        key = self.keys.setdefault(name, new_key())
        scratch = TENANTS / f".{name}.new"
        scratch.write_text(f'keys = ["{hash_key(key)}"]\n{limits}')
        scratch.chmod(0o600)
        scratch.rename(self.tenant_file(name))
        return key

    def tenant_file(self, name: str) -> Path:
        return TENANTS / f"{name}.toml"

    def start(self) -> float:
        """Start it; return the seconds until it said that it is ready."""
        began = time.monotonic()
        systemctl("start", UNIT)
        return time.monotonic() - began

    def stop(self) -> None:
        systemctl("stop", UNIT)

    def show(self, name: str) -> str:
        """Return a property of the unit."""
        return systemctl("show", UNIT, "--value", "--property", name).strip()

    @property
    def pid(self) -> int:
        """Return the supervisor's process id, 0 when it does not run."""
        return int(self.show("MainPID"))

    def processes(self) -> dict[int, str]:
        """Return the group, relative to the unit's, of each process of the service."""
        found: dict[int, str] = {}
        for path in CGROUP.rglob("cgroup.procs"):
            for line in path.read_text().split():
                found[int(line)] = str(path.parent.relative_to(CGROUP))
        return found

    def journal(self) -> Iterator[dict[str, Any]]:
        """Iterate over the unit's entries of this boot, as journalctl's JSON has them."""
        for line in command("journalctl", "-b", "-u", UNIT, "-o", "json", "--no-pager").splitlines():
            yield json.loads(line)

    def complete(self, tenant: str, address: str = "127.0.0.1", **body: Any) -> dict[str, Any]:
        """Have a completion made, and return the answer's JSON."""
        connection = http.client.HTTPConnection(address, PORT, timeout=TIMEOUT_S)
        try:
            headers = {"Authorization": f"Bearer {self.keys[tenant]}", "Content-Type": "application/json"}
            content = {"model": "synthetic", "prompt": "Hello", "max_tokens": 16, **body}
            connection.request("POST", "/v1/completions", json.dumps(content), headers)
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, f"{response.status}: {text}"
            answer: dict[str, Any] = json.loads(text)
            return answer
        finally:
            connection.close()

    def remove(self) -> None:
        """Stop it, and put its files and folders back to what an installation leaves."""
        systemctl("stop", "seedanced.socket", UNIT, "seedance.slice")
        systemctl("reset-failed", "seedanced.socket", UNIT, check=False)
        for path in TENANTS.iterdir():
            path.unlink()
        shutil.rmtree(STATE, ignore_errors=True)
        self.keys.clear()
