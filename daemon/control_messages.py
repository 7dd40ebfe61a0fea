"""What is asked over the control socket, and what is answered."""

from __future__ import annotations

import msgspec

from seedance.daemon.network import ListenerStatus
from seedance.daemon.ring.driver import DriverStatistics
from seedance.engine.adapter import EngineStatistics
from seedance.engine.model_load import LoadOrder, LoadState
from seedance.engine.request import ModelInfo
from seedance.engine.scheduling import TenantStatistics
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota
from seedance.qos.usage import TenantUsage


class GetStatus(msgspec.Struct, tag="status", tag_field="request", frozen=True):
    """Ask how the daemon is."""


class Reload(msgspec.Struct, tag="reload", tag_field="request", frozen=True):
    """Have the tenant files read again."""


class Stop(msgspec.Struct, tag="stop", tag_field="request", frozen=True):
    """Have the daemon end; answered before it does."""


class GetModel(msgspec.Struct, tag="model", tag_field="request", frozen=True):
    """Ask which model is served, and how a load goes."""


class LoadModel(msgspec.Struct, tag="model load", tag_field="request", frozen=True):
    """Have another model served; answered when that has begun."""

    order: LoadOrder


class CancelLoad(msgspec.Struct, tag="model cancel", tag_field="request", frozen=True):
    """Have a load that is under way given up, which leaves the old model; not once new requests go to the new one."""


Request = GetStatus | Reload | Stop | GetModel | LoadModel | CancelLoad


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A child of the supervisor; `pid` is 0 while it is down."""

    name: str
    pid: int
    restarts: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of the engine since its start, as it writes them into the ledger; its host need not answer.

    `beat_age_s` is the time since its last sign of life, of which an idle engine gives one a second. `count` steps took
    `total_s` together; `histogram[n]` of them took less than 2^n microseconds, and no less than half of that.
    """

    beat_age_s: float
    count: int
    total_s: float
    histogram: list[int]

    def within_s(self, share: float) -> float:
        """Return a time that this share of the steps took no longer than: the next power of two, in microseconds."""
        rank, seen = share * sum(self.histogram), 0
        for place, here in enumerate(self.histogram):
            seen += here
            if here and seen >= rank:
                return float(2**place) / 1e6
        return 0.0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine: its state, what it serves, and what it counts; None where the host does not answer.

    `steps` is None while it has given no sign of life. `load` is the load of a model that is under way, or failed last.
    """

    state: str
    detail: str
    model: ModelInfo | None
    statistics: EngineStatistics | None
    steps: StepReport | None = None
    load: LoadState | None = None


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway: what moves its bytes, two counters since its start, and connections by stage."""

    driver: str
    accepted: int = 0
    refused: int = 0
    greeting: int = 0
    waiting: int = 0
    held: int = 0


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant; `worker_pid` is 0 while it has no worker. `used` counts since the daemon's start.

    `io` counts what the worker's driver does; None without a worker that has answered. `usage` is what the kernel has
    counted, None where it counts nothing; `enforced` is what it enforces now, read back from it: its files' and maps'
    values by their names. `engine` is what its scheduler has counted since the engine's start, None before anything.
    """

    quota: Quota
    mark: int
    worker_pid: int
    driver: str
    connections: int
    used: LimiterStatistics
    io: DriverStatistics | None = None
    usage: TenantUsage | None = None
    enforced: dict[str, str] = {}
    engine: TenantStatistics | None = None


class BadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant file that is not in force; `kept` says whether its tenant goes on with an older quota."""

    path: str
    key: str
    reason: str
    kept: bool


class StatusReport(msgspec.Struct, tag="status", tag_field="reply", frozen=True, kw_only=True):
    """How the daemon is.

    `limits_off` maps each kernel limit that is not applied to the reason, `notes` what else an operator should know to
    why. `limits` are lines that say what is attached where; `listener_settings` has an entry for each of `listeners`.
    """

    version: str
    pid: int
    uptime_s: float
    config: str
    listeners: list[str]
    engine: EngineReport
    gateway: GatewayReport
    processes: list[ProcessStatus]
    tenants: list[TenantStatus]
    bad_files: list[BadFile]
    limits_off: dict[str, str]
    notes: dict[str, str] = {}
    limits: list[str] = []
    listener_settings: list[ListenerStatus] = []


class Reloaded(msgspec.Struct, tag="reload", tag_field="reply", frozen=True, kw_only=True):
    """What a reload changed. `note` says what it has not put in force, "" where there is nothing to say."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    bad_files: list[BadFile]
    note: str = ""


class ModelReport(msgspec.Struct, tag="model", tag_field="reply", frozen=True, kw_only=True):
    """What is served: the model while there is one, what the configuration calls it, and what it was loaded from.

    `configured` is what the configuration names; it differs from `source` after a load. `load` is the last load since
    the daemon's start.
    """

    model: ModelInfo | None
    state: str
    source: str
    configured: str
    load: LoadState | None = None


class Stopping(msgspec.Struct, tag="stop", tag_field="reply", frozen=True):
    """The daemon is ending."""

    pid: int


class Failed(msgspec.Struct, tag="failed", tag_field="reply", frozen=True):
    """The request could not be met; `message` is for people."""

    message: str


Reply = StatusReport | Reloaded | ModelReport | Stopping | Failed
