"""The supervisor's part in a change of the model: what is served, what is kept of it, and who is told what when.

    order ─► host: check, start, try ─► PREPARING ─► zygote: load the tokenizer ─► host: switch ─► kept in a file

A load changes nothing here until the host has switched. From then on the new model is what a new engine host is told
to start, and what the next start of the service finds, as long as the configuration names what it named then: an
operator who writes another model there means that one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from seedance.daemon.files import replace_file
from seedance.engine.host_link import CancelLoad, LoadChanged, LoadModel, ModelReady, ToHost
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineError

_log = logging.getLogger(__name__)

FILE_NAME: Final = "model.json"


class _Kept(msgspec.Struct, kw_only=True):
    """The file: what the configuration named when a model was loaded in its place, and what is served since."""

    configured_kind: str
    configured_model: str
    configured_name: str
    model: str
    name: str


class ServedModel:
    """Which engine is to be started: the configuration's, or one with the model that was loaded in its place."""

    def __init__(self, configured: EngineSettings, path: Path) -> None:
        """`path` is where a loaded model is kept; what it says counts while it fits the configuration."""
        self.configured = configured
        self.settings = configured
        self._path = path
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as exc:
            _log.warning("cannot use '%s': %s; serving what the configuration names, ignoring", path, exc)
            return
        if (kept.configured_kind, kept.configured_model, kept.configured_name) != _identity(configured):
            _log.info("the configuration names another model than when '%s' was loaded, so that counts", kept.model)
        elif not os.path.isdir(kept.model):
            _log.warning(
                "cannot find '%s', which was loaded; serving what the configuration names, ignoring", kept.model
            )
        else:
            _log.info("serving '%s', which was loaded in the place of what the configuration names", kept.model)
            self.settings = with_model(configured, kept.model, kept.name)

    def replace(self, settings: EngineSettings) -> None:
        """Serve this from now on, also after the next start; raises nothing, as it is served already."""
        self.settings = settings
        kind, model, name = _identity(self.configured)
        kept = _Kept(
            configured_kind=kind,
            configured_model=model,
            configured_name=name,
            model=settings.model,
            name=settings.name,
        )
        try:
            if _identity(settings) == _identity(self.configured):
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(kept) + b"\n")
        except OSError as exc:
            text = "cannot keep in '%s' that '%s' is served: %s; the next start serves what the configuration names"
            _log.error(text, self._path, settings.model, exc.strerror)


def _identity(settings: EngineSettings) -> tuple[str, str, str]:
    return settings.kind, settings.model, settings.name


def with_model(settings: EngineSettings, model: str, name: str = "") -> EngineSettings:
    """Return the settings of an engine with another model, under its name or another one."""
    return msgspec.structs.replace(settings, model=model, name=name or settings.name)


class ModelLoads:
    """The loads of models, one at a time; `load` is how the last one goes, None before the first.

    `to_host` sends to the engine host, `preload` has the zygote load a tokenizer, which `preloaded` answers, and
    `changed` is called when there is something new to show.
    """

    def __init__(
        self,
        served: ServedModel,
        to_host: Callable[[ToHost], None],
        preload: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.served = served
        self.load: LoadState | None = None
        self._to_host = to_host
        self._preload = preload
        self._changed = changed
        self._number = 0
        self._settings = served.settings
        self._wanted_dir: str | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a load is under way."""
        return self.load is not None and not self.load.phase.is_last

    @property
    def shown(self) -> LoadState | None:
        """Return what of the last load belongs into an overview: that it goes on, or has failed."""
        return self.load if self.is_busy or (self.load and self.load.phase is LoadPhase.FAILED) else None

    def begin(self, order: LoadOrder, run: EngineSettings, *, is_serving: bool) -> None:
        """Begin a load; `run` are the settings with which the engine was started. Raises EngineError saying why not."""
        if self.load is not None and self.is_busy:
            left = f", which {self.load.streams:,} streams still use the old one of" if self.load.is_switched else ""
            text = f"cannot load a second model at once: '{self.load.order.path}' is being loaded{left}; wait or cancel"
            raise EngineError("invalid_request", text)
        if not order.path.startswith("/"):
            raise EngineError("invalid_request", f"cannot load '{order.path}': give the whole path of a directory")
        if not is_serving:
            text = "cannot load a model beside one that is not served; write it into the configuration and restart"
            raise EngineError("engine_unavailable", text)
        self._number += 1
        self._settings = with_model(self.served.settings, os.path.normpath(order.path), order.name)
        self._wanted_dir = None
        self.load = LoadState(order=order)
        _log.info("loading '%s', policy %s", order.path, order.policy)
        engine = with_model(run, self._settings.model, self._settings.name)
        self._to_host(LoadModel(self._number, order, engine))

    def cancel(self) -> None:
        """Give up the load. Raises EngineError when there is none, or it is too late."""
        if self.load is None or not self.is_busy:
            raise EngineError("invalid_request", "cannot cancel: no model is being loaded")
        if self.load.is_switched:
            text = f"cannot cancel: '{self.load.order.path}' is served already; load the old one to go back"
            raise EngineError("invalid_request", text)
        self._to_host(CancelLoad(self._number))

    def host_told(self, message: LoadChanged) -> None:
        """Take the host's news of a load."""
        if message.load != self._number or self.load is None or not self.is_busy:
            return
        before, self.load = self.load, message.state
        if message.state.is_switched and not before.is_switched:
            self.served.replace(self._settings)
            pause_s = message.state.pause_s or 0.0
            _log.info("'%s' is served; new requests waited %.3f s at most", self._settings.model, pause_s)
        if message.state.phase is LoadPhase.FAILED:
            _log.error("cannot serve '%s', the old model goes on: %s", message.state.order.path, message.state.reason)
        if message.state.phase is LoadPhase.PREPARING and before.phase is not LoadPhase.PREPARING:
            self._wanted_dir = message.tokenizer_dir
            self._preload(message.tokenizer_dir)
        if message.state.phase is not before.phase:
            self._changed()

    def preloaded(self, tokenizer_dir: str, reason: str) -> None:
        """Take the zygote's news that it has loaded a tokenizer, or why it cannot."""
        if tokenizer_dir == self._wanted_dir:
            self._wanted_dir = None
            self._to_host(ModelReady(self._number, reason))

    def zygote_started(self) -> None:
        """Ask a new zygote for what the last one was to load."""
        if self._wanted_dir is not None:
            self._preload(self._wanted_dir)

    def host_ended(self, how: str) -> None:
        """Take the end of the engine host, and with it of a load: the next host is told what is served now."""
        self._wanted_dir = None
        if self.load is not None and self.is_busy:
            served = self.load.is_switched
            phase = LoadPhase.SERVED if served else LoadPhase.FAILED
            reason = "" if served else f"the engine host {how}"
            self.load = msgspec.structs.replace(self.load, phase=phase, reason=reason, streams=0)
