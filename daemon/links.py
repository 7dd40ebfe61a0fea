"""Every message between the processes of the daemon, one union per link and direction.

    supervisor ─ gateway      GatewayOrder  →   ← GatewayReport
    supervisor ─ zygote       ZygoteOrder   →   ← ZygoteReport
    supervisor ─ worker       WorkerOrder   →   ← WorkerReport      (the worker's `control`)
    gateway    ─ worker       ToWorker      →   ← ToGateway         (the worker's `handover`)

Each link is a Unix SOCK_SEQPACKET pair made by the supervisor: one message a packet, msgpack, file descriptors beside
it where a message says so. A link that closes ends the process at its lower end: the supervisor's children exit with
it, and a worker whose handover link closes finishes what it has and exits. (The links to the engine host are in
`engine.host_link` and `engine.channel`.)
"""

from __future__ import annotations

from typing import Final

import msgspec

from seedance.daemon.config import HttpConfig, WorkerConfig
from seedance.daemon.ring.driver import DriverStatistics
from seedance.engine.adapter import EngineState
from seedance.engine.channel import EngineChanged
from seedance.engine.packets import Codec
from seedance.qos.limiter import LimiterSnapshot, LimiterStatistics
from seedance.qos.quota import Quota

LAST_WORDS_S: Final = 0.3

KEYS_PER_MESSAGE: Final = 512
"""Tenants and keys go to the gateway in pieces, so that no packet meets the limit of `net.core.wmem_max`."""


# gateway ─ worker


MAX_HANDOVER_BYTES: Final = 96 << 10
"""How much may have been read of a connection that is handed over: it must fit into one packet with the rest."""


class Handover(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """gateway → worker, with the connection's descriptor: a connection of this tenant, and the bytes already read.

    `data` begins with the first byte of the request whose key decided the tenant; at most MAX_HANDOVER_BYTES.
    `listener` is the name of the listener it came in on, `peer` the client's address as text ("" on a Unix socket).
    """

    peer: str
    listener: str
    data: bytes


class HandBack(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """worker → gateway, with the descriptor: this connection has shown another tenant's key, or none, in `data`.

    `data` begins with that request's first byte, and all earlier responses have been sent. Where more than
    MAX_HANDOVER_BYTES have been read already, the worker closes the connection instead. Counts as released.
    """

    peer: str
    listener: str
    data: bytes


class Released(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """worker → gateway: `count` connections that were handed over have been closed since the last such message.

    Sent at least once per turn of the loop in which a connection closed: the gateway counts connections by it, for
    the tenant's limit and for its own.
    """

    count: int


class Taken(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """worker → gateway: the oldest connection that was handed over and not yet taken is this worker's from now on.

    Said before anything of the connection is looked at: what a worker that ends has not taken, another one may serve.
    """


ToWorker = Handover
ToGateway = HandBack | Released | Taken


# supervisor ─ worker


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker is told at its birth.

    `engine` is the engine's state at that moment, so that the first request need not wait for the channel to tell.
    `session_key` is the tenant's own, for resume tokens, and never changes. `limiter` is the snapshot that the tenant's
    last worker left, or None. `test_echo` opens the echo route of the
    WebSocket conformance suite and is never set by an operator's configuration.
    """

    quota: Quota
    worker: WorkerConfig
    http: HttpConfig
    log_level: str
    session_key: bytes
    engine: EngineChanged = EngineChanged(EngineState.STARTING, "", None)
    limiter: LimiterSnapshot | None = None
    test_echo: bool = False


class QuotaChanged(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """supervisor → worker: the tenant's quota from now on; streams that run go on."""

    quota: Quota


class Query(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """supervisor → worker, gateway: report your statistics now; → zygote: say that you are there."""


class Drain(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """supervisor → worker: take no new request, end what runs within `deadline_s`, and exit.

    What runs even then ends with an error, for which the worker takes another LAST_WORDS_S.
    """

    deadline_s: float


class EngineChannel(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """supervisor → worker, with a descriptor: a fresh engine channel (`engine.channel`), as the last one has broken."""


class WorkerReady(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """worker → supervisor: connections are being served; `driver` is what moves the bytes."""

    driver: str


class WorkerIdle(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """worker → supervisor: no connection for the idle time. The supervisor has the handover link closed."""


class WorkerStatistics(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """worker → supervisor: the answer to `Query`: connections open now, the limiter's counters, the driver's."""

    connections: int
    used: LimiterStatistics
    io: DriverStatistics


class LimiterState(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """worker → supervisor: what the tenant has used of its limits, kept for its next worker.

    Sent once a second while it changes, and before the worker exits.
    """

    snapshot: LimiterSnapshot


WorkerOrder = QuotaChanged | Query | Drain | EngineChannel
WorkerReport = WorkerReady | WorkerIdle | WorkerStatistics | LimiterState


# supervisor ─ gateway


class GatewaySettings(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """supervisor → gateway, first of all, with the listening sockets in the order of `listeners`."""

    listeners: list[str]
    io: str
    head_timeout_s: float
    keep_alive_s: float
    max_head_bytes: int
    max_connections: int
    max_greeting: int
    max_waiting: int


class TenantEntry(msgspec.Struct, array_like=True, frozen=True):
    """A tenant as the gateway knows it: `mark` goes into SO_MARK; `connections` is its limit, None for no limit."""

    name: str
    mark: int
    connections: int | None
    keys: list[str]


class Tenants(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """supervisor → gateway: a piece of the list of tenants; the list replaces the former one when `last` is set."""

    entries: list[TenantEntry]
    last: bool


class EngineStatus(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """supervisor → gateway: the engine's state, for /healthz; one of `adapter.EngineState`."""

    state: str


class WorkerAttached(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """supervisor → gateway, with the gateway's end of a handover link: the answer to `WorkerWanted`, or unasked.

    Question and answer may cross: the second copy of a link to the same `worker`, a number, is to be thrown away.
    """

    tenant: str
    worker: int


class WorkerDetached(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """supervisor → gateway: close the link to this tenant's worker; the next connection gets a new one."""

    tenant: str


class WorkerFailed(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """supervisor → gateway: no worker can be had for this tenant now; who waits for it is refused."""

    tenant: str
    reason: str


class StopAccepting(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """supervisor → gateway: accept no more and exit."""


class GatewayReady(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """gateway → supervisor: accepting. `marks_off` says why sockets are not marked, "" when they are."""

    driver: str
    marks_off: str


class WorkerWanted(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """gateway → supervisor: a connection waits for this tenant's worker."""

    tenant: str


class GatewayStatistics(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """gateway → supervisor: the answer to `Query`: two counters, and the connections in each of their stages.

    `greeting` have not shown a key yet, `waiting` wait for a worker, `held` are the workers'.
    """

    accepted: int
    refused: int
    greeting: int
    waiting: int
    held: int


GatewayOrder = (
    GatewaySettings | Query | Tenants | EngineStatus | WorkerAttached | WorkerDetached | WorkerFailed | StopAccepting
)
GatewayReport = GatewayReady | WorkerWanted | GatewayStatistics


# supervisor ─ zygote


class Spawn(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """supervisor → zygote, with four descriptors (handover, engine channel, control, journal): fork a worker."""

    worker: int
    settings: WorkerSettings


class Preload(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """supervisor → zygote: load a model's tokenizer, so that the workers to come share it; "" is the synthetic one."""

    tokenizer_dir: str


class ZygoteReady(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """zygote → supervisor: everything a worker needs is imported; and the answer to `Query`."""


class Spawned(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """zygote → supervisor, with a pidfd: worker number `worker` lives."""

    worker: int
    pid: int


class Exited(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """zygote → supervisor: a worker has ended; `status` is negative for a signal, as in `subprocess`."""

    worker: int
    status: int


class SpawnFailed(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """zygote → supervisor: the worker could not be forked."""

    worker: int
    reason: str


class Preloaded(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """zygote → supervisor: the answer to `Preload`; a reason when it cannot be done."""

    tokenizer_dir: str
    reason: str = ""


ZygoteOrder = Spawn | Query | Preload
ZygoteReport = ZygoteReady | Spawned | Exited | SpawnFailed | Preloaded

TO_WORKER: Final[Codec[ToWorker]] = Codec(ToWorker)
TO_GATEWAY: Final[Codec[ToGateway]] = Codec(ToGateway)
WORKER_ORDERS: Final[Codec[WorkerOrder]] = Codec(WorkerOrder)
WORKER_REPORTS: Final[Codec[WorkerReport]] = Codec(WorkerReport)
GATEWAY_ORDERS: Final[Codec[GatewayOrder]] = Codec(GatewayOrder)
GATEWAY_REPORTS: Final[Codec[GatewayReport]] = Codec(GatewayReport)
ZYGOTE_ORDERS: Final[Codec[ZygoteOrder]] = Codec(ZygoteOrder)
ZYGOTE_REPORTS: Final[Codec[ZygoteReport]] = Codec(ZygoteReport)
