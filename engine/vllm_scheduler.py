"""The token scheduler inside vLLM: a mixin over its `Scheduler` and its `AsyncScheduler`.

vLLM goes on doing what it is good at: blocks, prefix cache, the batch. Who is in a step is decided before it:

* A new request is parked, out of vLLM's sight, until the policy admits it; then it is put into vLLM's `waiting`, and
  whatever is left there after the step is parked again.
* A running request is left out by its field `next_decode_eligible_step`, and keeps slot and KV blocks.
* How much of a prompt is read in a step is cut in `_reserve_prefill_lookahead`, which vLLM asks for each request.
* `has_requests` is False while nobody may run: the EngineCore then sleeps in its input queue, until `sleep_s` is over
  or somebody sends something.

Steps may overlap (asynchronous scheduling); vLLM ends them in the order in which it scheduled them.

This is all internal to vLLM, hence the pinned version, and the check at each start of what is used here. Nothing of
vLLM is imported: who imports it makes the classes.
"""

from __future__ import annotations

import inspect
import math
import queue
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seedance.engine.ledger import Ledger
from seedance.engine.request import Urgency
from seedance.engine.scheduling import STEADY, PolicySettings, Step
from seedance.engine.token_scheduler import TokenScheduler
from seedance.engine.vllm_continue import begin_behind
from seedance.engine.vllm_sampling import URGENCY_KEY
from seedance.engine.vllm_wire import QUOTA_KEY, pack_singles, parse_name
from seedance.errors import EngineDead, EngineError

_VERSION: Final = "0.32.0"
_HELD: Final = sys.maxsize

if TYPE_CHECKING:

    class _Scheduler:
        """What of vLLM's scheduler is used here."""

        deferred_waiting: set[Any]
        kv_cache_manager: Any
        max_model_len: int
        max_num_active_reqs: int
        max_num_scheduled_tokens: int
        requests: dict[str, Any]
        running: list[Any]
        waiting: Any

        def __init__(self, **options: Any) -> None: ...
        def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any: ...
        def _handle_blocked_waiting_request(self, request: Any) -> bool: ...
        def _is_blocked_waiting_status(self, status: Any) -> bool: ...
        def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None: ...
        def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int: ...
        def add_request(self, request: Any) -> None: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...
        def get_request_counts(self) -> tuple[int, int]: ...
        def has_finished_requests(self) -> bool: ...
        def has_requests(self) -> bool: ...
        def schedule(self, throttle_prefills: bool = False) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...

else:
    _Scheduler = object


_FIELDS: Final = (
    "deferred_waiting",
    "kv_cache_manager",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "requests",
    "running",
    "waiting",
)
_METHODS: Final = {
    "_free_request": ("request", "delay_free_blocks"),
    "_handle_blocked_waiting_request": ("request",),
    "_is_blocked_waiting_status": ("status",),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "get_request_counts": (),
    "has_finished_requests": (),
    "has_requests": (),
    "schedule": ("throttle_prefills",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
}
_REQUEST_FIELDS: Final = (
    "client_index",
    "is_prefill_chunk",
    "max_tokens",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "prefill_stats",
    "request_id",
    "sampling_params",
    "status",
)
_REQUEST_MEMBERS: Final = ("append_output_token_ids", "num_output_tokens", "num_tokens")


def check_scheduler(base: type, request: type, version: str) -> None:
    """Raise EngineDead when vLLM's scheduler, or its request, is not the one that this module was written for."""
    stored = set(inspect.getattr_static(base, "__init__").__code__.co_names)
    wrong = [f"has no field '{name}'" for name in _FIELDS if name not in stored]
    for name, parameters in _METHODS.items():
        method = getattr(base, name, None)
        found = [] if method is None else [name for name in inspect.signature(method).parameters if name != "self"]
        if method is None or tuple(found) != parameters:
            wrong.append(f"has no method '{name}({', '.join(parameters)})'")
    kept = set(inspect.getattr_static(request, "__init__").__code__.co_names)
    wrong += [f"has requests without '{name}'" for name in _REQUEST_FIELDS if name not in kept]
    wrong += [f"has requests without '{name}'" for name in _REQUEST_MEMBERS if not hasattr(request, name)]
    if wrong:
        text = f"vLLM {version} schedules otherwise than {_VERSION}, install that one: its {base.__name__} {wrong[0]}"
        raise EngineDead(text)


class Known(NamedTuple):
    """What else of vLLM is used here."""

    status: Any
    output: Any
    outputs: Any


def scheduler_class(base: type, known: Known, ledger: Ledger, step_target_s: float) -> type:
    """Return the class for an EngineCore, over vLLM's `Scheduler` or `AsyncScheduler`."""
    members = {"known": known, "ledger": ledger, "step_target_s": step_target_s}
    return type(f"Token{base.__name__}", (TokenSteps, base), members)


def let_sleep(core: Any) -> None:
    """Have an EngineCore with this scheduler sleep no longer than its scheduler wants."""
    run_busy_loop = core.run_busy_loop

    def run(self: Any) -> None:
        wait = self.input_queue.get
        scheduler = self.scheduler

        def get(block: bool = True, timeout: float | None = None) -> Any:
            if not block:
                return wait(block=False)
            pause_s = scheduler.sleep_s()
            if pause_s <= 0:
                raise queue.Empty
            return wait(timeout=pause_s)

        self.input_queue.get = get
        run_busy_loop(self)

    core.run_busy_loop = run


class TokenSteps(_Scheduler):
    """vLLM's scheduler, told by a policy who is in each step."""

    known: Known
    ledger: Ledger
    step_target_s: float
    fewest_packed = 16
    """Fewer outputs of a step than that are not worth the packing, here and in the host."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        pool = self.kv_cache_manager.block_pool
        settings = PolicySettings(
            slots=self.max_num_active_reqs,
            kv_blocks=pool.num_gpu_blocks - 1,  # one block is a placeholder that no request ever gets
            block_tokens=options["block_size"],
            step_tokens=self.max_num_scheduled_tokens,
            step_target_s=self.step_target_s,
        )
        self._free_blocks_now = pool.get_num_free_blocks
        self._tokens = TokenScheduler(settings, self.ledger, time.monotonic())
        self._names: dict[str, tuple[int, int]] = {}  # key and serial number of each request
        self._parked: dict[str, Any] = {}
        self._unready: dict[str, Any] = {}  # wait for their grammar
        self._held: dict[str, int] = {}
        self._reading: dict[str, int] = {}
        self._ended: list[Any] = []
        self._wake_s = math.inf

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Park a new request, or wait for what must be compiled for it."""
        begin_behind(request)
        self._names[request.request_id] = parse_name(request.request_id)
        super().add_request(request)
        self.waiting.remove_request(request)
        if self._is_blocked_waiting_status(request.status):
            self._unready[request.request_id] = request
        else:
            self._submit(request)

    def _submit(self, request: Any) -> None:
        key = request.request_id
        extra = request.sampling_params.extra_args or {}
        stream, _ = self._names[key]
        tokens = request.num_tokens
        most = min(request.max_tokens - request.num_output_tokens, self.max_model_len - tokens)
        self._parked[key] = request
        try:
            self._tokens.submitted(
                key,
                extra.get("row", 0),
                stream,
                tokens,
                most,
                time.monotonic(),
                Urgency(*extra.get(URGENCY_KEY, ())),
            )
        except EngineError:
            self._end([key])  # its tenant may not have as many KV blocks as its prompt takes

    def _submit_ready(self) -> None:
        for key, request in list(self._unready.items()):
            if self._handle_blocked_waiting_request(request):
                del self._unready[key]
                self.deferred_waiting.discard(request)
                self._submit(request)

    def _end(self, keys: Iterable[str]) -> None:
        """Finish requests of which a quota is used up."""
        self._ended += self.finish_requests(list(keys), self.known.status.FINISHED_ABORTED)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        """Forget a request, however it ended: all ways lead here."""
        key = request.request_id
        for known in (self._parked, self._unready, self._held):
            known.pop(key, None)
        del self._names[key]
        self._tokens.finished(key, time.monotonic())
        return super()._free_request(request, delay_free_blocks)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        """Take note that vLLM has preempted a request of its own accord; it is parked after the step."""
        self._let_go(request)
        self._tokens.preempted(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def get_request_counts(self) -> tuple[int, int]:
        """Count those that vLLM does not see as waiting too."""
        running, waiting = super().get_request_counts()
        return running, waiting + len(self._parked) + len(self._unready)

    # -- steps --------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Make a step of those whom the policy lets in."""
        if self._unready:
            self._submit_ready()
        now_s = time.monotonic()
        step = self._tokens.step_begins(now_s, self._free_blocks_now(), self.max_num_active_reqs - len(self.running))
        if step is not STEADY:
            self._apply(step, now_s)
        output = super().schedule(throttle_prefills)
        if self.waiting:
            for request in list(self.waiting):
                self.waiting.remove_request(request)
                self._parked[request.request_id] = request
        scheduled = output.num_scheduled_tokens
        cached = {}
        for key in step.admit:
            if key in scheduled:
                cached[key] = self.requests[key].num_computed_tokens - scheduled[key]
        self._tokens.step_scheduled(scheduled, time.monotonic(), cached)
        return output

    def _apply(self, step: Step, now_s: float) -> None:
        for key in step.preempt:
            request = self.requests[key]
            self._let_go(request)
            self.running.remove(request)
            super()._preempt_request(request, now_s)
            self.waiting.remove_request(request)
            self._parked[key] = request
        if step.end:
            self._end(step.end)
        for key in step.hold:
            request = self.requests[key]
            self._held[key] = request.next_decode_eligible_step
            request.next_decode_eligible_step = _HELD
        for key in step.release:
            self._let_go(self.requests[key])
        for key in step.admit:
            self.waiting.add_request(self._parked.pop(key))
        self._reading = step.prefill

    def _let_go(self, request: Any) -> None:
        eligible_step = self._held.pop(request.request_id, None)
        if eligible_step is not None:
            request.next_decode_eligible_step = eligible_step

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Let a prompt be read as far as the policy wants it in this step."""
        most = self._reading.get(request.request_id)
        if most is None:
            # vLLM asks for all who decode in every step, and for them has nothing to keep back.
            return 0 if request.is_prefill_chunk or num_new_tokens < 0 else num_new_tokens
        num_new_tokens = min(num_new_tokens, most)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """End the oldest step, and tell whom a quota has ended."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._tokens.step_ended(time.monotonic())
        for of_client in outputs.values():
            if len(of_client.outputs) >= self.fewest_packed:
                self._pack(of_client.outputs)
        ended, self._ended = self._ended, []
        for request in ended:
            last = self.known.output(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                trace_headers={QUOTA_KEY: ""},
            )
            of_client = outputs.setdefault(request.client_index, self.known.outputs(outputs=[]))
            of_client.outputs.append(last)
        return outputs

    def _pack(self, outputs: list[Any]) -> None:
        """Put one output in the place of all that are one token and nothing else, where there are many."""
        names = self._names
        singles: list[tuple[tuple[int, int], int]] = []
        others: list[Any] = []
        for output in outputs:
            token_ids = output.new_token_ids
            # Of what the host reads of an output there is nothing but one token.
            if (
                len(token_ids) == 1
                and output.finish_reason is None
                and output.prefill_stats is None
                and output.new_logprobs is None
            ):
                singles.append((names[output.request_id], token_ids[0]))
            else:
                others.append(output)
        if len(singles) < self.fewest_packed:
            return
        packed = pack_singles(singles)
        others.append(self.known.output(request_id="", new_token_ids=[], kv_transfer_params=packed))
        outputs[:] = others

    # -- sleep --------------------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Return whether a step can do anything now; when it may be otherwise is for `sleep_s`."""
        if self._tokens.is_steady:
            return True
        if not super().has_requests():
            self._wake_s = math.inf
            return False
        if self._unready or self._ended or self.has_finished_requests():
            return True
        now_s = time.monotonic()
        wake_s = self._tokens.wake_at(now_s)
        self._wake_s = math.inf if wake_s is None else wake_s
        return self._wake_s <= now_s

    def sleep_s(self) -> float:
        """Return how long the EngineCore may wait for messages before it asks again whether there is anything to do."""
        now_s = time.monotonic()
        return min(self._wake_s - now_s, self._tokens.rest(now_s))
