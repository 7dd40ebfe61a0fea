"""Requests and the model that they began with, when another one is served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.worker_parts import FakeDriver, FakeSink

from seedance.daemon import tokenizer
from seedance.daemon.detokenizer import table_vocabulary
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.infer import InferRequest
from seedance.daemon.engine_client import EngineClient
from seedance.daemon.service import INLINE_CHARACTERS, Answer, Service
from seedance.daemon.stream import Sink
from seedance.daemon.tokenizer import Tokenizer
from seedance.engine.adapter import EngineState
from seedance.engine.channel import Batch, EngineChanged, Receiver, Submit, ToHost, encode, pack_singles
from seedance.engine.request import ModelInfo
from seedance.qos.limiter import TenantLimiter
from seedance.qos.quota import Quota

OLD = tokenizer.synthetic()
NEW = Tokenizer(lambda text, _: [len(text) % 7], table_vocabulary([f"[{n}]".encode() for n in range(7)]), None)


def model(name: str, tokens: str) -> ModelInfo:
    return ModelInfo(
        name=name,
        tokenizer_dir="",
        max_model_len=100_000,
        vocab_size=OLD.vocabulary.size,
        eos_token_ids=(),
        created=0,
        engine="fake",
        tokens=tokens,
    )


class Asked(Answer):
    """A request's fate."""

    def __init__(self) -> None:
        super().__init__()
        self.out = FakeSink()
        self.error: ApiError | None = None

    def sink(self, index: int) -> Sink:
        return self.out

    def started(self) -> None:
        pass

    def failed(self, error: ApiError) -> None:
        self.error = error


class Scene:
    """A tenant's service, and the engine in the test's hands."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.driver = FakeDriver()
        limiter = TenantLimiter(Quota(tenant="acme"))
        self.service = Service(self.loop, Quota(tenant="acme"), limiter)
        self.service.engine = EngineClient(self.driver, limiter, self.loop.time, lambda change: None, str.encode)
        self.service.engine.connect(10)
        self.serve("old", OLD)
        self._receiver: Receiver[ToHost] = Receiver(ToHost)

    def serve(self, name: str, of: Tokenizer) -> None:
        self.service.engine_changed(EngineChanged(EngineState.READY, "", model(name, f"tokens of {name}")), of, None)

    def ask(self, prompt: str) -> Asked:
        request, answer = InferRequest(prompt=prompt), Asked()
        self.service.admit(None, 1)
        self.service.begin(request, [prompt], answer)
        return answer

    def submits(self) -> list[Submit]:
        flow = self.driver.flows[0]
        data, flow.sent = bytes(flow.sent), bytearray()
        return [message for message in self._receiver.receive_data(data) if isinstance(message, Submit)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.service.close()
    scene.loop.close()


def test_a_request_says_what_its_ids_mean(scene: Scene) -> None:
    scene.ask("Hello")
    scene.serve("new", NEW)
    scene.ask("Hello")
    assert [(list(s.prompt_token_ids), s.tokens) for s in scene.submits()] == [
        (OLD.encode("Hello"), "tokens of old"),
        ([5], "tokens of new"),
    ]


def test_a_prompt_that_is_tokenised_while_the_model_changes_stays_the_old_one_s(scene: Scene) -> None:
    prompt = "Hello " * INLINE_CHARACTERS
    answer = scene.ask(prompt)
    assert scene.submits() == []
    scene.serve("new", NEW)
    while not (submits := scene.submits()):
        scene.loop.run_until_complete(asyncio.sleep(0.001))
    assert [(list(s.prompt_token_ids) == OLD.encode(prompt), s.tokens) for s in submits] == [(True, "tokens of old")]
    assert answer.error is None
    assert answer.vocabulary is OLD.vocabulary
    [token_id] = OLD.encode("a")
    scene.service.engine.data_received(encode(Batch([], pack_singles([submits[0].stream, token_id]))))
    assert answer.out.text == "a"
    assert scene.ask("Hello").vocabulary is NEW.vocabulary


def test_without_an_engine_a_prompt_that_was_being_tokenised_is_refused(scene: Scene) -> None:
    answer = scene.ask("Hello " * INLINE_CHARACTERS)
    scene.service.engine_changed(EngineChanged(EngineState.DEAD, "killed", None), None, None)
    while answer.error is None:
        scene.loop.run_until_complete(asyncio.sleep(0.001))
    assert answer.error.code == "engine_unavailable"
    assert scene.submits() == []
