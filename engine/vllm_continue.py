"""Requests of vLLM that begin with a part of their output: hooks for the three places that must know of it.

* The scheduler's request takes the tokens as its output, so that all that counts output counts them: `max_tokens`,
  `min_tokens`, the context. They are read together with the prompt, as after a preemption.
* The model runner's state does the same for what looks at output when it samples: penalties, `min_tokens`. Its V2 takes
  them from the scheduler by itself; V1 has them in `CachedRequestState`, which is made for each new request.
* A grammar is fed with them as soon as it is compiled.

So greedy output goes on as it would have. Random numbers begin anew: those of a seed by another one made of seed and
place, or its text would be drawn with the numbers of its beginning.

Nothing of vLLM is imported: who imports it hands the classes over.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from seedance.engine.vllm_sampling import EMITTED_KEY


def emitted_token_ids(sampling_params: Any) -> Sequence[int]:
    """Return what a request has emitted elsewhere."""
    extra = sampling_params and sampling_params.extra_args
    token_ids: Sequence[int] = extra.get(EMITTED_KEY, ()) if extra else ()
    return token_ids


def begin_behind(request: Any) -> None:
    """Give a request of the scheduler, fresh from the wire, the output that it has already."""
    if emitted := emitted_token_ids(request.sampling_params):
        request.append_output_token_ids(emitted)
        # vLLM holds that no more than a prompt can be cached when a request is read for the first time.
        request.prefill_stats = None


def begin_states_behind(state_class: Any) -> None:
    """Have states of the model runner begin with the output that their requests have already."""
    initialise = state_class.__post_init__

    def post_init(state: Any) -> None:
        initialise(state)
        if emitted := emitted_token_ids(state.sampling_params):
            state.output_token_ids.extend(emitted)
            if state.generator is not None:
                state.generator.manual_seed(seed_at(state.sampling_params.seed, len(emitted)))

    state_class.__post_init__ = post_init


def seed_at(seed: int, place: int) -> int:
    """Return the seed for the output from a place on."""
    return zlib.crc32(b"%d at %d" % (seed, place))


def replay(grammar: Any, request: Any) -> Any:
    """Feed a fresh grammar with what its request has emitted already. Raises ValueError when it does not fit."""
    emitted = emitted_token_ids(request.sampling_params)
    if emitted and not grammar.accept_tokens(request.request_id, list(emitted)):
        raise ValueError("the output so far does not fit the grammar")
    return grammar
