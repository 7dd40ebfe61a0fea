"""The fork server of a vLLM engine as its adapter sees it: how it is started, spoken to and reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

import seedance
from seedance.engine import vllm_control as control
from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import VllmSettings

_PROGRAM: Final = "seedance.engine.vllm_zygote"
_LOG_TAIL_BYTES: Final = 4096


def environment(settings: VllmSettings, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine's processes: no network of its own accord, logs to stderr."""
    offline = settings.offline or Path(settings.model).expanduser().is_dir()
    forced = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [_import_root(), base.get("PYTHONPATH")])),
        "TMPDIR": str(Path(settings.run_dir) / "tmp"),
        "VLLM_CACHE_ROOT": settings.cache_dir,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(settings.cache_dir) / "torchinductor"),
    }
    if offline:
        forced |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_COLOR": "0", **base, **forced, **settings.gpu.environment()}


def _import_root() -> str:
    return str(Path(seedance.__path__[0]).parent)


class ZygoteProcess:
    """The fork server's process and the control socket to it; `ended` is set once the process is reaped."""

    def __init__(
        self,
        settings: VllmSettings,
        ledger: Ledger,
        log: Path,
        received: Callable[[control.ToAdapter], None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._gone = gone
        self._decode: Callable[[bytes], control.ToAdapter] = msgspec.json.Decoder(control.ToAdapter).decode
        self._listens = False
        self.ended = asyncio.Event()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = ["--control-fd", str(theirs.fileno()), "--ledger-fd", str(ledger.fd)]
        arguments += ["--adapter-pid", str(os.getpid())]
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) - 1)
        arguments += ["--threads", str(threads), *(["--eager"] if settings.enforce_eager is not False else [])]
        try:
            with theirs, log.open("ab") as output:
                self._process = subprocess.Popen(
                    [settings.python, "-P", "-m", _PROGRAM, *arguments],
                    env=environment(settings, os.environ),
                    cwd=settings.run_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[theirs.fileno(), ledger.fd],
                )
        except OSError:
            self._control.close()
            raise
        self._control.setblocking(False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._control.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._exited)

    def send(self, message: control.ToZygote) -> None:
        """Send a message; when the process is gone this does nothing, its end is reported anyway."""
        with contextlib.suppress(OSError):
            self._control.send(msgspec.json.encode(message))

    async def stop(self, grace_s: float) -> None:
        """End the EngineCore, then the process; at once when it does not listen yet, or no longer."""
        self.send(control.Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s if self._listens else 0):
                await self.ended.wait()
        if not self.ended.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # the kernel then ends the EngineCore
            await self.ended.wait()

    def _readable(self) -> None:
        while True:
            try:
                data = self._control.recv(control.MAX_CONTROL_BYTES)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data:
                self._loop.remove_reader(self._control.fileno())
                return
            message = self._decode(data)
            self._listens |= isinstance(message, control.Preloaded)
            self._received(message)

    def _exited(self) -> None:
        self._readable()  # what it said last tells why
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_reader(self._pidfd)
        self._control.close()
        os.close(self._pidfd)
        self._process.wait()
        self.ended.set()
        self._gone()


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything."""
    text = b""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        text = file.read()
    lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "it said nothing")


def exit_text(status: int) -> str:
    """Say how a process ended; `status` is negative for a signal."""
    if status == -signal.SIGKILL:
        return "it was killed by SIGKILL, as the kernel does when memory runs out"
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with status {status}"
