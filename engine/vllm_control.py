"""Settings of a vLLM engine, and what its adapter and its processes tell each other beside the engine's own sockets.

The messages go as JSON over a Unix SEQPACKET socket, which the adapter makes and the fork server inherits; the
EngineCores that it forks write to the same end. They are few: one exchange per start, and news of an end.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Final

import msgspec

from seedance.engine.request import ModelInfo
from seedance.engine.vllm_sampling import ModelFacts
from seedance.errors import EngineDead
from seedance.qos.gpu import GpuPart

MAX_CONTROL_BYTES: Final = 1 << 16
STATISTICS: Final = "seedance_statistics"
SHRINK: Final = "seedance_shrink"
SURVEY: Final = "seedance_survey"
RELOAD: Final = "seedance_reload"
CREDENTIALS: Final = struct.Struct("3i")
"""SO_PEERCRED of a Unix socket: process, user, group."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to run one vLLM engine.

    `model` is a directory or a hub name, `name` what clients call it. `kv_bytes` is reserved at start; 0 is 1 GiB on a
    CPU, and on a GPU what vLLM leaves of its memory for it. `max_model_len` None takes the model's own. `run_dir` gets
    the sockets, the log and temporary files; its path must be short, since a socket's may have 107 bytes. `cache_dir`
    is for what vLLM keeps between starts; empty means a folder in `run_dir`. `enforce_eager` compiles nothing: the
    start is quick, and a GPU slower; None does so on a CPU. `threads` counts OpenMP threads of the CPU build; 0 leaves
    one processor to the rest of the machine. `offline` forbids hub calls; a local model makes none anyway. `gpu` is the
    part of a GPU that it may have. `step_target_s` is the token scheduler's; `plain_scheduler` is for comparisons:
    vLLM's own, which knows no tenants.
    """

    model: str
    name: str
    run_dir: str
    kv_bytes: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    step_target_s: float = 0.03
    threads: int = 0
    enforce_eager: bool | None = None
    dtype: str = "auto"
    python: str = sys.executable
    cache_dir: str = ""
    offline: bool = False
    gpu: GpuPart = GpuPart()
    start_timeout_s: float = 600.0
    plain_scheduler: bool = False


class Launch(msgspec.Struct, tag="launch", frozen=True):
    """adapter → zygote: fork an EngineCore that connects to these addresses, beside those that run.

    Launches are numbered from 1, and news of an EngineCore carries its number. `engine_row` is its place in the ledger.
    """

    launch: int
    settings: VllmSettings
    input_address: str
    output_address: str
    engine_row: int = 0


class Serving(msgspec.Struct, tag="serving", frozen=True):
    """adapter → zygote: what an EngineCore serves, to be told to the adapter of the next host.

    `settings` are those with which one would be launched that serves the same: it may have loaded other weights since.
    """

    launch: int
    model: ModelInfo
    facts: ModelFacts
    figures: str
    settings: VllmSettings


class Reloading(msgspec.Struct, tag="reloading", frozen=True):
    """adapter → zygote: an EngineCore loads other weights; until it serves again the next host has no use for it."""

    launch: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """adapter → zygote: end all EngineCores within seconds, then yourself."""


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """adapter → zygote: end an EngineCore at once; one that has ended is passed over."""

    launch: int


class Preloaded(msgspec.Struct, tag="preloaded", frozen=True):
    """zygote → adapter: vLLM is imported, and laid out as we expect."""

    vllm_version: str
    seconds: float


class Launched(msgspec.Struct, tag="launched", frozen=True):
    """zygote → adapter: the EngineCore's process is there."""

    launch: int
    pid: int


class Resolved(msgspec.Struct, tag="resolved", frozen=True):
    """EngineCore → adapter: what the model turned out to be, before it is loaded."""

    launch: int
    model_dir: str
    facts: ModelFacts


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """zygote or EngineCore → adapter: why it is about to end, in one sentence; launch 0 is the zygote itself."""

    launch: int
    reason: str


class Exited(msgspec.Struct, tag="exited", frozen=True):
    """zygote → adapter: the EngineCore's process has ended; `status` is negative for a signal."""

    launch: int
    pid: int
    status: int


class LeftCore(msgspec.Struct, frozen=True):
    """An EngineCore whose host has died; `serving` is None for one that was not up, or changed its weights."""

    launch: Launch
    pid: int
    serving: Serving | None

    @property
    def engine_row(self) -> int:
        """Its place in the ledger."""
        return self.launch.engine_row


class Left(msgspec.Struct, tag="left", frozen=True):
    """zygote → adapter of the next host, first thing: what it was started with, and what runs.

    `launches` is the number of the last one; `hosts` counts those that it had.
    """

    identity: str
    hosts: int
    launches: int
    cores: list[LeftCore]


class CoreStatistics(msgspec.Struct):
    """What the utility call STATISTICS answers."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_bytes: int
    weight_bytes: int


ToZygote = Launch | Kill | Serving | Reloading | Stop
CoreNews = Launched | Resolved | Failed | Exited
ToAdapter = Preloaded | Left | CoreNews


def local_model(model: str) -> Path | None:
    """Return the directory that `model` names, or None when it is a hub name. Raises EngineDead when it is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        check_model_dir(path)
        return path.resolve()
    if model.startswith(("/", ".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise EngineDead(f"there is no directory '{model}': give a model's directory or a hub name")
    return None


def check_model_dir(path: Path) -> None:
    """Raise EngineDead when a model's directory lacks what the engine or the workers cannot do without."""
    for name, what in (("config.json", "no model that vLLM can load"), ("tokenizer.json", "no tokenizer for workers")):
        if not (path / name).is_file():
            raise EngineDead(f"'{path}' has no {name}, so there is {what}")
