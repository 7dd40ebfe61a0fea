"""Long prompts beside live streams: do the streams, or the gateway's health, wait while eight are tokenised?

    python -m bench.prompts [--streams 1000] [--prompts 8] [--prompt-tokens 200000] [--rounds 3] [--tokenizer DIR]

The whole daemon with its synthetic engine, which reads prompts with a real model's tokenizer. Streams run throughout;
watched alone, then while another tenant sends its prompts, then while their own does. Progress goes to standard error,
raw samples into the build folder, and the last line of standard output is one JSON object; `README.md` in this folder
explains its keys.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from bench.frontend import PROMPT_WORDS
from bench.openai_servers import MODEL, PATH
from bench.processes import BenchError, add_core_arguments
from bench.program import command_line, run, started
from bench.report import (
    Spread,
    draw,
    machine,
    percentile,
    publish,
    rounded,
    save,
    say,
    spread,
    versions,
)
from bench.synthetic import Clients, SyntheticServer, raise_descriptors, request

TOKENS_PER_S: Final = 20
LIVE, OTHER = 0, 1
WHOSE: Final = {"other": OTHER, "same": LIVE}
"""Whose prompts: the tenant's that has no streams, and the one's with the streams."""
HEALTH_EVERY_S: Final = 0.01
SETTLE_S: Final = 3.0
ANSWER_S: Final = 300.0
DISTRIBUTIONS: Final = ("msgspec", "tokenizers")


class Phase(msgspec.Struct, frozen=True):
    """What was seen meanwhile: times between two messages of a stream, and until the gateway told its health."""

    seconds: float
    messages: int
    gap_p50_us: int
    gap_p99_us: int
    gap_max_us: int
    health_p99_us: int
    health_max_us: int


class Round(msgspec.Struct, frozen=True):
    """One round; the phases with prompts by whose they were."""

    alone: Phase
    beside: dict[str, Phase]


def text_of(tokenizer: Tokenizer, tokens: int) -> str:
    """Return a text of at least so many tokens, and a few more."""
    sample = 100
    words = PROMPT_WORDS + " "
    each = len(tokenizer.encode(words * sample, add_special_tokens=False).ids) / sample
    return words * (1 + int(1.005 * tokens / each))  # where two words meet there may be a token less


class Prompts:
    """Clients that send one prompt each, all at once."""

    def __init__(self, server: SyntheticServer, tenant: int, body: bytes, count: int) -> None:
        self._host, _, port = server.address(tenant).rpartition(":")
        self._port = int(port)
        self._headers = {"Content-Type": "application/json", **server.headers(tenant)}
        self._body = body
        self.prompt_tokens: list[int] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", PATH, self._body, self._headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status == http.HTTPStatus.OK:
                self.prompt_tokens.append(json.loads(text)["usage"]["prompt_tokens"])
            else:
                self.failures.append(f"{answer.status} {text[:200]}")
        except OSError as exc:
            self.failures.append(str(exc))
        finally:
            connection.close()

    def all_answered(self) -> bool:
        """Return whether all have been. Raises BenchError when one was not answered well."""
        if self.failures:
            raise BenchError(f"cannot go on: a prompt was answered {self.failures[0]}")
        return not any(thread.is_alive() for thread in self._threads)


def watch(server: SyntheticServer, streams: Clients, is_over: Callable[[float], bool]) -> Phase:
    """Watch streams and health until `is_over(seconds so far)`."""
    connection = http.client.HTTPConnection(server.address(LIVE), timeout=ANSWER_S)
    health_us: list[int] = []
    streams.begin("gaps")
    begun_s = time.monotonic()
    while not is_over(time.monotonic() - begun_s):
        asked_ns = time.monotonic_ns()
        connection.request("GET", "/healthz")
        if connection.getresponse().read() and asked_ns:
            health_us.append((time.monotonic_ns() - asked_ns) // 1000)
        time.sleep(HEALTH_EVERY_S)
    seconds = time.monotonic() - begun_s
    gaps_us = streams.take("gaps")
    connection.close()
    if not gaps_us or not health_us:
        raise BenchError("cannot go on: nothing arrived while the streams were watched")
    return Phase(
        seconds=seconds,
        messages=len(gaps_us),
        gap_p50_us=percentile(gaps_us, 50),
        gap_p99_us=percentile(gaps_us, 99),
        gap_max_us=max(gaps_us),
        health_p99_us=percentile(health_us, 99),
        health_max_us=max(health_us),
    )


def run_round(server: SyntheticServer, streams: Clients, body: bytes, arguments: argparse.Namespace) -> Round:
    """Watch the streams alone, then beside the prompts of each tenant."""
    alone = watch(server, streams, lambda seconds: seconds >= arguments.seconds)
    beside = {}
    for whose, tenant in WHOSE.items():
        prompts = Prompts(server, tenant, body, arguments.prompts)
        beside[whose] = watch(server, streams, lambda _, prompts=prompts: prompts.all_answered())  # type: ignore[misc]
        if min(prompts.prompt_tokens) < arguments.prompt_tokens:
            raise BenchError(f"cannot go on: a prompt has {min(prompts.prompt_tokens)} tokens only")
        time.sleep(SETTLE_S)
    return Round(alone, beside)


def summary(rounds: Sequence[Round], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {
        "streams": arguments.streams,
        "prompts": arguments.prompts,
        "prompt_tokens": arguments.prompt_tokens,
        "gap_p99_ms_alone": median([one.alone.gap_p99_us / 1e3 for one in rounds]),
        "health_p99_ms_alone": median([one.alone.health_p99_us / 1e3 for one in rounds]),
    }
    for whose in WHOSE:
        beside = [one.beside[whose] for one in rounds]
        growth = spread([(one.beside[whose].gap_p99_us - one.alone.gap_p99_us) / 1e3 for one in rounds])
        result |= {
            f"gap_p99_ms_{whose}": median([phase.gap_p99_us / 1e3 for phase in beside]),
            f"gap_p99_growth_ms_{whose}": rounded(growth.median),
            f"gap_p99_growth_ms_{whose}_quartiles": [rounded(growth.low), rounded(growth.high)],
            f"gap_max_ms_{whose}": median([phase.gap_max_us / 1e3 for phase in beside]),
            f"health_p99_ms_{whose}": median([phase.health_p99_us / 1e3 for phase in beside]),
            f"prompts_s_{whose}": median([phase.seconds for phase in beside]),
        }
    return result | {"machine": machine(), "versions": versions(DISTRIBUTIONS)}


def median(samples: Sequence[float]) -> float:
    """Return the median, for people."""
    return rounded(spread(samples).median)


def picture(path: Path, rounds: Sequence[Round]) -> None:
    """Draw the times."""

    def panel(field: str) -> dict[str, dict[str, Spread]]:
        bars = {"alone": spread([getattr(one.alone, field) / 1e3 for one in rounds])}
        for whose in WHOSE:
            bars[f"prompts of the {whose} tenant"] = spread([getattr(one.beside[whose], field) / 1e3 for one in rounds])
        return {"p99": bars}

    draw(path, [("Between tokens", "ms", panel("gap_p99_us")), ("/healthz", "ms", panel("health_p99_us"))])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Tokenise long prompts beside live streams")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of the streams alone")
    parser.add_argument("--tokenizer", type=Path, help="a model's directory; the test suite's tiny model without it")
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the measurement and print its result."""
    arguments = parse_arguments()
    raise_descriptors()
    model_dir: Path = (arguments.tokenizer or tiny_model()).resolve()
    text = text_of(Tokenizer.from_file(str(model_dir / "tokenizer.json")), arguments.prompt_tokens)
    body = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 1}).encode()
    tables = {
        "engine": {"max_model_len": 2 * arguments.prompt_tokens},
        "engine.synthetic": {"tokens_per_s": TOKENS_PER_S, "tokenizer": str(model_dir)},
    }
    rounds = []
    with ExitStack() as stack:
        most = arguments.streams + arguments.prompts
        server = SyntheticServer(arguments.build, arguments.server_cores, len(WHOSE), most, tables)
        stack.enter_context(started(server))
        streams = Clients(server, [arguments.streams], arguments.build, arguments.client_cores, "prompts")
        stack.callback(streams.stop)
        streams.connect()
        streams.message(request())
        time.sleep(SETTLE_S)
        for number in range(arguments.rounds):
            one = run_round(server, streams, body, arguments)
            say(
                f"round {number + 1}: between tokens, p99, {one.alone.gap_p99_us / 1e3:.1f} ms alone; "
                + "; ".join(
                    f"{phase.gap_p99_us / 1e3:.1f} beside {arguments.prompts} prompts of the {whose} tenant in"
                    f" {phase.seconds:.1f} s, /healthz {phase.health_p99_us / 1e3:.1f}"
                    for whose, phase in one.beside.items()
                )
            )
            rounds.append(one)
    save(arguments.build / "prompts.json", {"machine": machine(), "rounds": rounds})
    picture(arguments.build / "prompts.png", rounds)
    publish("prompts", summary(rounds, arguments), arguments.build)


if __name__ == "__main__":
    run(main)
