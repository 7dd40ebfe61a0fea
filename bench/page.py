"""Write `docs/performance.md` from the results that the comparisons have left: nothing in it is typed by hand.

    python -m bench.page [--build build/bench] [--output docs/performance.md]

A result says itself when, where and by which command it was measured. Pictures are copied beside the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.million import on_paper
from bench.report import BUILD, QUARTILES, RESULT, say

Result = Mapping[str, Any]


class Row(msgspec.Struct, frozen=True):
    """A figure: what the page calls it, and its key; "a.b" is b in a."""

    label: str
    key: str


class Section(msgspec.Struct, frozen=True):
    """One comparison: its name, a heading, what is compared, what the columns count, and the figures."""

    name: str
    heading: str
    text: str
    columns: str
    rows: tuple[Row, ...]


SECTIONS: Final = (
    Section(
        "frontend",
        "Processor time for a token",
        "All processes of a server but its engine core, µs for each token, and ours over theirs. Three doors of ours:"
        " SSE, FM with one stream in each session, and FM with 16.",
        "streams",
        (
            Row("ours, SSE", "cpu_us_per_token"),
            Row("ours, FM", "cpu_us_per_token_fm"),
            Row("ours, FM, 16 in a session", "cpu_us_per_token_fm_16"),
            Row("vLLM, Python front end", "cpu_us_per_token_vllm_python"),
            Row("vLLM, Rust front end", "cpu_us_per_token_vllm_rust"),
            Row("SSE over vLLM's Python", "cpu_ratio_vllm_python"),
            Row("SSE over vLLM's Rust", "cpu_ratio_vllm_rust"),
            Row("FM over vLLM's Rust", "cpu_ratio_fm_vllm_rust"),
            Row("FM over our SSE", "cpu_ratio_fm_sse"),
            Row("FM, 16 in a session, over our SSE", "cpu_ratio_fm_16_sse"),
        ),
    ),
    Section(
        "e2e",
        "End to end",
        "`vllm-rs bench serve`, 32 tokens in and 128 out, ours over theirs: more is better for throughput, less for the"
        " others.",
        "requests at once",
        (
            Row("throughput", "throughput_ratio"),
            Row("between tokens, p99", "itl_p99_ratio"),
            Row("to the first token, median", "ttft_median_ratio"),
            Row("throughput, eight tenants", "throughput_ratio_8_tenants"),
            Row("between tokens, p99, eight tenants", "itl_p99_ratio_8_tenants"),
            Row("to the first token, median, eight tenants", "ttft_median_ratio_8_tenants"),
        ),
    ),
    Section(
        "wire",
        "Bytes for a token",
        "What a server sends for a whole answer, by its tokens; all doors sent the same text.",
        "bytes",
        (
            Row("FM", "fm_bytes_per_token"),
            Row("JSON WebSocket", "json_bytes_per_token"),
            Row("SSE", "sse_bytes_per_token"),
            Row("vLLM's SSE, Python", "vllm_sse_bytes_per_token"),
            Row("vLLM's SSE, Rust", "vllm_rust_sse_bytes_per_token"),
            Row("of which text", "by_door.fm.text_bytes_per_token"),
        ),
    ),
    Section(
        "fanout",
        "Messages to many connections",
        "Our worker, from the engine's channel to the socket, beside a C server that only sends, and Python servers.",
        "connections",
        (
            Row("messages/s over the C bound", "ratio_c_liburing"),
            Row("messages/s over the best Python server", "ratio_best_python"),
            Row("messages/s over C on epoll", "ratio_c_epoll"),
            Row("messages/s over `aiohttp`", "ratio_aiohttp"),
            Row("messages/s over `picows`", "ratio_picows"),
            Row("messages/s over `socketify`", "ratio_socketify"),
            Row("step to socket, p99, µs", "step_to_socket_p99_us"),
            Row("step to socket, p99, µs, C bound", "step_to_socket_p99_us_c_liburing"),
        ),
    ),
    Section(
        "streams",
        "Streams at a steady pace",
        "The whole daemon with its synthetic engine: from the engine's step to the message of each stream, and from the"
        " last token to the last byte.",
        "",
        (
            Row("streams", "streams"),
            Row("tokens/s of all", "tokens_per_s"),
            Row("for, s", "seconds"),
            Row("last byte after the last token, ms", "last_byte_ms"),
            Row("step to message, median, ms", "lag_p50_ms"),
            Row("step to message, p99, ms", "lag_p99_ms"),
            Row("step to message, longest, ms", "lag_max_ms"),
        ),
    ),
    Section(
        "prompts",
        "Long prompts beside live streams",
        "Streams watched alone, and while prompts are tokenised for another tenant, then for their own.",
        "",
        (
            Row("live streams", "streams"),
            Row("prompts at once", "prompts"),
            Row("tokens of each", "prompt_tokens"),
            Row("between tokens, p99, alone, ms", "gap_p99_ms_alone"),
            Row("between tokens, p99, growth beside another tenant's, ms", "gap_p99_growth_ms_other"),
            Row("between tokens, p99, growth beside their own tenant's, ms", "gap_p99_growth_ms_same"),
            Row("`/healthz`, p99, beside another tenant's, ms", "health_p99_ms_other"),
            Row("`/healthz`, p99, beside their own tenant's, ms", "health_p99_ms_same"),
            Row("until all of another tenant's are answered, s", "prompts_s_other"),
            Row("until all of their own tenant's are answered, s", "prompts_s_same"),
        ),
    ),
    Section(
        "idle",
        "Idle WebSockets",
        "Held by the whole daemon with its synthetic engine while others stream, with and without them. With "
        "`--real-time` in the command, daemon and clients went before the machine's other processes.",
        "",
        (
            Row("connections", "connections"),
            Row("tenants", "tenants"),
            Row("of user space each, bytes", "user_bytes_per_connection"),
            Row("of the kernel each, bytes", "kernel_bytes_per_connection"),
            Row("processor time of the daemon each, µs/s", "rest_cpu_us_per_connection_s"),
            Row("accepted/s", "accepts_per_s"),
            Row("streams beside them", "streams"),
            Row("between tokens, p99, without, ms", "gap_p99_ms_without"),
            Row("between tokens, p99, with, ms", "gap_p99_ms_with"),
            Row("with over without", "gap_p99_ratio"),
            Row("processors taken by the machine's other processes, without", "others_cpu_share_without"),
            Row("processors taken by the machine's other processes, with", "others_cpu_share_with"),
            Row("held, s", "held_s"),
            Row("dropped", "dropped"),
        ),
    ),
    Section(
        "scheduler",
        "The token scheduler",
        "Beside vLLM's own, in the steps of a real engine.",
        "",
        (
            Row("throughput over vLLM's", "throughput_ratio_plain"),
            Row("shares of engine time, largest error", "share_error"),
            Row("time of a step, µs", "policy_us_per_step"),
        ),
    ),
    Section(
        "neighbour",
        "A tenant's neighbour",
        "Short requests beside a flood of long ones, over the same requests alone.",
        "",
        (
            Row("to the first token, p99", "ttft_p99_ratio"),
            Row("between tokens, p99", "itl_p99_ratio"),
            Row("the flood's work, of what was left for it", "flooder_share_of_rest"),
            Row("to the first token, p99, vLLM's scheduler", "plain.ttft_p99_ratio"),
            Row("between tokens, p99, vLLM's scheduler", "plain.itl_p99_ratio"),
            Row("the flood's work, vLLM's scheduler", "plain.flooder_share_of_rest"),
        ),
    ),
    Section(
        "survive",
        "Deaths",
        "How long the stream that waits longest stands still, and what is lost, when something dies under fifty"
        " streams: real engines with a tiny model, the daemon's processes with the synthetic engine.",
        "",
        (
            Row("stands still, s", "stall_s"),
            Row("the first to go on, s", "first_stall_s"),
            Row("frames sent again", "frames_resent"),
            Row("lost", "lost"),
            Row("doubled", "doubled"),
            Row("cut to the next text, ms", "resume_ms"),
            Row("held of a stream whose client is away, bytes", "bytes_per_stream"),
        ),
    ),
    Section(
        "uring",
        "Options of io_uring",
        "A server in C with one option more or less, over the same server with a ring as our worker's. Loads, with"
        " bytes: a message to each of many connections (fan), question and answer (echo), data to be received (take).",
        "by the default's",
        (Row("processor time", "cpu_ratio"), Row("p99 of an answer", "p99_ratio")),
    ),
    Section(
        "isolation",
        "Limits that the kernel keeps",
        "Relative errors of a tenant's limits in an emulated guest, and what a neighbour feels of tenants at theirs.",
        "",
        (
            Row("limit", "set"),
            Row("measured", "measured"),
            Row("error", "error"),
            Row("a neighbour's p99 between tokens, growth", "neighbour_p99_loss"),
        ),
    ),
)

HEAD: Final = """# Performance

Written by `make bench-page` from the results of the comparisons; `bench/README.md` says what each figure means and how
the contenders take turns. A figure is a median, with its quartiles in brackets. Ratios are of runs of one round.
"""


def value_at(result: Result, key: str) -> Any:
    """Return what is at a key such as "a.b", None where there is nothing."""
    found: Any = result
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the single figures of a value and the keys that lead to them."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from leaves(below, (*path, str(key)))
    elif value is not None:
        yield path, value


def shown(figure: Any, quartiles: Any) -> str:
    """Return a figure as the page has it."""
    text = f"{figure:,}" if isinstance(figure, int | float) else str(figure)
    if isinstance(quartiles, Sequence) and len(quartiles) == 2:
        text += f" ({quartiles[0]:,}–{quartiles[1]:,})"
    return text


def lines_of(result: Result, rows: Sequence[Row]) -> list[tuple[str, dict[str, str]]]:
    """Return the lines of a table: label, and cells by column. A figure by peer and number is a line for each peer."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        quartiles = dict(leaves(value_at(result, row.key + QUARTILES)))
        for path, figure in leaves(value_at(result, row.key)):
            label = ", over ".join((row.label, *path[:-1]))
            lines.setdefault(label, {})[path[-1] if path else ""] = shown(figure, quartiles.get(path))
    return list(lines.items())


def order(columns: set[str]) -> list[str]:
    """Return columns in order: numbers by size, before names."""
    return sorted(columns, key=lambda column: (not column.isdigit(), int(column) if column.isdigit() else 0, column))


def table(result: Result, section: Section) -> str:
    """Return a table in Markdown; "" where the result has none of the figures."""
    lines = lines_of(result, section.rows)
    columns = order({column for _, cells in lines for column in cells})
    if not lines:
        return ""
    head = f"| {section.columns} | " + " | ".join(columns) + " |"
    rule = "| --- |" + " ---: |" * len(columns)
    body = [f"| {label} | " + " | ".join(cells.get(column, "") for column in columns) + " |" for label, cells in lines]
    return "\n".join([head, rule, *body]) + "\n"


def origin(result: Result) -> str:
    """Return when, where and with what a result was measured."""
    machine = result["machine"]
    parts = [str(result["date"]), f"{machine['cpu']}, {machine['cores']} cores"]
    parts += [f"Linux {machine['kernel']}", f"Python {machine['python']}"]
    parts += [f"{name} {version}" for name, version in result.get("versions", {}).items() if version]
    return ", ".join(parts) + f".\n\n```sh\n{result['command']}\n```\n"


def render(results: Mapping[str, Result], pictures: Mapping[str, str]) -> str:
    """Return the page; `results` and the places of `pictures` are by the name of a comparison."""
    blocks = [HEAD]
    for section in SECTIONS:
        blocks.append(f"## {section.heading}\n")
        result = results.get(section.name)
        if result is None:
            blocks.append(f"Not measured yet: `make bench-{section.name}`.\n")
            continue
        blocks += [f"{section.text}\n", table(result, section)]
        if section.name in pictures:
            blocks.append(f"![{section.heading}]({pictures[section.name]})\n")
        blocks += [f"Warning: {warning}.\n" for warning in result.get("warnings", ())]
        blocks.append(origin(result))
        if section.name == "idle":
            blocks.append(on_paper(result))
    return "\n".join(block for block in blocks if block)


def load(build: Path) -> dict[str, Result]:
    """Read all results of a build folder."""
    return {path.name.removesuffix(RESULT): json.loads(path.read_text()) for path in sorted(build.glob(f"*{RESULT}"))}


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/performance.md; see bench/README.md.")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--output", type=Path, default=Path("docs/performance.md"))
    options = parser.parse_args()
    results = load(options.build)
    folder = options.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name in results:
        if (source := options.build / f"{name}.png").exists():
            shutil.copyfile(source, folder / source.name)
            pictures[name] = f"{folder.name}/{source.name}"
    options.output.write_text(render(results, pictures))
    say(f"written: {options.output}, from {len(results)} results")


if __name__ == "__main__":
    main()
