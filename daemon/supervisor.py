"""The supervisor: the daemon's main process. It owns configuration, listening sockets and processes, and parses nothing
that came from the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from seedance import __version__
from seedance.daemon import config as configuration
from seedance.daemon import control, sockets
from seedance.daemon.config import Config
from seedance.daemon.notify import notify, watchdog_interval_s
from seedance.daemon.process import adopt_orphans, age_s
from seedance.daemon.processes import Options, Processes
from seedance.daemon.secret import load_secret
from seedance.daemon.tenants import Changes, TenantTable
from seedance.errors import ConfigError
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

_NOT_APPLIED: Final = "checked, but not applied by this version"


class Supervisor:
    """The daemon; `run` is its life. Construct it in the event loop that runs it."""

    def __init__(
        self,
        config: Config,
        listeners: sockets.Listeners,
        options: Options,
        ready: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        """`ready(model, listeners)` is called when the daemon first can serve.

        Raises ConfigError or OSError when the tenants' folder or the state folder cannot be used.
        """
        self._config = config
        self._listeners = listeners
        self._tell_ready = ready
        self._loop = asyncio.get_running_loop()
        self._tenants = TenantTable(Path(config.paths.tenants), config.classes)
        self._log_changes(self._tenants.reload())
        secret = load_secret(Path(config.paths.state) / "secret")
        self._processes = Processes(config, options, listeners, self._tenants, secret, self._changed)
        self._announced = False
        self._stop = asyncio.Event()

    # life

    async def run(self) -> None:
        """Serve until a signal or the control socket says stop; then end everything. Raises KernelError, OSError."""
        adopt_orphans()
        path = Path(self._config.paths.run) / control.SOCKET_NAME
        server = control.ControlServer(sockets.listen_unix(str(path), 0o600), self._answer)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload_asked)
        try:
            await server.start()
            self._processes.start()
            self._watchdog()
            await self._stop.wait()
        finally:
            _log.info("stopping")
            notify(STOPPING=1)
            await self._processes.stop()
            await server.close()

    def _watchdog(self) -> None:
        interval_s = watchdog_interval_s()
        if interval_s is not None:
            notify(WATCHDOG=1)
            self._loop.call_later(interval_s, self._watchdog)

    def _changed(self) -> None:
        """Tell the service manager how things are, and the first time that all is well, whoever waits for it."""
        engine = self._processes.engine
        notify(STATUS=f"engine {engine.state}: {engine.detail}".removesuffix(": ").replace("\n", " "))
        ready = self._processes.serves and self._processes.gateway_is_ready
        if self._announced or not ready or engine.model is None:
            return
        self._announced = True
        notify(READY=1)
        names = self._listeners.names
        _log.info("ready after %.2f s: model '%s' on %s", age_s(), engine.model.name, ", ".join(names))
        if self._tell_ready is not None:
            self._tell_ready(engine.model.name, names)

    # operators

    async def _answer(self, request: control.Request) -> control.Reply:
        if isinstance(request, control.GetStatus):
            return await self._status()
        if isinstance(request, control.Stop):
            self._stop.set()
            return control.Stopping(os.getpid())
        try:
            changes = self._reload()
        except ConfigError as exc:
            return control.Failed(str(exc))
        return control.Reloaded(
            added=changes.added,
            changed=changes.changed,
            removed=changes.removed,
            bad_files=self._bad_files(),
            note=self._restart_note(),
        )

    def _restart_note(self) -> str:
        """Say whether the configuration file differs from what is in force: a reload is about tenants only."""
        try:
            if configuration.load(self._config.path) == self._config:
                return ""
        except ConfigError as exc:
            return str(exc)
        return f"'{self._config.path}' has changed; that counts after a restart"

    def _reload_asked(self) -> None:
        try:
            self._reload()
        except ConfigError as exc:
            _log.error("%s", exc)
        note = self._restart_note()
        if note:
            _log.warning("%s", note)

    def _reload(self) -> Changes:
        """Read the tenant files again and tell everybody. Raises ConfigError when there is no folder to read."""
        notify(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        try:
            changes = self._tenants.reload()
            self._log_changes(changes)
            self._processes.tell_tenants()
            for tenant in changes.changed:
                self._processes.workers.quota_changed(self._tenants.quotas[tenant])
            for tenant in changes.removed:
                self._processes.workers.tenant_removed(tenant)
        finally:
            if self._announced:
                notify(READY=1)
        return changes

    def _log_changes(self, changes: Changes) -> None:
        for error in changes.errors:
            _log.error("%s", error)
        _log.info(
            "%d tenants: %d new, %d changed, %d removed; %d bad files",
            len(self._tenants.quotas),
            len(changes.added),
            len(changes.changed),
            len(changes.removed),
            len(changes.errors),
        )

    async def _status(self) -> control.StatusReport:
        await self._processes.survey()
        engine = self._processes.engine
        return control.StatusReport(
            version=__version__,
            pid=os.getpid(),
            uptime_s=age_s(),
            config=self._config.path,
            listeners=self._listeners.names,
            engine=control.EngineReport(
                state=engine.state,
                detail=engine.detail,
                model=engine.model,
                statistics=self._processes.engine_statistics,
            ),
            gateway=self._processes.gateway_report,
            processes=[
                control.ProcessStatus(name=child.name, pid=child.pid, restarts=child.restarts)
                for child in self._processes.children
            ],
            tenants=[self._tenant_status(quota) for quota in self._tenants.quotas.values()],
            bad_files=self._bad_files(),
            limits_off=self._limits_off(),
        )

    def _tenant_status(self, quota: Quota) -> control.TenantStatus:
        worker = self._processes.workers.current.get(quota.tenant)
        return control.TenantStatus(
            quota=quota,
            mark=self._tenants.mark(quota.tenant),
            worker_pid=worker.pid if worker is not None else 0,
            driver=worker.driver if worker is not None else "",
            connections=self._processes.workers.connections(quota.tenant),
            used=self._processes.workers.used.get(quota.tenant, LimiterStatistics()),
            io=worker.io if worker is not None else None,
        )

    def _bad_files(self) -> list[control.BadFile]:
        return [
            control.BadFile(path=exc.path, key=exc.key, reason=exc.reason, kept=self._tenants.is_kept(exc))
            for exc in self._tenants.errors
        ]

    def _limits_off(self) -> dict[str, str]:
        off = dict.fromkeys(("cpu", "memory", "network", "gpu"), _NOT_APPLIED)
        if any(quota.group for quota in self._tenants.quotas.values()):
            off["group"] = "every tenant has a worker of its own in this version"
        if self._processes.marks_off:
            off["network marks"] = self._processes.marks_off
        return off
