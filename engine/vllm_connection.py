"""Our end of an EngineCore's protocol (`vllm_wire`): pure, no I/O."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from seedance.engine.adapter import Output
from seedance.engine.ledger import STREAMS
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling, TenantContext, TokenLogprobs, Urgency
from seedance.engine.survivors import Survivors
from seedance.engine.vllm_control import SURVEY
from seedance.engine.vllm_sampling import ModelFacts, check_request, invalid_request, sampling_params
from seedance.engine.vllm_wire import (
    ABORT,
    ADD,
    ENGINE_DEAD,
    ENGINE_IDENTITY,
    ERROR_KEY,
    QUOTA_KEY,
    UTILITY,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Frames,
    UtilityOutput,
    parse_name,
)

_FINISH: Final = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.STOP,
)
_RAW_VIEW: Final = 3  # msgpack extension of an array that travels inline
_CLIENT: Final = 0
_SERIAL_BITS: Final = 40


class Received(NamedTuple):
    """What one message of the core meant: what a step brought, an answer to a utility call, or the core's death.

    `singles` are those of the step that are not among its outputs; see `EngineEvents.step_completed`.
    """

    outputs: list[Output]
    reply: UtilityOutput | None
    dead: bool
    singles: bytes = b""


def _extension(code: int, data: memoryview) -> memoryview:
    if code != _RAW_VIEW:
        raise ValueError(f"cannot read msgpack extension {code}")
    return data


class CoreConnection:
    """The state of one EngineCore's protocol: which generations live, under which name, what was asked.

    Every call returns frames for the caller to send. A generation's name on the wire is its key and a serial number,
    so that outputs in flight for an aborted generation are never taken for those of a later one with the same key.
    Serial numbers of the hosts that a core has one after the other are far apart: `hosts` counts them.

    After a `survey`, `survivors` are what the core goes on with for the last one.
    """

    __slots__ = (
        "_decode",
        "_encode",
        "_facts",
        "_keys",
        "_logprobs",
        "_names",
        "_serial",
        "_serials",
        "_survey",
        "survivors",
    )

    def __init__(self, facts: ModelFacts, hosts: int = 0) -> None:
        self._facts = facts
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineCoreOutputs, ext_hook=_extension).decode
        self._keys: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._logprobs: dict[str, int] = {}
        self._serial = hosts << _SERIAL_BITS
        self._serials = np.zeros(STREAMS, np.uint64)  # by key, 0 for none
        self._survey = 0
        self.survivors = Survivors()

    @property
    def alive(self) -> int:
        """The number of generations that have neither ended nor been aborted."""
        return len(self._keys)

    def submit(
        self,
        key: int,
        tenant: TenantContext,
        prompt: Sequence[int],
        sampling: Sampling,
        now_s: float,
        urgency: Urgency = NOT_URGENT,
        emitted: Sequence[int] = (),
        claim: str = "",
    ) -> Frames:
        """Begin a generation, or go on with one; `now_s` is wall time. Raises EngineError when it can never run."""
        if key in self._names:
            raise invalid_request(f"cannot begin generation {key}: it is already running")
        check_request(prompt, sampling, self._facts, emitted)
        params = sampling_params(sampling, tenant, self._facts, urgency, emitted, claim)
        self._serial += 1
        name = f"{key}.{self._serial}"
        salt = tenant.cache_salt or None
        request = EngineCoreRequest(name, list(prompt), None, params, None, now_s, None, salt, None)
        frames = [ENGINE_IDENTITY, ADD, self._encode(request)]
        self._know(name)
        if sampling.logprobs is not None:
            self._logprobs[name] = sampling.logprobs
        return frames

    def _know(self, name: str) -> int:
        key, serial = parse_name(name)
        self._keys[name] = key
        self._names[key] = name
        self._serials[key] = serial
        return key

    def _forget(self, name: str) -> None:
        key = self._keys.pop(name)
        del self._names[key]
        self._logprobs.pop(name, None)
        self._serials[key] = 0

    def abort(self, keys: Sequence[int]) -> Frames | None:
        """Forget these generations; return the message that ends them, or None when none of them lives."""
        names = []
        for key in keys:
            if (name := self._names.get(key)) is not None:
                self._forget(name)
                names.append(name)
        return [ENGINE_IDENTITY, ABORT, self._encode(names)] if names else None

    def serve(self, facts: ModelFacts) -> None:
        """Take note that the core serves another model from now on; only while nothing runs."""
        self._facts = facts

    def wake(self) -> Frames:
        """Return a message that ends nothing, and wakes a core that sleeps."""
        return [ENGINE_IDENTITY, ABORT, self._encode([])]

    def call(self, method: str, *args: Any) -> tuple[int, Frames]:
        """Call a method of the EngineCore; the reply carries the number returned here."""
        self._serial += 1
        return self._serial, [ENGINE_IDENTITY, UTILITY, self._encode((_CLIENT, self._serial, method, args))]

    def survey(self) -> tuple[int, Frames]:
        """Ask a core that somebody else has spoken to what it runs; what it has sent before it answers is old."""
        self._survey, frames = self.call(SURVEY)
        return self._survey, frames

    def _surveyed(self, found: Sequence[tuple[str, str, bytes]]) -> None:
        for name, claim, token_ids in found:
            self.survivors.add(self._know(name), claim, array.array("I", token_ids))

    def receive(self, frames: Sequence[bytes]) -> Received:
        """Take one message of the output socket. Raises msgspec.DecodeError when it is not vLLM's.

        From the answer to a survey on, outputs of survivors come here, too.
        """
        if frames[0] == ENGINE_DEAD:
            return Received([], None, True)
        message = self._decode(frames[0])
        outputs: list[Output] = []
        singles = b""
        find = self._keys.get
        for item in message.outputs:
            if item.kv_transfer_params is not None:
                singles += self._alive(*item.kv_transfer_params)
            name = item.request_id
            key = find(name)
            if key is None:
                continue
            output = Output(key, item.new_token_ids)
            if item.prefill_stats is not None:
                output.cached_tokens = item.prefill_stats.num_cached_tokens
            if item.new_logprobs is not None:
                output.logprobs = token_logprobs(item.new_logprobs, frames, self._logprobs.get(name, 0))
            if item.finish_reason is not None:
                self._finish(name, item, output)
            outputs.append(output)
        reply = message.utility_output
        if reply is not None and self._survey and reply.call_id == self._survey and reply.failure_message is None:
            self._surveyed(reply.result[1])
        return Received(outputs, reply, False, singles)

    def _alive(self, pairs: bytes, serials: bytes) -> bytes:
        """Return the pairs of those that have not been aborted meanwhile."""
        columns = np.frombuffer(pairs, np.uint32).reshape(-1, 2)
        is_alive = self._serials[columns[:, 0]] == np.frombuffer(serials, np.uint64)
        return pairs if is_alive.all() else columns[is_alive].tobytes()

    def _finish(self, name: str, item: EngineCoreOutput, output: Output) -> None:
        self._forget(name)
        output.finish_reason = _FINISH[item.finish_reason or 0]
        if output.finish_reason is FinishReason.ABORT and QUOTA_KEY in (item.trace_headers or {}):
            output.finish_reason = FinishReason.QUOTA_EXCEEDED
        if output.finish_reason is FinishReason.ERROR:
            reason = (item.trace_headers or {}).get(ERROR_KEY)
            output.error = reason or "the engine could not finish this request; its log says why"


_ARRAY_CODES: Final[dict[str, Any]] = {"<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}


def _array(value: Any, frames: Sequence[bytes]) -> list[Any]:
    """Return a numpy array of the wire, (dtype, shape, data or number of the frame that has it), as nested lists."""
    dtype, shape, data = value
    view = memoryview(frames[data] if isinstance(data, int) else data)
    if not view.nbytes:
        return []
    cells: list[Any] = view.cast(_ARRAY_CODES[dtype]).tolist()
    if len(shape) == 1:
        return cells
    width = shape[1]
    return [cells[at : at + width] for at in range(0, len(cells), width)]


def token_logprobs(value: Any, frames: Sequence[bytes], wanted: int) -> list[TokenLogprobs]:
    """Decode vLLM's `LogprobsLists`: per token, the chosen one and `wanted` alternatives, best first.

    A row is as wide as the widest request of the batch asked for; what goes beyond `wanted` is cut off.
    """
    ids, logprobs, ranks = (_array(part, frames) for part in value[:3])
    end = wanted + 1
    return [
        TokenLogprobs(row[:end], probabilities[:end], rank)
        for row, probabilities, rank in zip(ids, logprobs, ranks, strict=True)
    ]
