"""An engine that is a rule: the tokens of a stream follow from its seed, in whatever worker it goes on."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from support.fm_worker import TOKENIZER, FmWorker

from seedance.engine.channel import Abort, Batch, Delta, SetPaused, Submit, encode, pack_singles
from seedance.engine.request import FinishReason, TokenLogprobs

WORDS = ["one", " two", " three", "é", "…", "🦆", " and so on", "\n"]


def expected_ids(seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    ids = [token_id for _ in range(length) for token_id in TOKENIZER.encode(choose.choice(WORDS))]
    return ids[:length]


def expected_text(seed: int, length: int) -> str:
    detokenizer = TOKENIZER.detokenizer()
    return detokenizer.feed(expected_ids(seed, length)) + detokenizer.finish()


class RuledEngine:
    """The engine of one worker after the other; whatever one says that a stream has brought must be how it begins."""

    def __init__(self, worker: FmWorker) -> None:
        self.running: dict[int, list[int]] = {}
        self.paused: set[int] = set()
        self.prompts: set[tuple[int, ...]] = set()
        self._scored: set[int] = set()
        self._worker = worker

    def follow(self, worker: FmWorker) -> None:
        """Be the engine of the next worker; what the last one had is ended."""
        self._worker = worker
        self.running.clear()
        self.paused.clear()

    def lose(self) -> None:
        """Have the engine's host die, and be the next one's engine."""
        self._worker.service.engine.eof_received()
        self.running.clear()
        self.paused.clear()
        self._worker.driver.flows.pop(0)
        self._worker.service.engine.connect(10)
        self._worker.ready()
        self.hear()

    def hear(self) -> None:
        """Take what the worker has told."""
        for told in self._worker.heard():
            if isinstance(told, Submit):
                assert told.sampling.seed is not None
                ids = expected_ids(told.sampling.seed, told.sampling.max_tokens)
                assert list(told.emitted_token_ids) == ids[: len(told.emitted_token_ids)]
                self.running[told.stream] = ids[len(told.emitted_token_ids) :]
                self.prompts.add(tuple(told.prompt_token_ids))
                is_scored = told.sampling.logprobs is not None
                (self._scored.add if is_scored else self._scored.discard)(told.stream)
            elif isinstance(told, Abort):
                for number in told.streams:
                    self.running.pop(number, None)
            elif isinstance(told, SetPaused):
                numbers = self.running.keys() & set(told.streams)
                self.paused = self.paused | numbers if told.is_paused else self.paused - numbers

    def step(self, data: st.DataObject | None = None) -> None:
        """Bring some tokens of some streams, or one of each, without a turn of the loop."""
        singles: list[int] = []
        deltas: list[Delta] = []
        for number, ids in list(self.running.items()):
            if number in self.paused:
                continue
            count = 1 if data is None else data.draw(st.integers(0, 3))
            taken, ids[:] = ids[:count], ids[count:]
            if not ids:
                deltas.append(self._delta(number, taken, FinishReason.LENGTH))
                del self.running[number]
            elif taken and number in self._scored:
                deltas.append(self._delta(number, taken))
            elif count == 1:
                singles += (number, taken[0])
            elif taken:
                deltas.append(Delta(number, taken))
        self._worker.service.engine.data_received(encode(Batch(deltas, pack_singles(singles))))

    def _delta(self, number: int, token_ids: list[int], reason: FinishReason | None = None) -> Delta:
        delta = Delta(number, token_ids, reason)
        if number in self._scored:
            delta.logprobs = [TokenLogprobs([token_id, 0], [-0.5, -1.0], 1) for token_id in token_ids]
        return delta
