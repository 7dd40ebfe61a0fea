"""The supervisor: the daemon's main process. It owns configuration, listening sockets and processes, and parses nothing
that came from the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from seedance import __version__
from seedance.daemon import config as configuration
from seedance.daemon import control, sockets
from seedance.daemon.config import Config
from seedance.daemon.log_store import LogStore
from seedance.daemon.notify import Watchdog, notify, status_text, watchdog_interval_s
from seedance.daemon.privileges import find_group
from seedance.daemon.process import adopt_orphans, age_s
from seedance.daemon.processes import Options, Processes
from seedance.daemon.secret import load_secret
from seedance.daemon.tenants import Changes, TenantTable
from seedance.daemon.watch import FolderWatch
from seedance.errors import ConfigError, EngineError, KernelError
from seedance.qos.gpu import mps_error
from seedance.qos.kernel import KernelLimits
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.machine import NetworkSide
from seedance.qos.quota import Quota
from seedance.qos.usage import TenantUsage

_log = logging.getLogger(__name__)

_DEVICES_S: Final = 0.1


class Supervisor:
    """The daemon; `run` is its life. Construct it in the event loop that runs it."""

    def __init__(
        self,
        config: Config,
        kernel: KernelLimits,
        listeners: sockets.Listeners,
        options: Options,
        logs: LogStore,
        ready: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        """`logs` are the sessions from before. `ready(model, listeners)` is called when the daemon first can serve.

        Raises ConfigError or OSError when the tenants' folder or the state folder cannot be used.
        """
        self._config = config
        self._kernel = kernel
        self._listeners = listeners
        self._tell_ready = ready
        self._loop = asyncio.get_running_loop()
        self._tenants = TenantTable(Path(config.paths.tenants), config.classes, kernel)
        self._told_errors: list[ConfigError] | None = None
        self._log_changes(self._tenants.reload())
        self._log_limits_off()
        secret = load_secret(Path(config.paths.state) / "secret")
        self._processes = Processes(config, options, listeners, self._tenants, kernel, secret, logs, self._changed)
        self._announced = False
        self._devices_timer: asyncio.TimerHandle | None = None
        self._stop = asyncio.Event()

    # life

    async def run(self) -> None:
        """Serve until a signal or the control socket says stop; then end everything. Raises KernelError, OSError."""
        adopt_orphans()
        path = Path(self._config.paths.run) / control.SOCKET_NAME
        group = find_group(self._config.daemon.group, self._config.path) if self._config.daemon.group else None
        server = control.ControlServer(control.listen(str(path), group), self._answer, group)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload_asked)
        try:
            with contextlib.ExitStack() as stack:
                self._watch(stack)
                await server.start()
                self._processes.start()
                self._start_watchdog()
                await self._stop.wait()
        finally:
            _log.info("stopping")
            notify(STOPPING=1)
            await self._processes.stop()
            await server.close()

    def _watch(self, stack: contextlib.ExitStack) -> None:
        """Take note of changed tenant files and of network devices that come and go."""
        try:
            watch = FolderWatch(self._config.paths.tenants, self._loop, self._reload_asked, suffix=".toml")
        except KernelError as exc:
            _log.warning("%s: changed tenant files count from the next reload, ignoring", exc)
        else:
            stack.callback(watch.close)
        monitor = self._kernel.monitor
        if monitor is not None:
            self._loop.add_reader(monitor.fileno(), self._devices_changed, monitor)
            stack.callback(self._loop.remove_reader, monitor.fileno())

    def _devices_changed(self, monitor: NetworkSide) -> None:
        """Look at the network devices soon, once for all that changes until then."""
        monitor.devices_changed()
        if self._devices_timer is None:
            self._devices_timer = self._loop.call_later(_DEVICES_S, self._update_devices, monitor)

    def _update_devices(self, monitor: NetworkSide) -> None:
        self._devices_timer = None
        before = self._kernel.off
        monitor.update_devices()
        off = self._kernel.off
        for limit in sorted(limit for limit in off if off[limit] != before.get(limit)):
            _log.warning("off: %s: %s", limit, off[limit])
        if off != before:
            self._tell_status()

    def _start_watchdog(self) -> None:
        patience_s = watchdog_interval_s()
        if patience_s is not None:
            self._feed_watchdog(Watchdog(patience_s), patience_s / 2)

    def _feed_watchdog(self, watchdog: Watchdog, interval_s: float) -> None:
        """Tell the service manager that we make progress, while we do: this loop turns, and the children answer."""
        if self._processes.check_progress(self._loop.time(), watchdog):
            notify(WATCHDOG=1)
        self._loop.call_later(interval_s, self._feed_watchdog, watchdog, interval_s)

    def _changed(self) -> None:
        """Tell the service manager how things are, and the first time that all is well, whoever waits for it."""
        engine = self._processes.engine
        self._tell_status()
        ready = self._processes.serves and self._processes.gateway_is_ready
        if self._announced or not ready or engine.model is None:
            return
        self._announced = True
        notify(READY=1)
        names = self._listeners.names
        _log.info("ready after %.2f s: model '%s' on %s", age_s(), engine.model.name, ", ".join(names))
        if self._tell_ready is not None:
            self._tell_ready(engine.model.name, names)

    def _tell_status(self) -> None:
        engine = self._processes.engine
        text = status_text(
            f"engine {engine.state}" + (f": {engine.detail}" if engine.detail else ""),
            tenants=len(self._tenants.quotas),
            connections=self._processes.gateway_report.held,
            bad_files=len(self._tenants.errors),
            off=list(self._kernel.off),
        )
        notify(STATUS=text)

    # operators

    async def _answer(self, request: control.Request) -> control.Reply:
        if isinstance(request, control.GetStatus):
            return await self._status()
        if isinstance(request, control.Stop):
            self._stop.set()
            return control.Stopping(os.getpid())
        if not isinstance(request, control.Reload):
            return self._answer_model(request)
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

    def _answer_model(self, request: control.GetModel | control.LoadModel | control.CancelLoad) -> control.Reply:
        loads, engine = self._processes.loads, self._processes.engine
        try:
            if isinstance(request, control.LoadModel):
                self._processes.load_model(request.order)
            elif isinstance(request, control.CancelLoad):
                loads.cancel()
        except EngineError as exc:
            return control.Failed(str(exc))
        return control.ModelReport(
            model=engine.model,
            state=engine.state,
            source=loads.served.settings.model,
            configured=loads.served.configured.model,
            load=loads.load,
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
            self._tell_status()
        return changes

    def _log_limits_off(self) -> None:
        """Say which limits this machine does not keep; what the operator has switched off goes without saying."""
        if os.geteuid() == 0 and not self._config.daemon.user:
            _log.warning('every process runs as root; [daemon] user names whom they become, e.g. user = "seedance"')
        if self._config.kernel.limits == "off":
            return
        off = self._kernel.off
        for reason in dict.fromkeys(off.values()):
            limits = ", ".join(limit for limit in off if off[limit] == reason)
            _log.warning("off: %s: %s", limits, reason)

    def _log_changes(self, changes: Changes) -> None:
        if not (changes.added or changes.changed or changes.removed) and changes.errors == self._told_errors:
            return  # somebody has told us, and the folder's watch tells it again
        self._told_errors = changes.errors
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
        usage, connections = self._processes.usage(), self._processes.workers.connections()
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
                steps=self._processes.engine_limits.steps(time.monotonic()),
                load=self._processes.loads.shown,
            ),
            gateway=self._processes.gateway_report,
            processes=[
                control.ProcessStatus(name=child.name, pid=child.pid, restarts=child.restarts)
                for child in self._processes.children
            ],
            tenants=[self._tenant_status(quota, usage, connections) for quota in self._tenants.quotas.values()],
            bad_files=self._bad_files(),
            limits_off=self._limits_off(),
            notes=self._kernel.notes,
            limits=self._kernel.attachments(),
            listener_settings=self._listeners.settings(),
        )

    def _tenant_status(
        self, quota: Quota, usage: Mapping[str, TenantUsage], connections: Counter[str]
    ) -> control.TenantStatus:
        worker = self._processes.workers.current.get(quota.tenant)
        return control.TenantStatus(
            quota=quota,
            mark=self._tenants.mark(quota.tenant),
            worker_pid=worker.pid if worker is not None else 0,
            driver=worker.driver if worker is not None else "",
            connections=connections[quota.tenant],
            used=self._processes.workers.used.get(quota.tenant, LimiterStatistics()),
            io=worker.io if worker is not None else None,
            usage=usage.get(quota.tenant),
            enforced=self._kernel.enforced(quota.tenant),
            engine=self._processes.engine_limits.statistics(quota.tenant),
        )

    def _bad_files(self) -> list[control.BadFile]:
        return [
            control.BadFile(path=exc.path, key=exc.key, reason=exc.reason, kept=self._tenants.is_kept(exc))
            for exc in self._tenants.errors
        ]

    def _limits_off(self) -> dict[str, str]:
        off = dict(self._kernel.off)
        if any(quota.group for quota in self._tenants.quotas.values()):
            off["group"] = "every tenant has a worker of its own in this version"
        part = self._config.engine.gpu
        error = mps_error(part.mps_directory) if part.needs_mps else ""
        if error:
            off["engine.gpu"] = error
        if self._processes.marks_off:
            off["network marks"] = self._processes.marks_off
        return off
