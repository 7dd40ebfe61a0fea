"""A worker may die at any moment: with the journal the next one gives every client its records, once and in order.

The clients are those of kept streams.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from support.kept_client import KeptClient
from support.kept_parts import KeptWorker
from support.ruled_engine import RuledEngine, expected_text

from seedance.daemon import shared_log
from seedance.daemon.kept_request import RequestKey

MOST = 6
BOUND_BYTES = 24 << 10
"""No stream here has so much, and so none loses its oldest records; but a quarter of it pauses one."""


class Dying(RuleBasedStateMachine):
    """Some clients with a stream each, whose workers and engine hosts die."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = shared_log.create("test")
        self.worker = KeptWorker(log_fd=self.fd, resume_for_s=1e9, bound_bytes=BOUND_BYTES)
        self.engine = RuledEngine(self.worker)
        self.clients: list[tuple[KeptClient, int, int, int]] = []  # with seed, length and choices
        self.cancelled: set[KeptClient] = set()

    def teardown(self) -> None:
        try:
            for _ in range(60):
                self.all_read()
                self.engine.step()
            self.all_read()
            for client, seed, length, choices in self.clients:
                if client.error is not None:  # before there was an engine again, and not accepted
                    assert (client.error.code, client.read) == ("engine_unavailable", [])
                    continue
                texts = [expected_text(seed + choice, length) for choice in range(choices)]
                told = [client.text(choice) for choice in range(choices)]
                assert len(client.reasons()) == choices
                if client in self.cancelled:
                    assert all(text.startswith(said) for text, said in zip(texts, told, strict=True))
                else:
                    assert (told, set(client.reasons())) == (texts, {"length"})
                    assert client.usage()["completion_tokens"] == length * choices
            assert self.worker.service._limiter.statistics().streams == 0
            assert self.worker.journal.streams == 0
        finally:
            self.worker.close()
            os.close(self.fd)

    def all_read(self) -> None:
        for client, *_ in self.clients:
            if client.stream is None and not client.is_done:
                self.come_back(client)
        self.worker.wait()
        self.engine.hear()
        for client, *_ in self.clients:
            client.take_in()

    def come_back(self, client: KeptClient) -> None:
        """Go on with what the client knows of: its token, or else its key."""
        if client.token:
            client.come_back()
        elif client.error is None:
            client.ask_again()

    @rule(seed=st.integers(0, 1000), length=st.integers(1, 40), door=st.sampled_from(["infer", "chat", 1, 2]))
    def ask(self, seed: int, length: int, door: str | int) -> None:
        if len(self.clients) == MOST:
            return
        client = KeptClient(self.worker, RequestKey.of(f"k{len(self.clients)}", b""))
        fields: dict[str, Any] = {"seed": seed, "max_tokens": length}
        if door == "infer":
            client.asks(client.infer, **fields)
        else:
            fields["stream_options"] = {"include_usage": True}
            if door == "chat":
                client.asks(client.chat, **fields)
            else:
                client.asks(client.complete, n=door, **fields)
        self.clients.append((client, seed, length, door if isinstance(door, int) else 1))
        self.engine.hear()

    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        self.engine.step(data)

    @rule()
    def turn(self) -> None:
        """Let the worker send, and the clients read nothing of it yet."""
        self.worker.wait()

    @rule()
    def read(self) -> None:
        for client, *_ in self.clients:
            client.take_in()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.chosen(data).lose()
        self.engine.hear()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def one_comes_back(self, data: st.DataObject) -> None:
        client = self.chosen(data)
        if client.stream is None and not client.is_done:
            self.come_back(client)
            self.engine.hear()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Have another client of the tenant end a stream; that it has ended is known from the next turn on."""
        client = self.chosen(data)
        id = client.token.partition(".")[0]
        if id in self.worker.sessions._streams:
            assert self.worker.sessions.cancel(id)
            self.cancelled.add(client)
            self.engine.hear()
            self.turn()

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), steps=st.integers(5, 20), anew=st.booleans())
    def die_while_nobody_is_there(self, data: st.DataObject, steps: int, anew: bool) -> None:
        """Kill a worker that has records, and ends, for a client that is away."""
        self.chosen(data).lose()
        self.engine.hear()
        for _ in range(steps):
            self.engine.step(data)
            self.turn()
            self.engine.hear()
        if anew:
            self.write_all_anew()
        self.die(arrives=False, is_ready=True)

    def chosen(self, data: st.DataObject) -> KeptClient:
        return data.draw(st.sampled_from([client for client, *_ in self.clients]))

    @rule()
    def write_all_anew(self) -> None:
        self.worker.sessions.flush()
        self.worker.journal.begin_anew()

    @rule()
    def lose_the_host(self) -> None:
        self.engine.lose()

    @rule(arrives=st.booleans(), is_ready=st.booleans())
    def die(self, arrives: bool, is_ready: bool) -> None:
        """Kill the worker; what it has sent arrives or does not."""
        self.worker.die()
        self.worker = KeptWorker(log_fd=self.fd, resume_for_s=1e9, bound_bytes=BOUND_BYTES, is_ready=is_ready)
        for client, *_ in self.clients:
            if arrives:
                client.take_in()
            client.die(self.worker)
        self.engine.follow(self.worker)
        if not is_ready:
            self.turn()
            self.worker.ready()
        self.engine.hear()


Dying.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDying = Dying.TestCase
