"""What vLLM's EngineCore says and understands on its sockets, without importing vllm: pure, no I/O.

The core connects a DEALER to our ROUTER (requests) and a PUSH to our PULL (one message per engine step). A request is
the frames (identity, type, msgpack); structs travel as arrays in field order, sampling parameters as a map by name.
The layout is vLLM's own affair: ours is that of vLLM 0.32, `vllm_zygote` compares it with the installed one at start.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from seedance.engine.adapter import Output
from seedance.engine.ledger import STREAMS
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling, TenantContext, TokenLogprobs, Urgency
from seedance.engine.survivors import Survivors
from seedance.engine.vllm_control import SURVEY
from seedance.engine.vllm_sampling import ModelFacts, SamplingParams, check_request, invalid_request, sampling_params

ENGINE_IDENTITY: Final = b"\0\0"  # the core's data-parallel rank, two bytes, little-endian
ENGINE_DEAD: Final = b"ENGINE_CORE_DEAD"
ADD: Final = b"\0"
ABORT: Final = b"\1"
UTILITY: Final = b"\3"

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")  # vLLM's, by number
_FINISH: Final = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.STOP,
)
ERROR_KEY: Final = "seedance.error"
QUOTA_KEY: Final = "seedance.quota"
"""In the trace headers of a request's last output: why it failed, and that its tenant's quota is used up."""
_RAW_VIEW: Final = 3  # msgpack extension of an array that travels inline
_CLIENT: Final = 0
_SERIAL_BITS: Final = 40

Frames = list[bytes]


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """The first fields of vLLM's struct of the same name; what follows them keeps its default."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: None
    sampling_params: SamplingParams
    pooling_params: None
    arrival_time: float
    lora_request: None
    cache_salt: str | None
    data_parallel_rank: None


class PrefillStats(msgspec.Struct):
    """The one figure of vLLM's struct that we use."""

    num_cached_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """The first fields of vLLM's struct of the same name: one generation's part of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: Any = None
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a utility call; `result` is [type information, value]."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """The first fields of vLLM's struct of the same name: one message of the core."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


class Ready(msgspec.Struct):
    """What the core says of itself, first thing on the request socket (vLLM's `EngineCoreReadyResponse`)."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    max_num_seqs: int
    max_num_batched_tokens: int


class Singles(NamedTuple):
    """The generations that got one token and nothing else in a step, which are nearly all of nearly every step.

    Our scheduler sends them as one output, in a field that vLLM has for others. `pairs` are keys and token ids, of 32
    bits, `serials` of 64, as they are in the generations' names.
    """

    pairs: bytes
    serials: bytes


def pack_singles(singles: Iterable[tuple[tuple[int, int], int]]) -> Singles:
    """Pack key and serial number, and token id, of generations."""
    pairs, serials = array.array("I"), array.array("Q")
    for (key, serial), token_id in singles:
        pairs.append(key)
        pairs.append(token_id)
        serials.append(serial)
    return Singles(pairs.tobytes(), serials.tobytes())


def parse_name(name: str) -> tuple[int, int]:
    """Return the key and the serial number of a generation by its name on the wire."""
    key, _, serial = name.partition(".")
    return int(key), int(serial)


class Received(NamedTuple):
    """What one message of the core meant: what a step brought, an answer to a utility call, or the core's death.

    `singles` are those of the step that are not among its outputs; see `EngineEvents.step_completed`.
    """

    outputs: list[Output]
    reply: UtilityOutput | None
    dead: bool
    singles: bytes = b""


def layout_difference(ours: type[msgspec.Struct], theirs: type[msgspec.Struct]) -> str | None:
    """Say how vLLM's struct differs from ours, or None: arrays by position, maps by name and default."""
    mine = {field.name: field for field in msgspec.structs.fields(ours)}
    found = {field.name: field for field in msgspec.structs.fields(theirs)}
    if ours.__struct_config__.array_like:
        expected, actual = list(mine), list(found)[: len(mine)]
        return None if expected == actual else f"{theirs.__name__} begins with {actual} instead of {expected}"
    for name, field in mine.items():
        if name not in found:
            return f"{theirs.__name__} has no field '{name}'"
        default = getattr(found[name].default, "value", found[name].default)
        if default != field.default and field.default is not msgspec.NODEFAULT:
            return f"{theirs.__name__}.{name} defaults to {default!r} instead of {field.default!r}"
    return None


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
