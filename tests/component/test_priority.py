"""Who goes first when all slots are taken: classes, deadlines in both doors, and what becomes of who had to wait.

A class with a priority takes a slot; a deadline goes before its tenant's other requests, and takes no slot.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text
from websockets.sync.client import ClientConnection, connect

TOKENS_PER_S = 50
TOKENS = 100
PROMPT = "Once"
CLASSES = """
[classes.now]
weight = 100
priority = 1
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """An engine with two slots."""
    tables = {"engine": {"max_streams": 2}, "engine.synthetic": {"tokens_per_s": TOKENS_PER_S}}
    daemon = Daemon(tmp_path_factory.mktemp("d"), tables=tables)
    with daemon.config.open("a") as file:
        file.write(CLASSES)
    for tenant, name in (("low", "bronze"), ("gold", "gold"), ("now", "now")):
        daemon.add_tenant(tenant, f'class = "{name}"\n')
    try:
        daemon.start()
        for tenant in ("gold", "now"):
            complete(daemon, tenant)  # its worker is there
        yield daemon
        daemon.stop()
    finally:
        daemon.close()


def complete(daemon: Daemon, tenant: str, fields: dict[str, str] | None = None) -> tuple[int, float]:
    """Return the status of a completion of one token, and how long it took."""
    with Connection(daemon.address) as connection:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
        began_s = time.monotonic()
        connection.send(request("POST", "/v1/completions", daemon.keys[tenant], body, fields))
        status = connection.response().status
    return status, time.monotonic() - began_s


def infer(daemon: Daemon, tenant: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer {daemon.keys[tenant]}"}
    return connect(f"ws://{daemon.address}/v2/infer", additional_headers=headers, proxy=None)


class Occupied:
    """Both slots taken by streams of a low class, which are read to their ends."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.texts = {"0": "", "1": ""}
        self.ended: dict[str, Any] = {}
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Occupied:
        self.before = self.preemptions()
        self.socket = self.stack.enter_context(infer(self.daemon, "low"))
        for number, name in enumerate(self.texts):
            fields = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "seed": number, "temperature": 0}
            self.socket.send(json.dumps({"id": name, **fields}))
        while not all(self.texts.values()):
            self.read()
        return self

    def read(self) -> None:
        message = json.loads(self.socket.recv(10))
        self.texts[message["id"]] += message.get("delta", "")
        if "finish_reason" in message:
            self.ended[message["id"]] = message

    def preemptions(self) -> int:
        engine = self.daemon.tenant("low").engine
        return engine.preemptions if engine is not None else 0

    def __exit__(self, *_: object) -> None:
        with self.stack:
            while len(self.ended) < 2:
                self.read()
        wait_until(self.daemon.is_at_rest)

    def are_whole(self) -> bool:
        """Whether the streams brought what they would have brought alone."""
        assert {message["finish_reason"] for message in self.ended.values()} == {"length"}
        assert {message["usage"]["completion_tokens"] for message in self.ended.values()} == {TOKENS}
        return self.texts == {str(number): expected_text(PROMPT, TOKENS, number) for number in range(2)}


def test_a_class_with_a_priority_takes_a_slot_and_the_victim_says_the_same(daemon: Daemon) -> None:
    with Occupied(daemon) as low:
        status, took_s = complete(daemon, "now")
        assert (status, low.ended) == (200, {})
        assert took_s < TOKENS / TOKENS_PER_S / 2
    assert low.are_whole()
    assert low.preemptions() > low.before


def test_a_heavier_class_without_a_priority_waits_for_a_slot(daemon: Daemon) -> None:
    with Occupied(daemon) as low:
        assert complete(daemon, "gold")[0] == 200
    assert low.preemptions() == low.before
    assert low.are_whole()


@contextlib.contextmanager
def queued(daemon: Daemon) -> Iterator[ClientConnection]:
    """Four requests of a higher class, of which no two have a slot before the low ones have ended."""
    with infer(daemon, "gold") as socket:
        for number in range(4):
            fields = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
            socket.send(json.dumps({"id": f"plain {number}", **fields}))
        wait_until(lambda: waiting(daemon, "gold") == 4)
        yield socket


def waiting(daemon: Daemon, tenant: str) -> int:
    engine = daemon.tenant(tenant).engine
    return engine.waiting if engine is not None else 0


def test_a_deadline_in_a_header_goes_before_its_tenants_others_and_takes_no_slot(daemon: Daemon) -> None:
    with Occupied(daemon) as low, queued(daemon):
        assert complete(daemon, "gold", {"X-Deadline-Ms": "50"})[0] == 200
        # Behind all four it would have come when none of them waits any more.
        assert waiting(daemon, "gold") >= 2
    assert low.preemptions() == low.before
    assert low.are_whole()


def test_a_deadline_in_a_message_goes_before_its_tenants_others_and_takes_no_slot(daemon: Daemon) -> None:
    with Occupied(daemon) as low, queued(daemon) as socket:
        socket.send(json.dumps({"id": "soon", "prompt": PROMPT, "max_tokens": 2, "deadline_ms": 50}))
        ended = []
        while "soon" not in ended:
            message = json.loads(socket.recv(10))
            if "finish_reason" in message:
                ended.append(message["id"])
        assert ended == ["soon"]
    assert low.preemptions() == low.before
    assert low.are_whole()


def test_a_wrong_deadline_is_refused(daemon: Daemon) -> None:
    assert complete(daemon, "gold", {"X-Deadline-Ms": "soon"})[0] == 400
    with infer(daemon, "gold") as socket:
        socket.send(json.dumps({"prompt": PROMPT, "deadline_ms": 0}))
        assert "deadline_ms" in json.loads(socket.recv(10))["error"]["message"]
