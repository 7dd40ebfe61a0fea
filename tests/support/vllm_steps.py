"""vLLM's own schedulers with ours over them, and no model: its steps are answered by arithmetic.

`python -m support.vllm_steps SEED...` runs random loads in each of MODES, each load until all requests have ended, and
prints what became of it as a line of JSON. A token is a function of its request and its place, so that one that is
lost, repeated or out of order shows. In the mode `async` two steps are under way at once, as vLLM has it on a GPU.
"""

from __future__ import annotations

import array
import json
import random
import sys
import time
from collections import deque
from typing import Any, Final

import torch
from support.tiny_model import VOCAB_SIZE, tiny_model
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from seedance.engine.ledger import Ledger
from seedance.engine.scheduling import TenantLimits
from seedance.engine.vllm_core import scheduler_class
from seedance.engine.vllm_wire import QUOTA_KEY

MODES: Final = ("plain", "async")
BLOCK: Final = 16
BLOCKS: Final = 60
SLOTS: Final = 8
TENANTS: Final = 4
REQUESTS: Final = 120
TIME_S: Final = 60.0


def make_scheduler(is_async: bool, ledger: Ledger) -> Any:
    arguments = AsyncEngineArgs(
        model=str(tiny_model()),
        dtype="float32",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=256,
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 24,
        block_size=BLOCK,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.block_size = BLOCK
    config.scheduler_config.async_scheduling = is_async
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256)
    return scheduler_class(config.scheduler_config, ledger, "of the test", 0.03)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def token(key: int, place: int) -> int:
    """Return the token of a request at a place of its output; none ends it."""
    return 10 + (key * 7919 + place * 31) % (VOCAB_SIZE - 10)


class Load:
    """A random load on one scheduler, and what came out."""

    def __init__(self, is_async: bool, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = Ledger.create()
        self.ledger.set_limits(1, TenantLimits(weight=4.0, priority=1))
        self.ledger.set_limits(2, TenantLimits(tokens_per_s=2_000.0))
        self.ledger.set_limits(3, TenantLimits(share=0.3))
        self.ledger.set_limits(4, TenantLimits(kv_share=0.3))
        self.ledger.limits_changed()
        self.scheduler = make_scheduler(is_async, self.ledger)
        self.scheduler.fewest_packed = 3
        self.packed = 0
        self.depth = 2 if is_async else 1
        self.steps: deque[tuple[Any, dict[str, tuple[int, int]]]] = deque()
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.wanted: dict[int, int] = {}
        self.out: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.paused: set[int] = set()
        self.sleeps = self.overlaps = 0

    def run(self) -> dict[str, Any]:
        ends_s = time.monotonic() + TIME_S
        while len(self.ends) < REQUESTS:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{len(self.ends)} of {REQUESTS} requests have ended")
            self.change()
            self.turn()
        while self.scheduler.has_requests() or self.steps:
            self.turn()
        return self.result()

    def change(self) -> None:
        """Do one of the things that can happen between two steps, or none."""
        what = self.random.random()
        alive = [key for key in self.wanted if key not in self.ends]
        if what < 0.1 and len(self.wanted) < REQUESTS:
            self.submit(len(self.wanted))
        elif what < 0.105 and alive:
            key = self.random.choice(alive)
            self.scheduler.finish_requests([self.name(key)], RequestStatus.FINISHED_ABORTED)
            self.aborted.add(key)
            self.ends[key] = "aborted"
        elif what < 0.13 and alive:
            key = self.random.choice(alive)
            self.paused.add(key)
            self.ledger.set_paused(key, True)
        elif (what < 0.16 or len(self.wanted) == REQUESTS) and self.paused:
            key = self.paused.pop()
            self.ledger.set_paused(key, False)

    def name(self, key: int) -> str:
        return f"{key}.{key + 1}"

    def submit(self, key: int) -> None:
        tenant = self.random.randint(1, TENANTS)
        length = self.random.choice((3, 20, 100, 200))
        self.wanted[key] = self.random.choice((1, 5, 60, 120))
        # Prompts have beginnings in common, so that some of them are in the prefix cache.
        prompt = [11] * (length // 2) + [100 + key] * (length - length // 2)
        parameters = SamplingParams(max_tokens=self.wanted[key], temperature=0.0, ignore_eos=True)
        parameters.extra_args = {"row": tenant}
        request = Request(
            self.name(key), prompt, parameters, None, cache_salt=f"salt {tenant}", block_hasher=self.hasher
        )
        self.scheduler.add_request(request)

    def turn(self) -> None:
        """Be the EngineCore for one turn of its loop."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            places = {}
            for name in output.num_scheduled_tokens:
                request = scheduler.requests[name]
                if not request.is_prefill_chunk:
                    key = int(name.partition(".")[0])
                    places[name] = key, request.num_computed_tokens - request.num_prompt_tokens
            self.steps.append((output, places))
            if len(self.steps) < self.depth and output.num_scheduled_tokens:
                return
        elif not self.steps:
            self.sleeps += 1
            time.sleep(min(max(scheduler.sleep_s(), 0.0), 0.002))
            return
        self.overlaps += len(self.steps) > 1
        self.end_step(*self.steps.popleft())

    def end_step(self, output: Any, places: dict[str, tuple[int, int]]) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = [[token(*places[name])] if name in places else [] for name in names]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        for outputs in self.scheduler.update_from_output(output, answer).values():
            self.unpack(outputs.outputs)
            for item in outputs.outputs:
                key = int(item.request_id.partition(".")[0])
                assert key not in self.ends, "an output came after the last one"
                self.out.setdefault(key, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    quota = QUOTA_KEY in (item.trace_headers or {})
                    self.ends[key] = "quota" if quota else str(item.finish_reason)

    def unpack(self, outputs: list[Any]) -> None:
        """Take what is packed out of the outputs."""
        packed = [item for item in outputs if item.kv_transfer_params is not None]
        for item in packed:
            outputs.remove(item)
            singles = item.kv_transfer_params
            flat = iter(array.array("I", singles.pairs))
            serials = array.array("Q", singles.serials)
            for (key, token_id), serial in zip(zip(flat, flat, strict=True), serials, strict=True):
                assert f"{key}.{serial}" == self.name(key)
                assert key not in self.ends, "an output came after the last one"
                self.out.setdefault(key, []).append(token_id)
                self.packed += 1

    def result(self) -> dict[str, Any]:
        self.scheduler._tokens.tell(time.monotonic())
        statistics = [self.ledger.statistics(row) for row in range(1, TENANTS + 1)]
        wrong = [
            key
            for key, tokens in self.out.items()
            if tokens != [token(key, place) for place in range(len(tokens))]
            or (self.ends[key] == "length" and len(tokens) != self.wanted[key])
        ]
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "ends": {end: sum(end == other for other in self.ends.values()) for end in set(self.ends.values())},
            "wrong": wrong,
            "left": len(self.scheduler.requests) + sum(self.scheduler.get_request_counts()),
            "known": len(self.scheduler._tokens.policy._roster.requests) + len(self.scheduler._held),
            "blocks_in_use": BLOCKS - 1 - pool.get_num_free_blocks(),
            "kv_blocks": [entry.kv_blocks for entry in statistics if entry],
            "preemptions": sum(entry.preemptions for entry in statistics if entry),
            "held_s": [entry.held_s for entry in statistics if entry],
            "output_tokens": sum(entry.output_tokens for entry in statistics if entry),
            "packed": self.packed,
            "tokens": sum(map(len, self.out.values())),
            "sleeps": self.sleeps,
            "overlaps": self.overlaps,
        }


if __name__ == "__main__":
    for mode in MODES:
        for seed in sys.argv[1:]:
            print(json.dumps({"mode": mode, **Load(mode == "async", int(seed)).run()}))
