"""The supervisor's children and all that is said to them: engine host, zygote, gateway, and through these the workers.

Each can die without the others: listening sockets and handover links are held in this process, workers outlive the
zygote, and a new engine host gets a new channel to every worker. A child that comes back is told everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from seedance.daemon import control
from seedance.daemon.children import Child, Reaper, Survey
from seedance.daemon.config import Config
from seedance.daemon.engine_limits import EngineLimits
from seedance.daemon.links import (
    GATEWAY_ORDERS,
    GATEWAY_REPORTS,
    ZYGOTE_ORDERS,
    ZYGOTE_REPORTS,
    EngineStatus,
    Exited,
    GatewayOrder,
    GatewayReady,
    GatewaySettings,
    GatewayStatistics,
    Preload,
    Preloaded,
    Query,
    Spawned,
    SpawnFailed,
    StopAccepting,
    Tenants,
    WorkerFailed,
    WorkerSettings,
    ZygoteOrder,
    ZygoteReady,
)
from seedance.daemon.log_store import LogStore
from seedance.daemon.model_loads import FILE_NAME, ModelLoads, ServedModel
from seedance.daemon.notify import Watchdog
from seedance.daemon.privileges import find_account
from seedance.daemon.process import Start
from seedance.daemon.secret import cache_salt, session_key
from seedance.daemon.sockets import Listeners
from seedance.daemon.tenants import TenantTable
from seedance.daemon.workers import Workers
from seedance.engine import channel, vllm_control
from seedance.engine.adapter import EngineState, EngineStatistics
from seedance.engine.host_link import (
    FROM_HOST,
    TO_HOST,
    EngineChanged,
    LoadChanged,
    QueryStatistics,
    StartEngine,
    Statistics,
    ToHost,
)
from seedance.engine.model_load import LoadOrder
from seedance.engine.request import TenantContext
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineDead, KernelError
from seedance.qos.kernel import KernelLimits
from seedance.qos.limiter import LimiterSnapshot
from seedance.qos.quota import Quota
from seedance.qos.usage import TenantUsage

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1 << 20
"""Of all tenants, and of each: the unit grants a process so many descriptors."""
MAX_GREETING: Final = 1024
MAX_WAITING: Final = 1024

_CHILD_GRACE_S: Final = 1.0
_ENGINE_GRACE_S: Final = 5.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon was started: what is not in its configuration file."""

    log_level: str = "info"
    test_echo: bool = False


class Processes:
    """All processes but this one. `changed` is called when the engine or the gateway has changed its state.

    `engine` is what the engine host last said; `gateway_report` what the gateway did, with `marks_off` the reason why
    sockets are not marked, or "". `engine_limits` is what the tenants may use of the engine. `loads` is which model is
    served, and the change to another one.
    """

    def __init__(
        self,
        config: Config,
        options: Options,
        listeners: Listeners,
        tenants: TenantTable,
        kernel: KernelLimits,
        secret: bytes,
        logs: LogStore,
        changed: Callable[[], None],
    ) -> None:
        self.engine = EngineChanged(EngineState.STARTING, "", None)
        self.engine_statistics: EngineStatistics | None = None
        self.gateway_report = control.GatewayReport(driver="")
        self.gateway_is_ready = False
        self.marks_off = ""
        self._config = config
        self._options = options
        self._listeners = listeners
        self._tenants = tenants
        self._kernel = kernel
        self.engine_limits = EngineLimits(tenants.row)
        self.engine_limits.set_quotas(tenants.quotas)
        self._secret = secret
        self._changed = changed
        self._preloaded_dirs: set[str] = set()
        self._preloading = 0
        self._zygote_is_ready = False
        served = ServedModel(config.engine, Path(config.paths.state) / FILE_NAME)
        self.loads = ModelLoads(served, self.to_host, self._preload_folder, changed)
        user = config.daemon.user if os.geteuid() == 0 else ""
        self._account = find_account(user, config.path) if user else None
        self._oom_kills: dict[str, int] = {}
        for tenant in set(logs.tenants) - set(tenants.quotas):
            logs.drop(tenant)
        # Tenants that need a worker as soon as there is a zygote: those that have sessions from before.
        self._wanted = {tenant for tenant in logs.tenants if logs.sessions(tenant)}
        self._query = 0
        self._survey = Survey()
        self._watchdog: Watchdog | None = None
        self._reaper = Reaper(asyncio.get_running_loop())
        self.workers = Workers(self, self._reaper, logs)
        host, zygote, gateway = (
            ["seedance.daemon." + name, *Start(options.log_level, config.daemon.user).arguments()]
            for name in ("engine_host", "zygote", "gateway")
        )
        self._host = Child("engine host", host, self._reaper, self._host_told, self._host_started, self._host_ended)
        self._zygote = Child(
            "zygote", zygote, self._reaper, self._zygote_told, self._zygote_started, self._zygote_ended
        )
        self._gateway = Child(
            "gateway", gateway, self._reaper, self._gateway_told, self._gateway_started, self._gateway_ended
        )
        self.children = (self._gateway, self._zygote, self._host)

    def start(self) -> None:
        """Start all children. Raises OSError."""
        for child in self.children:
            child.start()

    async def stop(self) -> None:
        """End everything, in the order in which requests flow; returns when no process is left."""
        if self._gateway.is_running:
            self.to_gateway(StopAccepting())
        self._gateway.let_end()
        await asyncio.gather(self.workers.stop(self._config.daemon.drain_s), self._gateway.wait_gone(_CHILD_GRACE_S))
        await asyncio.gather(
            self._gateway.stop(_CHILD_GRACE_S), self._zygote.stop(_CHILD_GRACE_S), self._host.stop(_ENGINE_GRACE_S)
        )
        self._reaper.reap()
        self._reaper.close()

    async def survey(self) -> None:
        """Ask all processes how they are; `gateway_report`, `engine_statistics` and `workers` then know."""
        self.engine_statistics = None
        for name in self._ask_children():
            self._survey.ask(name)
        self.workers.query(self._survey)
        await self._survey.wait()

    def _ask_children(self) -> list[str]:
        """Send a question to each child that answers questions; returns their names."""
        asked = []
        if self.gateway_is_ready:
            self.to_gateway(Query())
            asked.append(self._gateway.name)
        if self._host.is_linked and self.engine.state == EngineState.READY:
            self._query += 1
            self.to_host(QueryStatistics(self._query))
            asked.append(self._host.name)
        return asked

    def check_progress(self, now: float, watchdog: Watchdog) -> bool:
        """Ask the children for a sign of life, and kill who owes one for too long; returns whether nobody does.

        The zygote is not asked while it loads a tokenizer, which may take long.
        """
        self._watchdog = watchdog
        late = watchdog.late(now)
        for child in self.children:
            if child.name in late:
                _log.error("%s does not answer, killing it", child.name)
                child.kill()
        for name in self._ask_children():
            watchdog.asked(name, now)
        if self._zygote_is_ready and not self._preloading:
            self.to_zygote(Query())
            watchdog.asked(self._zygote.name, now)
        return watchdog.feed(now)

    def _answered(self, child: Child) -> None:
        self._survey.answered(child.name)
        if self._watchdog is not None:
            self._watchdog.answered(child.name)

    def _gone(self, child: Child) -> None:
        if self._watchdog is not None:
            self._watchdog.gone(child.name)

    def tell_tenants(self) -> None:
        """Tell the gateway who is a tenant and by which keys, and the engine what each may use of it."""
        self.engine_limits.set_quotas(self._tenants.quotas)
        for entries, last in self._tenants.pieces():
            self.to_gateway(Tenants(entries, last))

    # what the processes are told (`workers.Neighbours`)

    def to_gateway(self, order: GatewayOrder, *fds: int) -> None:
        """See `workers.Neighbours`."""
        self._gateway.send(GATEWAY_ORDERS.encode(order), fds)

    def to_zygote(self, order: ZygoteOrder, *fds: int) -> None:
        """See `workers.Neighbours`."""
        self._zygote.send(ZYGOTE_ORDERS.encode(order), fds)

    def to_host(self, order: ToHost, *fds: int) -> None:
        """See `workers.Neighbours`."""
        self._host.send(TO_HOST.encode(order), fds)

    def worker_wanted(self, tenant: str) -> None:
        """See `workers.Neighbours`."""
        quota = self._tenants.quotas.get(tenant)
        if quota is None:
            self.to_gateway(WorkerFailed(tenant, "it is no tenant any more"))
        elif self._zygote.is_linked:
            self.workers.wanted(quota)
        else:
            self._wanted.add(tenant)

    def place_worker(self, pid: int, tenant: str) -> None:
        """See `workers.Neighbours`."""
        self._kernel.place(pid, f"tenants/{tenant}")
        self._oom_kills[tenant] = self._oom_kills_of(tenant)

    def tenant_left(self, tenant: str) -> None:
        """See `workers.Neighbours`."""
        if tenant not in self._tenants.quotas:
            self._oom_kills.pop(tenant, None)
            self._kernel.tenant_gone(tenant)

    def exit_cause(self, tenant: str, status: int) -> str:
        """See `workers.Neighbours`."""
        if status != -signal.SIGKILL:
            return ""
        kills = self._oom_kills_of(tenant)
        before, self._oom_kills[tenant] = self._oom_kills.get(tenant, kills), kills
        return ", as it was over its limit 'memory.max'" if kills > before else ""

    def _oom_kills_of(self, tenant: str) -> int:
        try:
            return self._kernel.oom_kills(tenant)
        except KernelError as exc:
            _log.warning("%s, ignoring", exc)
            return 0

    def usage(self) -> dict[str, TenantUsage]:
        """Return what the tenants use, as far as the kernel tells."""
        try:
            return self._kernel.usage()
        except KernelError as exc:
            _log.warning("%s, ignoring", exc)
            return {}

    def tenant_context(self, quota: Quota) -> TenantContext:
        """See `workers.Neighbours`."""
        salt = cache_salt(self._secret, quota.tenant)
        row = self.engine_limits.row(quota.tenant)
        return TenantContext(name=quota.tenant, scheduling_class=quota.scheduling_class, cache_salt=salt, row=row)

    def worker_settings(self, quota: Quota, limiter: LimiterSnapshot | None) -> WorkerSettings:
        """See `workers.Neighbours`."""
        return WorkerSettings(
            quota=quota,
            worker=self._config.worker,
            http=self._config.http,
            log_level=self._options.log_level,
            session_key=session_key(self._secret, quota.tenant),
            engine=channel.EngineChanged(self.engine.state, self.engine.detail, self.engine.model),
            limiter=limiter,
            test_echo=self._options.test_echo,
        )

    # the engine host

    def _host_started(self) -> None:
        self.engine = EngineChanged(EngineState.STARTING, "", None)
        self._place(self._host, "engine")
        self.to_host(StartEngine(self._engine_settings()), self.engine_limits.ledger.fd)
        self.workers.host_started(self._tenants.quotas)

    def _engine_settings(self) -> EngineSettings:
        run_dir, cache_dir = (
            self._engine_folder(where) for where in (self._config.paths.run, self._config.paths.state)
        )
        return msgspec.structs.replace(self.loads.served.settings, run_dir=run_dir, cache_dir=cache_dir)

    def load_model(self, order: LoadOrder) -> None:
        """Begin to load another model. Raises EngineError saying why not."""
        self.loads.begin(order, self._engine_settings(), is_serving=self.serves)

    def _engine_folder(self, folder: str) -> str:
        """Make a folder that is the engine's own; returns its path."""
        path = os.path.join(folder, "engine")
        os.makedirs(path, mode=0o700, exist_ok=True)
        account = self._account
        if account is not None and os.stat(path).st_uid != account.uid:
            try:
                os.chown(path, account.uid, account.gid)
            except OSError as exc:  # the unit gives us no CAP_CHOWN, and makes the usual folders itself
                _log.error(
                    "cannot give '%s' to user '%s': %s; do so, or the engine cannot start",
                    path,
                    account.name,
                    exc.strerror,
                )
        return path

    def _host_ended(self, how: str) -> None:
        self._gone(self._host)
        self.loads.host_ended(how)
        self.engine = EngineChanged(EngineState.DEAD, f"the engine host {how}", None)
        self._tell_engine()

    def _host_told(self, data: bytes, fds: list[int]) -> None:
        _close_all(fds)
        message = FROM_HOST.decode(data)
        if isinstance(message, EngineChanged):
            self.engine = message
            if message.model is not None:
                self._preload()
            self._tell_engine()
        elif isinstance(message, Statistics):
            self.engine_statistics = message.engine
            self._answered(self._host)
        elif isinstance(message, LoadChanged):
            self.loads.host_told(message)
        else:
            _log.debug("engine channel %d closed: %s", message.channel, message.reason)

    @property
    def serves(self) -> bool:
        """Whether requests are served: the engine is ready, and its tokenizer is there for new workers."""
        model = self.engine.model
        if model is None or self.engine.state != EngineState.READY:
            return False
        return model.tokenizer_dir in self._preloaded_dirs

    def _tell_engine(self) -> None:
        self.to_gateway(self._engine_status())
        self._changed()

    def _engine_status(self) -> EngineStatus:
        is_early = self.engine.state == EngineState.READY and not self.serves
        return EngineStatus(EngineState.STARTING if is_early else self.engine.state)

    def _place(self, child: Child, group: str) -> None:
        """Put a child that has just been started into its group, before it is told to do anything."""
        try:
            self._kernel.place(child.pid, group)
        except KernelError as exc:
            _log.error("%s stays in the supervisor's group: %s", child.name, exc)

    # the zygote and the workers

    def _zygote_started(self) -> None:
        self._preloaded_dirs.clear()
        self._preloading = 0
        self._preload()
        self.loads.zygote_started()
        wanted, self._wanted = self._wanted, set()
        for tenant in wanted:
            self.worker_wanted(tenant)

    def _zygote_ended(self, _: str) -> None:
        self._gone(self._zygote)
        self._zygote_is_ready = False
        self.workers.zygote_ended()

    def _preload_folder(self, tokenizer_dir: str) -> None:
        self._preloading += 1
        self.to_zygote(Preload(tokenizer_dir))

    def _preload(self) -> None:
        """Have the zygote load the model's tokenizer: when there is a model, and when there is a new zygote.

        That takes seconds with a large vocabulary; a model on this disk needs not wait for the engine.
        """
        if self.engine.model is not None:
            self._preload_folder(self.engine.model.tokenizer_dir)
        elif self.loads.served.settings.kind == "vllm":
            with contextlib.suppress(EngineDead):
                directory = vllm_control.local_model(self.loads.served.settings.model)
                if directory is not None:
                    self._preload_folder(str(directory))

    def _zygote_told(self, data: bytes, fds: list[int]) -> None:
        message = ZYGOTE_REPORTS.decode(data)
        if isinstance(message, Spawned) and len(fds) == 1:
            self.workers.spawned(message, fds[0])
            return
        _close_all(fds)
        if isinstance(message, Exited):
            self.workers.exited(message)
        elif isinstance(message, SpawnFailed):
            self.workers.spawn_failed(message)
        elif isinstance(message, ZygoteReady):
            self._zygote_is_ready = True
            self._answered(self._zygote)
        elif isinstance(message, Preloaded):
            self._preloading -= 1
            if not message.reason:
                self._preloaded_dirs.add(message.tokenizer_dir)
                self._tell_engine()
            self.loads.preloaded(message.tokenizer_dir, message.reason)

    # the gateway

    def _gateway_started(self) -> None:
        self._place(self._gateway, "gateway")
        config = self._config
        settings = GatewaySettings(
            listeners=self._listeners.names,
            io=config.worker.io,
            head_timeout_s=config.http.head_timeout_s,
            keep_alive_s=config.http.idle_timeout_s,
            max_head_bytes=config.worker.max_head_bytes,
            max_connections=MAX_CONNECTIONS,
            max_greeting=MAX_GREETING,
            max_waiting=MAX_WAITING,
        )
        self.to_gateway(settings, *(sock.fileno() for sock in self._listeners.sockets))
        self.tell_tenants()
        self.to_gateway(self._engine_status())
        self.workers.gateway_started()

    def _gateway_ended(self, _: str) -> None:
        self._gone(self._gateway)
        self.gateway_is_ready = False

    def _gateway_told(self, data: bytes, fds: list[int]) -> None:
        _close_all(fds)
        message = GATEWAY_REPORTS.decode(data)
        if isinstance(message, GatewayReady):
            self.gateway_is_ready = True
            self.gateway_report = control.GatewayReport(driver=message.driver)
            self.marks_off = message.marks_off
            self._kernel.marks_are_off(message.marks_off)
            if message.marks_off:
                _log.warning("network marks are off (%s): no network limit can be applied, ignoring", message.marks_off)
            self._changed()
        elif isinstance(message, GatewayStatistics):
            counted = msgspec.structs.asdict(message)
            self.gateway_report = control.GatewayReport(driver=self.gateway_report.driver, **counted)
            self._answered(self._gateway)
        else:
            self.worker_wanted(message.tenant)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
