"""An engine that dies under streams of every door: they go on, lose nothing, and their clients hear of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.daemon import Daemon, running, wait_until
from support.fm_stream import FmClient
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text, whole_tokens
from websockets.sync.client import connect

PROMPT = "Once upon a time"
TOKENS = whole_tokens(PROMPT, 300)
ASKED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS}
TOLD = ["engine restarting", "continued, what comes is drawn anew"]


def told_in_events(daemon: Daemon) -> tuple[str, list[str]]:
    with Connection(daemon.address) as connection:
        connection.send(request("POST", "/v1/completions", daemon.keys["acme"], {**ASKED, "stream": True}))
        lines = connection.response().body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    text = "".join(event["choices"][0]["text"] for event in events)
    return text, [line[2:] for line in lines if line.startswith(": ") and line != ": ping"]


def told_in_messages(daemon: Daemon, **name: str) -> tuple[str, list[str]]:
    headers = {"Authorization": f"Bearer {daemon.keys['acme']}"}
    with connect(f"ws://{daemon.address}/v2/infer", additional_headers=headers, proxy=None) as socket:
        socket.send(json.dumps({**ASKED, **name}))
        messages: list[dict[str, Any]] = [{}]
        while "finish_reason" not in messages[-1]:
            messages.append(json.loads(socket.recv(20)))
    text = "".join(message.get("delta", "") for message in messages)
    return text, [message["note"] for message in messages if "note" in message]


def told_in_frames(daemon: Daemon) -> tuple[str, list[str]]:
    async def main() -> tuple[str, list[str]]:
        async with asyncio.timeout(20), FmClient(daemon.address, daemon.keys["acme"]) as client:
            stream = client.ask(PROMPT, max_tokens=TOKENS)
            await stream.end()
            return stream.text, stream.notes

    return asyncio.run(main())


def whole_answer(daemon: Daemon) -> tuple[str, list[str]]:
    with Connection(daemon.address) as connection:
        connection.send(request("POST", "/v1/completions", daemon.keys["acme"], ASKED))
        answer = connection.response().json()
    assert answer["usage"]["completion_tokens"] == TOKENS
    return answer["choices"][0]["text"], TOLD


def test_streams_of_every_door_go_on_and_are_told(tmp_path: Path) -> None:
    # It dies twice within TOKENS, or once if it is late and its steps bring several tokens.
    tables = {"engine.synthetic": {"tokens_per_s": 100, "prompt_tokens_per_s": 0, "die_after_steps": 120}}
    ways: list[Callable[[Daemon], tuple[str, list[str]]]] = [
        told_in_events,
        told_in_messages,
        functools.partial(told_in_messages, id="a"),
        told_in_frames,
        whole_answer,
    ]
    with running(tmp_path, "acme", tables=tables) as daemon:
        with concurrent.futures.ThreadPoolExecutor(len(ways)) as threads:
            found = list(threads.map(lambda way: way(daemon), ways))
        wait_until(daemon.is_at_rest)
        daemon.stop()
    for text, notes in found:
        assert text == expected_text(PROMPT, TOKENS)
        assert notes[:2] == TOLD


def test_readme_has_what_clients_hear() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(text in readme for text in TOLD)
