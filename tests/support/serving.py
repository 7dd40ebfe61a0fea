"""The whole daemon on a real engine with the tiny model, and what vLLM itself says to the same questions.

The latter is computed at the same time, by `LLM.generate` and `LLM.chat` in a process of their own. Texts are compared
whole, with one rule: a text that ends in the middle of a character ends in U+FFFD here, as it does when the tokenizers
library decodes all its token ids, while vLLM's front end leaves the rest out. `Serving.text` takes the library's text
and sees to it that vLLM's is the same up to there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import websockets
import websockets.sync.client
from support.daemon import Daemon, Http
from support.llm_reference import Answer, Question, Reference, Text
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from seedance.engine.adapter import EngineStatistics

LIMIT_S = 180.0
MODEL = "tiny"
KV_BYTES = 64 << 20
STREAMS = 64
CANDIDATES = 80
LEAST_MARGIN = 1e-4  # in logprobs; of streams with a closer decision nothing is expected
STREAM_TOKENS = 24
TENANTS = ("acme", "globex")
SUBPROTOCOL = "seedance.json.v1"
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is a closure?"},
]
WORDS = "the class of an object returns every name that a function binds to its".split()  # noqa: SIM905


def prompt(number: int, words: int = 8) -> str:
    """Return a prompt of so many words; another number gives other ones."""
    return " ".join(random.Random(number).choices(WORDS, k=words))


def greedy(max_tokens: int = 48, **more: Any) -> dict[str, Any]:
    """Return sampling parameters for the likeliest tokens."""
    return {"temperature": 0.0, "max_tokens": max_tokens, **more}


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "n": 2, "max_tokens": 24}
PENALISED = greedy(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"300": 2.0})
STOP = ["on", "er"]
QUESTIONS = {
    "chat": Question(prompt=MESSAGES, sampling=greedy(logprobs=3)),
    "completion": Question(prompt=prompt(6), sampling=greedy(logprobs=2)),
    "ids": Question(prompt=[5, 900, 901, 17], sampling=greedy(20)),
    "sampled": Question(prompt=prompt(2), sampling=SAMPLED),
    "penalised": Question(prompt=prompt(4), sampling={**PENALISED, "repetition_penalty": 1.1}),
    "stopped": Question(prompt=prompt(7), sampling=greedy(stop=STOP)),
    **{
        f"stream {n}": Question(prompt=prompt(100 + n), sampling=greedy(STREAM_TOKENS, logprobs=2))
        for n in range(CANDIDATES)
    },
}


def margin(text: Text) -> float:
    """Return by how much the best token led at its closest: under float32's rounding, the batch decides who wins."""
    assert text.logprobs is not None
    bests = [sorted(position.values(), reverse=True)[:2] for position in text.logprobs]
    return min(first - second for first, second in bests)


class Serving:
    """The daemon, what vLLM says, and how long the first requests of all took to their first token."""

    def __init__(self, daemon: Daemon, model: Path, answers: Sequence[Answer]) -> None:
        self.daemon = daemon
        self.model = model
        self.address = daemon.address
        self.answers = dict(zip(QUESTIONS, answers, strict=True))
        self.streams = [
            name for name in self.answers if name.startswith("stream") and margin(self.answer(name)) > LEAST_MARGIN
        ][:STREAMS]
        assert len(self.streams) == STREAMS
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        assert http_get(self.address, "/v1/models", daemon.keys["acme"])[0] == 200  # acme's worker is there now
        self.first_tokens_s = {
            tenant: [self.first_token_s(tenant, number) for number in range(21)] for tenant in TENANTS
        }

    def answer(self, name: str) -> Text:
        return self.answers[name].texts[0]

    def text(self, name: str, index: int = 0) -> str:
        """Return what the tokens of vLLM's answer decode to."""
        theirs = self.answers[name].texts[index]
        text: str = self._tokenizer.decode(theirs.token_ids)
        assert text.startswith(theirs.text)
        assert set(text.removeprefix(theirs.text)) <= {"\ufffd"}
        return text

    def token_text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key=self.daemon.keys[tenant], max_retries=0, timeout=LIMIT_S
        )

    def async_client(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://{self.address}/v1", api_key=self.daemon.keys[tenant], max_retries=0, timeout=LIMIT_S
        )

    def web_socket(self, tenant: str = "acme") -> websockets.sync.client.ClientConnection:
        return websockets.sync.client.connect(
            f"ws://{self.address}/v2/infer",
            subprotocols=[websockets.Subprotocol(SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {self.daemon.keys[tenant]}"},
        )

    def engine(self) -> EngineStatistics:
        engine = self.daemon.status().engine.statistics
        assert engine is not None
        return engine

    def is_idle(self) -> bool:
        engine = self.engine()
        return engine.running == engine.waiting == 0

    def first_token_s(self, tenant: str, number: int) -> float:
        """Time a short completion from before its connection is opened to its first token."""
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        body = {"model": MODEL, "prompt": prompt(1000 + number), "max_tokens": 2, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {self.daemon.keys[tenant]}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        while not response.readline().startswith(b"data: {"):
            assert response.status == 200
        seconds = time.perf_counter() - began_s
        response.read()
        connection.close()
        return seconds

    def complete(self, name: str = "completion") -> str:
        with self.client() as client:
            asked: Any = QUESTIONS[name].prompt
            done = client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=48)
        return str(done.choices[0].text)


def http_get(address: str, path: str, key: str | None = None) -> tuple[int, Any]:
    """Ask on a connection of its own; returns the status and the JSON of the answer."""
    connection = Http(address)
    try:
        return connection.get(path, key)
    finally:
        connection.close()


def received(socket: websockets.sync.client.ClientConnection) -> Any:
    """Return the next message."""
    return json.loads(socket.recv(LIMIT_S))


def children(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def engine_core(daemon: Daemon) -> int:
    """Return the EngineCore: the child of the fork server, whose parent is the engine host, or else the supervisor."""
    nearest = [*children(daemon.child("engine host").pid), *children(daemon.pid)]
    (zygote,) = (pid for pid in nearest if b"vllm_zygote" in Path(f"/proc/{pid}/cmdline").read_bytes())
    (core,) = children(zygote)
    return core


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """Run the daemon, with `folder / "model"` as a link to the model."""
    model = tiny_model()
    link = folder / "model"
    link.symlink_to(model)
    engine = {
        "kind": "vllm",
        "model": str(link),
        "name": MODEL,
        "kv": f"{KV_BYTES >> 20}MiB",
        "dtype": "float32",
        "threads": 1,  # as in the reference
    }
    daemon = Daemon(folder, tables={"engine": engine})
    for tenant in TENANTS:
        daemon.add_tenant(tenant)
    with Reference(model, list(QUESTIONS.values()), kv_bytes=KV_BYTES) as reference:
        try:
            daemon.start(LIMIT_S)
            yield Serving(daemon, model, reference.answers(LIMIT_S))
        finally:
            daemon.close()
