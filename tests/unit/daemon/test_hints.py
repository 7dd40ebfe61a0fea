"""Commands to try: with the example's keys where they are."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from seedance.daemon import config, hints


def _config(tmp_path: Path, listen: str = 'tcp = ["127.0.0.1:8000"]') -> config.Config:
    text = f'[listen]\n{listen}\n[engine]\nkind = "synthetic"\n'
    return config.parse(text, str(tmp_path / "seedanced.toml"))


def test_the_commands_hold_a_real_key_and_a_body_that_is_json(tmp_path: Path) -> None:
    (tmp_path / hints.KEYS_FILE).write_text("# keys\nSEEDANCE_KEY_ACME=sk-one\nSEEDANCE_KEY_BIG_CORP=sk-two\nX=y\n")
    assert hints.read_keys(str(tmp_path / "seedanced.toml")) == {"acme": "sk-one", "big-corp": "sk-two"}
    text = hints.text(_config(tmp_path), "one's model", ["127.0.0.1:8123"])
    curl, chat, infer = (shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("  "))
    assert curl[:3] == ["curl", "-N", "http://127.0.0.1:8123/v1/chat/completions"]
    assert "Authorization: Bearer sk-one" in curl
    body = json.loads(curl[-1])
    assert (body["model"], body["stream"]) == ("one's model", True)
    assert chat == ["seedancectl", "--config", str(tmp_path / "seedanced.toml"), "chat", "Hello!"]
    assert infer[3:] == ["infer", "Once upon"]


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_without_keys_there_is_a_place_for_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / hints.KEYS_FILE).write_bytes(content)
    assert "Bearer YOUR_KEY" in hints.text(_config(tmp_path), "m", ["[::]:1"])


def test_where_there_is_only_a_unix_socket_curl_is_told(tmp_path: Path) -> None:
    config = _config(tmp_path, 'tcp = []\nunix = "a sock"')
    curl = shlex.split(hints.text(config, "m", [f"unix:{config.listen.unix}"]).splitlines()[3])
    assert curl[2:4] == ["--unix-socket", str(tmp_path / "a sock")]


def test_the_command_is_named_by_its_path_where_the_shell_would_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Path(sys.executable).with_name("seedancectl")
    monkeypatch.setenv("PATH", "/nowhere")
    assert hints.typed("seedancectl") == (shlex.quote(str(ours)) if ours.exists() else "seedancectl")
    monkeypatch.setenv("PATH", str(ours.parent))
    assert hints.typed("seedancectl") == "seedancectl"
