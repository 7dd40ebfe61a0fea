"""What the supervisor tells an engine host about the engine to run; it travels in the message that starts it."""

from __future__ import annotations

from typing import Literal

import msgspec

from seedance.engine.model_load import Place
from seedance.qos.gpu import GpuPart


class SyntheticSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the synthetic engine behaves.

    `tokens_per_s` is the pace of each stream, 0 for as fast as the processor can; `prompt_tokens_per_s` is what the
    whole engine reads, 0 for at once. `step_s` sets a longest common step: several tokens of a stream then come
    together. `eos_probability` is the chance of the end-of-text token at each place. `kv_blocks` counts blocks of 16
    tokens. `die_after_steps` rehearses an engine's death, 0 for never. `tokenizer_dir` is a model's directory, whose
    tokenizer reads prompts and tells what the tokens say; "" for the engine's own.
    """

    seed: int = 0
    tokens_per_s: float = 50.0
    prompt_tokens_per_s: float = 20_000.0
    step_s: float = 0.0
    eos_probability: float = 0.0
    kv_blocks: int = 65_536
    die_after_steps: int = 0
    tokenizer_dir: str = ""


class FailoverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How generations survive the death of their engine.

    They wait while it is started again. `standby` keeps a second engine up, warm and idle, which goes on at once, and
    takes as much memory again. When `attempts` starts in a row have failed, what waits is given up; with `cpu_python`,
    the interpreter of an environment with vLLM's CPU build, an engine on the processor goes on, until the other is up
    again. `cpu_kv_bytes` is reserved there, 0 for 1 GiB. `gpu_memory` is the part of the GPU's memory that may be in
    use before something is done, None for any.
    """

    standby: bool = False
    attempts: int = 3
    cpu_python: str = ""
    cpu_kv_bytes: int = 0
    gpu_memory: float | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: which adapter, which model under which public name, and how much of the machine it takes.

    `max_model_len` 0 takes the model's own; `kv_bytes` is reserved at start. 0 for `kv_bytes` or `threads`, or None for
    `enforce_eager`, leaves the choice to the adapter. `model` is a local directory, or a hub's
    name; empty for the synthetic engine. `run_dir` holds the engine's own sockets and files, private to one host;
    `cache_dir` is for what it keeps between starts, empty for its default. `queue` bounds the requests of all tenants
    that wait for their first token, 0 for no bound. `step_target_s` is how long a step that reads prompts may take
    while several tenants are there. `trace_bytes` of a trace of them are kept in `cache_dir`, 0 for
    none. `offline` forbids it to ask a hub. `gpu` is the part of a GPU that it may have. `python` is the interpreter of
    the engine's processes, empty for ours. `load` says where the engine of a model that is loaded later comes up.
    """

    kind: Literal["vllm", "synthetic"]
    name: str
    model: str = ""
    run_dir: str = ""
    max_model_len: int = 0
    max_streams: int = 256
    queue: int = 0
    step_target_s: float = 0.03
    trace_bytes: int = 0
    kv_bytes: int = 0
    threads: int = 0
    enforce_eager: bool | None = None
    dtype: str = "auto"
    cache_dir: str = ""
    offline: bool = False
    python: str = ""
    gpu: GpuPart = GpuPart()
    load: Place = "auto"
    failover: FailoverSettings = FailoverSettings()
    synthetic: SyntheticSettings = SyntheticSettings()
