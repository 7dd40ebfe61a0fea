"""What vLLM's own `LLM.generate` and `LLM.chat` say, for comparison.

`Reference` runs this file as a program in the engine's Python, so that vLLM is imported in a process of its own, and
at the same time as whatever the test does meanwhile.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, as text, token ids or messages, and the fields of vLLM's `SamplingParams`."""

    prompt: str | list[int] | list[dict[str, str]]
    sampling: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """One text of an answer; `logprobs` maps the token ids of each position, when the question asked for them."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, float]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a question: as many texts as `n` asks for."""

    prompt_token_ids: list[int]
    texts: list[Text]


class Reference:
    """vLLM at work on some questions in float32; use it as a context, which ends the process."""

    def __init__(self, model: Path, questions: Sequence[Question], *, kv_bytes: int) -> None:
        self._answers: list[Answer] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.llm_reference"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        asked = [dataclasses.asdict(question) for question in questions]
        assert self._process.stdin is not None
        with self._process.stdin as task:
            json.dump({"model": str(model), "kv_bytes": kv_bytes, "questions": asked}, task)
        self._process.stdin = None

    def answers(self, timeout_s: float) -> list[Answer]:
        """Wait for the answers, in the order of the questions."""
        if self._answers is None:
            told, _ = self._process.communicate(timeout=timeout_s)
            self._log.seek(0)
            assert self._process.returncode == 0, self._log.read()[-4000:]
            self._answers = [
                Answer(prompt_token_ids=answer["prompt_token_ids"], texts=[_text_of(text) for text in answer["texts"]])
                for answer in json.loads(told)
            ]
        return self._answers

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def _text_of(told: dict[str, Any]) -> Text:
    logprobs = told.pop("logprobs")
    if logprobs is not None:
        logprobs = [{int(token_id): value for token_id, value in position.items()} for position in logprobs]
    return Text(logprobs=logprobs, **told)


def main() -> None:
    """Answer the task on standard input."""
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
    results: list[Any] = [None] * len(task["questions"])
    for ask, kind in ((engine.generate, "prompt"), (engine.chat, "messages")):
        asked = [(at, *parts) for at, question in enumerate(task["questions"]) if (parts := _parts(question, kind))]
        sampling = [vllm.SamplingParams(**fields) for _, _, fields in asked]
        answers = ask([prompt for _, prompt, _ in asked], sampling, use_tqdm=False) if asked else []
        for (at, _, _), result in zip(asked, answers, strict=True):
            results[at] = _told(result)
    with os.fdopen(answer, "w") as out:
        json.dump(results, out)


def _parts(question: dict[str, Any], kind: str) -> tuple[Any, dict[str, Any]] | None:
    """Return the prompt as vLLM takes it and the sampling, when the question is of this kind."""
    prompt = question["prompt"]
    is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    if is_chat != (kind == "messages"):
        return None
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif not is_chat:
        prompt = {"prompt_token_ids": prompt}
    sampling = question["sampling"]
    if "logit_bias" in sampling:  # JSON has made texts of its keys
        sampling["logit_bias"] = {int(token_id): bias for token_id, bias in sampling["logit_bias"].items()}
    return prompt, sampling


def _told(result: Any) -> dict[str, Any]:
    texts = [
        {
            "token_ids": list(output.token_ids),
            "text": output.text,
            "finish_reason": output.finish_reason,
            "logprobs": output.logprobs
            and [{token_id: entry.logprob for token_id, entry in position.items()} for position in output.logprobs],
        }
        for output in result.outputs
    ]
    return {"prompt_token_ids": list(result.prompt_token_ids), "texts": texts}


if __name__ == "__main__":
    main()
