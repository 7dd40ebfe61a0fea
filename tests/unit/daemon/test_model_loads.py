"""The supervisor's part in a change of the model: who is told what when, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seedance.daemon.model_loads import ModelLoads, ServedModel
from seedance.engine.host_link import CancelLoad, LoadChanged, LoadModel, ModelReady, ToHost
from seedance.engine.model_load import LoadOrder, LoadPhase
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineError

CONFIGURED = EngineSettings(kind="vllm", model="/srv/a", name="a")


class Daemon:
    """The loads of a daemon, and what they told whom."""

    def __init__(self, folder: Path, configured: EngineSettings = CONFIGURED) -> None:
        self.to_host: list[ToHost] = []
        self.preloads: list[str] = []
        self.changes = 0
        self.served = ServedModel(configured, folder / "state" / "model.json")
        self.loads = ModelLoads(self.served, self.to_host.append, self.preloads.append, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def begin(self, path: str, *, is_serving: bool = True, **order: Any) -> None:
        run = msgspec.structs.replace(self.served.settings, run_dir="/run/x")
        self.loads.begin(LoadOrder(path=path, **order), run, is_serving=is_serving)

    def tell(self, phase: LoadPhase, *, load: int | None = None, tokenizer_dir: str = "", **more: Any) -> None:
        assert self.loads.load is not None
        number = max(m.load for m in self.to_host if isinstance(m, LoadModel)) if load is None else load
        state = msgspec.structs.replace(self.loads.load, phase=phase, **more)
        self.loads.host_told(LoadChanged(number, state, tokenizer_dir))


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
    return Daemon(tmp_path)


def load(daemon: Daemon, path: Path, **order: Any) -> None:
    """Load a model as it goes when all is well."""
    daemon.begin(str(path), **order)
    daemon.tell(LoadPhase.PREPARING, tokenizer_dir=str(path))
    daemon.loads.preloaded(str(path), "")
    daemon.tell(LoadPhase.DRAINING, is_switched=True)
    daemon.tell(LoadPhase.SERVED, is_switched=True)


def test_the_host_gets_the_engine_s_settings_with_the_model_and_the_name_that_stays(daemon: Daemon) -> None:
    daemon.begin("/srv/b/../c")
    order = LoadOrder(path="/srv/b/../c")
    engine = EngineSettings(kind="vllm", model="/srv/c", name="a", run_dir="/run/x")
    assert daemon.to_host == [LoadModel(1, order, engine)]
    assert daemon.loads.is_busy
    assert daemon.served.settings == CONFIGURED


def test_nothing_changes_before_the_switch(daemon: Daemon, tmp_path: Path) -> None:
    daemon.begin(str(tmp_path / "b"))
    for phase in (LoadPhase.STARTING, LoadPhase.TRYING):
        daemon.tell(phase)
    assert daemon.served.settings == CONFIGURED
    daemon.tell(LoadPhase.PREPARING, tokenizer_dir="/t")
    daemon.tell(LoadPhase.PREPARING, tokenizer_dir="/t")
    assert daemon.preloads == ["/t"]
    daemon.loads.preloaded("/other", "")
    daemon.loads.preloaded("/t", "it is broken")
    assert daemon.to_host[1:] == [ModelReady(1, "it is broken")]
    daemon.tell(LoadPhase.FAILED, reason="it is broken")
    assert daemon.served.settings == CONFIGURED
    assert not daemon.loads.is_busy
    assert daemon.loads.shown is not None
    assert not (tmp_path / "state").exists()


def test_what_is_loaded_is_served_again_after_a_restart(daemon: Daemon, tmp_path: Path) -> None:
    load(daemon, tmp_path / "b", name="new")
    wanted = msgspec.structs.replace(CONFIGURED, model=str(tmp_path / "b"), name="new")
    assert daemon.served.settings == wanted
    assert daemon.loads.shown is None
    again = Daemon(tmp_path)
    assert again.served.settings == wanted
    assert again.served.configured == CONFIGURED
    load(again, tmp_path / "c")
    assert Daemon(tmp_path).served.settings == msgspec.structs.replace(wanted, model=str(tmp_path / "c"))


def test_another_configuration_counts_for_more(daemon: Daemon, tmp_path: Path) -> None:
    load(daemon, tmp_path / "b")
    other = msgspec.structs.replace(CONFIGURED, model="/srv/other")
    assert Daemon(tmp_path, other).served.settings == other
    more_kv = msgspec.structs.replace(CONFIGURED, kv_bytes=1 << 30)
    assert Daemon(tmp_path, more_kv).served.settings == msgspec.structs.replace(more_kv, model=str(tmp_path / "b"))


def test_to_load_what_is_configured_ends_it(daemon: Daemon, tmp_path: Path) -> None:
    load(daemon, tmp_path / "b")
    load(daemon, Path("/srv/a"))
    assert daemon.served.settings == CONFIGURED
    assert not (tmp_path / "state" / "model.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"model": "/x"})])
def test_a_file_that_cannot_be_read_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "model.json").write_text(text)
    assert Daemon(tmp_path).served.settings == CONFIGURED


def test_a_model_that_is_gone_is_ignored(daemon: Daemon, tmp_path: Path) -> None:
    load(daemon, tmp_path / "b")
    (tmp_path / "b").rmdir()
    assert Daemon(tmp_path).served.settings == CONFIGURED


def test_a_folder_that_cannot_be_written_changes_nothing_that_is_served(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    load(daemon, tmp_path / "b")
    assert daemon.served.settings.model == str(tmp_path / "b")


def test_one_load_at_a_time(daemon: Daemon, tmp_path: Path) -> None:
    daemon.begin(str(tmp_path / "b"))
    with pytest.raises(EngineError, match=r"'.*/b' is being loaded; wait or cancel"):
        daemon.begin("/srv/c")
    daemon.tell(LoadPhase.DRAINING, is_switched=True, streams=3)
    with pytest.raises(EngineError, match=r"which 3 streams still use the old one of"):
        daemon.begin("/srv/c")
    daemon.tell(LoadPhase.SERVED, is_switched=True)
    daemon.begin("/srv/c")


def test_what_cannot_be_begun(daemon: Daemon) -> None:
    with pytest.raises(EngineError, match="give the whole path"):
        daemon.begin("models/b")
    with pytest.raises(EngineError, match="beside one that is not served"):
        daemon.begin("/srv/b", is_serving=False)
    assert daemon.to_host == []


def test_a_load_can_be_cancelled_until_the_switch(daemon: Daemon) -> None:
    with pytest.raises(EngineError, match="no model is being loaded"):
        daemon.loads.cancel()
    daemon.begin("/srv/b")
    daemon.loads.cancel()
    assert daemon.to_host[-1] == CancelLoad(1)
    daemon.tell(LoadPhase.DRAINING, is_switched=True)
    with pytest.raises(EngineError, match="'/srv/b' is served already"):
        daemon.loads.cancel()


def test_news_of_an_older_load_is_ignored(daemon: Daemon) -> None:
    daemon.begin("/srv/b")
    daemon.tell(LoadPhase.FAILED, reason="no")
    daemon.begin("/srv/c")
    daemon.tell(LoadPhase.STARTING, load=1)
    assert daemon.loads.load is not None
    assert daemon.loads.load.phase is LoadPhase.CHECKING


@pytest.mark.parametrize("is_switched", [False, True])
def test_a_host_that_ends_ends_the_load(daemon: Daemon, tmp_path: Path, is_switched: bool) -> None:
    daemon.begin(str(tmp_path / "b"))
    daemon.tell(LoadPhase.DRAINING, is_switched=is_switched)
    daemon.loads.host_ended("was killed")
    assert daemon.loads.load is not None
    assert daemon.loads.load.phase is (LoadPhase.SERVED if is_switched else LoadPhase.FAILED)
    assert daemon.loads.load.reason == ("" if is_switched else "the engine host was killed")
    assert (daemon.served.settings == CONFIGURED) is not is_switched


def test_a_new_zygote_is_asked_again(daemon: Daemon) -> None:
    daemon.begin("/srv/b")
    daemon.loads.zygote_started()
    assert daemon.preloads == []
    daemon.tell(LoadPhase.PREPARING, tokenizer_dir="/t")
    daemon.loads.zygote_started()
    assert daemon.preloads == ["/t", "/t"]
    daemon.loads.preloaded("/t", "")
    daemon.loads.zygote_started()
    assert daemon.preloads == ["/t", "/t"]
    assert daemon.to_host[-1] == ModelReady(1, "")
