"""What our scheduler asks of vLLM's before it is used, and how it lets an EngineCore sleep; vLLM itself is in e2e."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from seedance.engine.vllm_scheduler import check_scheduler, let_sleep
from seedance.errors import EngineDead


class Request:
    def __init__(self) -> None:
        self.client_index = self.is_prefill_chunk = self.max_tokens = self.next_decode_eligible_step = 0
        self.num_computed_tokens = self.prefill_stats = self.request_id = self.sampling_params = self.status = 0

    num_tokens = num_output_tokens = 0

    def append_output_token_ids(self, token_ids: Any) -> None: ...


class Scheduler:
    def __init__(self) -> None:
        self.deferred_waiting = self.kv_cache_manager = self.max_model_len = self.max_num_active_reqs = 0
        self.max_num_scheduled_tokens = self.requests = self.running = self.waiting = 0

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> None: ...
    def _handle_blocked_waiting_request(self, request: Any) -> None: ...
    @staticmethod
    def _is_blocked_waiting_status(status: Any) -> None: ...
    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None: ...
    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> None: ...
    def add_request(self, request: Any) -> None: ...
    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...
    def get_request_counts(self) -> None: ...
    def has_finished_requests(self) -> None: ...
    def has_requests(self) -> None: ...
    def schedule(self, throttle_prefills: bool = False) -> None: ...
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...


class OtherField(Scheduler):
    def __init__(self) -> None:
        self.deferred_waiting = self.kv_cache_manager = self.max_model_len = self.max_num_active_reqs = 0
        self.max_num_scheduled_tokens = self.requests = self.waiting = 0


class OtherMethod(Scheduler):
    def _reserve_prefill_lookahead(self, request: Any, num_new_tokens: int) -> None: ...  # type: ignore[override]


class OtherRequest(Request):
    def __init__(self) -> None:
        self.request_id = 0


def test_the_scheduler_that_this_was_written_for_is_taken() -> None:
    check_scheduler(Scheduler, Request, "0.32.0")


@pytest.mark.parametrize(
    ("scheduler", "request_class", "text"),
    [
        (OtherField, Request, "its OtherField has no field 'running'"),
        (
            OtherMethod,
            Request,
            "has no method '_reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens",
        ),
        (Scheduler, OtherRequest, "its Scheduler has requests without 'client_index'"),
    ],
)
def test_another_one_is_refused_with_what_is_missing(scheduler: type, request_class: type, text: str) -> None:
    with pytest.raises(EngineDead) as refusal:
        check_scheduler(scheduler, request_class, "0.99.0")
    assert str(refusal.value).startswith("vLLM 0.99.0 schedules otherwise than 0.32.0, install that one: ")
    assert text in str(refusal.value)


class Sleeper:
    """A scheduler that says how long its core may sleep."""

    def __init__(self) -> None:
        self.pauses_s = [0.02, 0.0, 5.0]

    def sleep_s(self) -> float:
        return self.pauses_s.pop(0)


class Core:
    """An EngineCore's loop, as far as it waits."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.scheduler = Sleeper()
        self.took_s: list[float] = []
        self.got: list[str] = []

    def run_busy_loop(self) -> None:
        for at in range(4):
            begun_s = time.monotonic()
            if at == 2:
                self.input_queue.put_nowait("request")
            try:
                self.got.append(self.input_queue.get(block=at < 3))
            except queue.Empty:
                self.got.append("")
            self.took_s.append(time.monotonic() - begun_s)


def test_a_core_sleeps_as_long_as_its_scheduler_lets_it_and_not_through_a_message() -> None:
    class Sleeping(Core):
        pass

    let_sleep(Sleeping)
    core = Sleeping()
    core.run_busy_loop()
    assert core.got == ["", "", "request", ""]
    assert core.took_s[0] >= 0.02
    assert max(core.took_s) < 1
    assert core.scheduler.pauses_s == []
