"""What an engine goes on with after its host has died, until the next host's workers ask for it: pure.

The next host asks the engine what it runs. From there on outputs are kept for whoever claims them: a worker that gives
a generation to the new host again says what has come of it, and gets the rest. A claim is a text that is the same
whenever the same stream is asked for the same thing, so a generation cannot be taken for another one.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from seedance.engine.adapter import Output
from seedance.engine.request import Sampling

NO_CLAIM: Final = ""
"""Of a generation that nobody can take over."""
_DIGEST_BYTES: Final = 15

_encode: Final = msgspec.msgpack.Encoder().encode


def claim_of(tenant: str, stream: int, prompt_token_ids: Sequence[int], sampling: Sampling) -> str:
    """Return the claim of a stream; none for one with log probabilities, which the engine does not keep."""
    if sampling.logprobs is not None:
        return NO_CLAIM
    digest = hashlib.blake2b(_encode((tenant, stream, sampling)), digest_size=_DIGEST_BYTES)
    digest.update(array.array("I", prompt_token_ids))
    return digest.hexdigest()


class _Survivor:
    __slots__ = ("claim", "last", "token_ids")

    def __init__(self, key: int, claim: str, token_ids: array.array[int]) -> None:
        self.claim = claim
        self.token_ids = token_ids
        self.last = Output(key, [])


class Survivors:
    """The generations of one engine that nobody has claimed."""

    def __init__(self) -> None:
        self._running: dict[int, _Survivor] = {}
        self._by_claim: dict[str, list[_Survivor]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_claim)

    @property
    def keys(self) -> Collection[int]:
        """The keys that are in use."""
        return self._running.keys()

    def add(self, key: int, claim: str, token_ids: array.array[int]) -> None:
        """Take in a generation that the engine runs, with its whole output so far."""
        survivor = _Survivor(key, claim, token_ids)
        self._running[key] = survivor
        self._by_claim.setdefault(claim, []).append(survivor)

    def take(self, outputs: Sequence[Output]) -> list[Output]:
        """Keep what a step has brought for them; return the rest of it."""
        rest = []
        for output in outputs:
            survivor = self._running.get(output.key)
            if survivor is None:
                rest.append(output)
                continue
            survivor.token_ids.extend(output.token_ids)
            survivor.last.cached_tokens += output.cached_tokens
            if output.finish_reason is not None:
                survivor.last.finish_reason, survivor.last.error = output.finish_reason, output.error
                del self._running[output.key]
        return rest

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        """Give a generation away to somebody who has these tokens of it: its key, and what came behind them."""
        if claim == NO_CLAIM:
            return None
        emitted = array.array("I", emitted_token_ids)
        for survivor in self._by_claim.get(claim, ()):
            if survivor.token_ids[: len(emitted)] == emitted:
                self._remove(survivor)
                survivor.last.token_ids = survivor.token_ids[len(emitted) :].tolist()
                return survivor.last
        return None

    def _remove(self, survivor: _Survivor) -> None:
        of_claim = self._by_claim[survivor.claim]
        of_claim.remove(survivor)
        if not of_claim:
            del self._by_claim[survivor.claim]
        if self._running.get(survivor.last.key) is survivor:
            del self._running[survivor.last.key]

    def give_up(self) -> list[int]:
        """Forget all; returns the keys of those that run."""
        keys = list(self._running)
        self._running.clear()
        self._by_claim.clear()
        return keys
