"""The fork server of a vLLM engine as its adapter sees it: how it is started, spoken to and reaped."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
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
from seedance.engine.vllm_control import CREDENTIALS, VllmSettings

_PROGRAM: Final = "seedance.engine.vllm_zygote"
_LOG_TAIL_BYTES: Final = 4096
_ANSWER_S: Final = 60.0  # it may be in the middle of its imports
_KILL_S: Final = 5.0

logger = logging.getLogger(__name__)


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


def identity_of(settings: VllmSettings, ledger: Ledger) -> str:
    """Return what is the same for fork servers that could take each other's place."""
    facts = [seedance.__version__, os.fstat(ledger.fd).st_ino, *_command(settings), environment(settings, {})]
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _command(settings: VllmSettings) -> list[str]:
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    arguments = ["--threads", str(threads), *(["--eager"] if settings.enforce_eager is not False else [])]
    return [settings.python, "-P", "-m", _PROGRAM, *arguments]


class ZygoteProcess:
    """The fork server's process and the control socket to it; `ended` is set once the process has ended."""

    def __init__(
        self,
        control_socket: socket.socket,
        pidfd: int,
        received: Callable[[control.ToAdapter], None],
        gone: Callable[[], None],
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Take over the descriptors; `child` is the process if it is ours to reap."""
        self._loop = asyncio.get_running_loop()
        self._control = control_socket
        self._pidfd = pidfd
        self._received = received
        self._gone = gone
        self._child = child
        self._decode: Callable[[bytes], control.ToAdapter] = msgspec.json.Decoder(control.ToAdapter).decode
        self._listens = child is None
        self.ended = asyncio.Event()
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._exited)

    @classmethod
    def start(
        cls,
        settings: VllmSettings,
        ledger: Ledger,
        address: str,
        log: Path,
        received: Callable[[control.ToAdapter], None],
        gone: Callable[[], None],
    ) -> ZygoteProcess:
        """Start one, which the next host finds at an address. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, listener, log.open("ab") as output:
                listener.bind(address)
                fds = {"--control-fd": theirs.fileno(), "--ledger-fd": ledger.fd, "--listen-fd": listener.fileno()}
                numbers = {**fds, "--adapter-pid": os.getpid(), "--keeper-pid": os.getppid()}
                arguments = [word for name, number in numbers.items() for word in (name, str(number))]
                child = subprocess.Popen(
                    [*_command(settings), *arguments, "--identity", identity_of(settings, ledger)],
                    env=environment(settings, os.environ),
                    cwd=settings.run_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=list(fds.values()),
                )
        except OSError:
            ours.close()
            raise
        return cls(ours, os.pidfd_open(child.pid), received, gone, child)

    @classmethod
    async def take_over(
        cls, address: str, identity: str, received: Callable[[control.ToAdapter], None], gone: Callable[[], None]
    ) -> tuple[ZygoteProcess, control.Left] | None:
        """Return the one that a host left at an address, and what it says of itself; one that is of no use is ended."""
        found = _find(address)
        if found is None:
            return None
        theirs, pidfd = found
        loop = asyncio.get_running_loop()
        left = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                left = msgspec.json.decode(await loop.sock_recv(theirs, control.MAX_CONTROL_BYTES), type=control.Left)
        except (TimeoutError, OSError, msgspec.DecodeError):
            logger.warning("a fork server of an earlier host does not answer")
        except asyncio.CancelledError:
            theirs.close()
            os.close(pidfd)
            raise
        if left is not None and left.identity == identity:
            return cls(theirs, pidfd, received, gone), left
        theirs.close()
        await _kill(pidfd)
        return None

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
        if self._child is not None:
            self._child.wait()
        self.ended.set()
        self._gone()


def _find(address: str) -> tuple[socket.socket, int] | None:
    """Connect to the fork server at an address; returns a pidfd of it, too."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(address)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return connection, os.pidfd_open(CREDENTIALS.unpack(credentials)[0])
    except OSError:
        connection.close()
        return None


async def _kill(pidfd: int) -> None:
    """End a process that is not our child, and wait until it has gone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        async with asyncio.timeout(_KILL_S):
            await ended.wait()
    except TimeoutError:
        logger.warning("a fork server of an earlier host does not end")
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


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
