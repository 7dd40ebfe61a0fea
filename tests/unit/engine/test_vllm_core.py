"""What the engine's process decides before it imports vLLM."""

from __future__ import annotations

import array
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from seedance.engine import vllm_control as control
from seedance.engine.vllm_core import reason_of, resolve_model, share_process_group, survey
from seedance.errors import EngineDead


def model_dir(path: Path, *names: str) -> str:
    for name in names:
        (path / name).write_text(json.dumps({}))
    return str(path)


def test_a_complete_directory_is_a_model(tmp_path: Path) -> None:
    assert resolve_model(model_dir(tmp_path, "config.json", "tokenizer.json"), offline=True) == tmp_path.resolve()


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere/at/all", "a/b/c", "with space"])
def test_a_path_that_leads_nowhere(model: str) -> None:
    with pytest.raises(EngineDead, match=r"there is no directory '.*': give a model's directory or a hub name"):
        resolve_model(model, offline=True)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["tokenizer.json"], "has no config.json, so there is no model that vLLM can load"),
        (["config.json"], "has no tokenizer.json, so there is no tokenizer for workers"),
    ],
)
def test_a_directory_that_lacks_something(tmp_path: Path, names: list[str], text: str) -> None:
    with pytest.raises(EngineDead, match=text):
        resolve_model(model_dir(tmp_path, *names), offline=True)


def test_all_process_groups_are_one_which_ends_once() -> None:
    ends: list[str] = []
    distributed = SimpleNamespace(
        group=SimpleNamespace(WORLD="the world"),
        new_group=lambda *_, **__: "another",
        destroy_process_group=lambda: ends.append("the world"),
    )
    share_process_group(distributed)
    group = distributed.new_group([0], backend="gloo")
    assert group == "the world"
    distributed.destroy_process_group(group)
    assert not ends
    distributed.destroy_process_group()
    assert ends == ["the world"]


class _ValidationError(Exception):
    """As pydantic's: the text has a heading, types and inputs, `errors()` has the message alone."""

    def errors(self) -> list[dict[str, object]]:
        return [{"type": "value_error", "loc": (), "msg": "Value error, no such dtype"}]


@pytest.mark.parametrize(
    ("exc", "text"),
    [
        (ValueError("first line\n  second   line"), "ValueError: first line second line"),
        (KeyError(), "KeyError: no reason given"),
        (_ValidationError("1 validation error for ModelConfig"), "no such dtype"),
        (EngineDead("there is no model"), "there is no model"),
    ],
)
def test_an_exception_as_one_line(exc: Exception, text: str) -> None:
    assert reason_of(exc) == text


def test_a_long_reason_is_cut_at_a_sentence_or_else_at_a_word() -> None:
    sentence = reason_of(RuntimeError("word " * 500))
    assert len(sentence) < 350
    assert sentence.endswith("word …")
    assert reason_of(RuntimeError("it is unknown. Known: " + "name, " * 500)) == "RuntimeError: it is unknown."


def test_control_messages_keep_their_kind() -> None:
    settings = control.VllmSettings(model="/m", name="m", run_dir="/run/x")
    for message in (control.Launch(1, settings, "ipc://a", "ipc://b"), control.Stop()):
        assert msgspec.json.decode(msgspec.json.encode(message), type=control.ToZygote) == message
    for news in (
        control.Failed(0, "x"),
        control.Exited(1, 3, -9),
        control.Launched(1, 3),
        control.Preloaded("0.32.0", 7.5),
    ):
        assert msgspec.json.decode(msgspec.json.encode(news), type=control.ToAdapter) == news


def test_a_survey_tells_what_runs_by_name_and_claim() -> None:
    def running(output_token_ids: list[int], extra_args: object) -> SimpleNamespace:
        params = SimpleNamespace(extra_args=extra_args)
        return SimpleNamespace(output_token_ids=output_token_ids, sampling_params=params)

    requests = {"1.1": running([7, 8], {"claim": "c", "row": 2}), "2.2": running([], {}), "3.3": running([5], None)}
    core = SimpleNamespace(scheduler=SimpleNamespace(requests=requests))
    assert survey(core) == [
        ("1.1", "c", array.array("I", [7, 8]).tobytes()),
        ("2.2", "", b""),
        ("3.3", "", array.array("I", [5]).tobytes()),
    ]
