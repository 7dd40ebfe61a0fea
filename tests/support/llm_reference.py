"""What vLLM's own `LLM.generate` says, for comparison: run as a program, in the engine's Python.

Standard input holds JSON: {"model": …, "kv_bytes": …, "prompts": [[token ids], …], "max_tokens": …}; standard output
gets the token ids of each greedy answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    """Answer the one request of standard input."""
    answer = os.dup(1)
    os.dup2(2, 1)  # vLLM writes its log to standard output
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    task = json.load(sys.stdin)
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=task["kv_bytes"],
        max_num_seqs=16,
        seed=0,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=task["max_tokens"])
    prompts = [{"type": "token", "prompt_token_ids": token_ids} for token_ids in task["prompts"]]
    results = engine.generate(prompts, sampling, use_tqdm=False)
    with os.fdopen(answer, "w") as out:
        json.dump([list(result.outputs[0].token_ids) for result in results], out)


if __name__ == "__main__":
    main()
