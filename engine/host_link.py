"""The control link between the supervisor and an engine host: its messages, one packet each."""

from __future__ import annotations

from typing import Final

import msgspec

from seedance.engine.adapter import EngineStatistics
from seedance.engine.model_load import LoadOrder, LoadState
from seedance.engine.packets import Codec
from seedance.engine.request import ModelInfo, TenantContext
from seedance.engine.settings import EngineSettings


class StartEngine(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """supervisor → host, with the ledger's descriptor: bring this engine up and keep it up; sent once."""

    settings: EngineSettings


class Attach(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """supervisor → host, with one descriptor: the host's end of a Unix stream socket to a worker of this tenant.

    `channel` is the supervisor's number for it, unique while the channel lives.
    """

    channel: int
    tenant: TenantContext


class Detach(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """supervisor → host: close a channel and end its generations; unknown numbers are ignored."""

    channel: int


class QueryStatistics(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """supervisor → host: answer with Statistics of the same `query` number."""

    query: int


class Stop(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """supervisor → host: end the engine and exit; closing the link means the same."""


class EngineChanged(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """host → supervisor: the engine's state (a value of EngineState), and the model while it is ready."""

    state: str
    detail: str
    model: ModelInfo | None


class ChannelClosed(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """host → supervisor: the worker's end of a channel went away or sent what is no message; not after Detach."""

    channel: int
    reason: str


class ChannelStatistics(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One channel: running generations, what its worker has not taken yet, and counters since it was attached.

    `batches` counts messages with outputs, `sends` the system calls that carried them and everything else.
    """

    channel: int
    tenant: str
    open_streams: int
    backlog_bytes: int
    backlog_tokens: int
    tokens: int
    batches: int
    sends: int


class Statistics(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """host → supervisor: the engine, every channel, and the processor time that the host itself has used.

    `standing_by` engines are warm, for when the active one dies.
    """

    query: int
    engine: EngineStatistics
    channels: list[ChannelStatistics]
    cpu_s: float
    standing_by: int = 0


class LoadModel(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """supervisor → host: serve another model in the place of the one that is served; `load` numbers it.

    `settings` are those of its engine. The host answers with LoadChanged, from the first to a last one.
    """

    load: int
    order: LoadOrder
    settings: EngineSettings


class ModelReady(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """supervisor → host: new workers can have the model of a load that is PREPARING; "" as a reason, or why not."""

    load: int
    reason: str


class CancelLoad(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """supervisor → host: give a load up; one that is switched goes on."""

    load: int


class LoadChanged(msgspec.Struct, tag=23, array_like=True, frozen=True):
    """host → supervisor: how a load goes; with PREPARING `tokenizer_dir` is what new workers will need."""

    load: int
    state: LoadState
    tokenizer_dir: str = ""


ToHost = StartEngine | Attach | Detach | QueryStatistics | Stop | LoadModel | ModelReady | CancelLoad
FromHost = EngineChanged | ChannelClosed | Statistics | LoadChanged

TO_HOST: Final[Codec[ToHost]] = Codec(ToHost)
FROM_HOST: Final[Codec[FromHost]] = Codec(FromHost)
