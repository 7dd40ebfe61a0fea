"""Stand-ins for the adapters of hosts, one after the other, with a fork server below them that has no vLLM."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
KEEPER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class Family:
    """Stand-ins for adapters' processes, one after the other, with a fork server below them; pidfds tell who ended."""

    def __init__(self, address: Path, *keeper: str, identity: str = "me") -> None:
        """`keeper` is a command that starts the first adapter."""
        self.address = address
        self._identity = identity
        self.adapter = self._start("first", *keeper)
        self._fds: dict[int, int] = {}

    def _command(self, which: str) -> list[str]:
        return [sys.executable, "-m", "support.vllm_zygote", which, str(self.address), self._identity]

    def _start(self, which: str, *before: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, *self._command(which)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> dict[str, Any]:
        assert self.adapter.stdout is not None
        said = json.loads(self.adapter.stdout.readline())
        assert isinstance(said, dict)
        return said

    def tell(self, line: str) -> dict[str, Any]:
        assert self.adapter.stdin is not None
        self.adapter.stdin.write(line + "\n")
        self.adapter.stdin.flush()
        return self.said()

    def end_adapter(self) -> None:
        self.adapter.kill()
        self.adapter.communicate()

    def next_adapter(self) -> dict[str, Any]:
        """Start the adapter of the next host; returns what the fork server has told it."""
        self.adapter = self._start("next")
        left: dict[str, Any] = self.said()["left"]
        return left

    def intruder(self) -> object:
        """Return what the fork server tells an adapter that comes while there is one."""
        done = subprocess.run(
            self._command("next"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return json.loads(done.stdout)["left"]

    def watch(self, *pids: int) -> None:
        for pid in pids:
            self._fds[pid] = os.pidfd_open(pid)

    def ended(self, pid: int) -> bool:
        """Wait until `pid` has ended, at most LIMIT_S."""
        return bool(select.select([self._fds[pid]], [], [], LIMIT_S)[0])

    def signal(self, pid: int, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._fds[pid], number)

    def running(self, pid: int) -> bool:
        return not select.select([self._fds[pid]], [], [], 0)[0]

    def launch(self, number: int = 1) -> tuple[int, int]:
        """Have a core forked; returns the fork server's process and its."""
        said = self.tell(f"launch {number}")
        zygote, core = said["zygote"], said["Launched"]
        self.watch(zygote, core)
        return zygote, core

    def close(self) -> None:
        for fd in self._fds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.end_adapter()
