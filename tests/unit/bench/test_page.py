from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.page import SECTIONS, load, render

MACHINE = {"cpu": "A processor", "cores": 2, "kernel": "6.18", "python": "3.11.7", "load_1min": 0.1}


def result(**figures: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-30",
        "command": "make bench-x",
        "machine": MACHINE,
        "versions": {"a": "1", "b": None},
        **figures,
    }


def test_figures_by_number_are_columns_in_order_with_their_quartiles() -> None:
    figures = result(
        cpu_us_per_token={"256": 27.4, "64": 35.0},
        cpu_ratio_vllm_rust={"64": 0.9, "256": 0.8},
        cpu_ratio_vllm_rust_quartiles={"64": [0.85, 0.95], "256": [0.7, 0.9]},
    )
    page = render({"frontend": figures}, {})
    assert "| streams | 64 | 256 |\n| --- | ---: | ---: |\n| ours, SSE | 35.0 | 27.4 |\n" in page
    assert "| SSE over vLLM's Rust | 0.9 (0.85–0.95) | 0.8 (0.7–0.9) |\n" in page


def test_figures_by_peer_are_lines() -> None:
    figures = result(
        throughput_ratio={"vllm-python": {"1": 1.1, "64": 1.5}, "vllm-rust": {"1": 1.0}},
        throughput_ratio_quartiles={"vllm-python": {"1": [1.0, 1.2]}},
    )
    page = render({"e2e": figures}, {})
    assert "| throughput, over vllm-python | 1.1 (1.0–1.2) | 1.5 |\n" in page
    assert "| throughput, over vllm-rust | 1.0 |  |\n" in page


def test_single_figures_have_one_column() -> None:
    page = render({"idle": result(connections=100_000, dropped=0)}, {})
    assert "|  |  |\n| --- | ---: |\n| connections | 100,000 |\n| dropped | 0 |\n" in page


def test_a_figure_deeper_down_is_found() -> None:
    page = render({"neighbour": result(plain={"ttft_p99_ratio": 3.5})}, {})
    assert "| to the first token, p99, vLLM's scheduler | 3.5 |" in page


def test_the_page_tells_when_where_and_how_it_was_measured() -> None:
    page = render({"wire": result(fm_bytes_per_token=22.1)}, {"wire": "performance/wire.png"})
    assert "2026-11-30, A processor, 2 cores, Linux 6.18, Python 3.11.7, a 1.\n\n```sh\nmake bench-x\n```\n" in page
    assert "![Bytes for a token](performance/wire.png)\n" in page


def test_what_makes_figures_doubtful_is_told() -> None:
    assert "Warning: the client was busy.\n" in render({"fanout": result(warnings=["the client was busy"])}, {})


def test_what_was_not_measured_is_said_so() -> None:
    page = render({}, {})
    assert all(
        f"## {section.heading}\n\nNot measured yet: `make bench-{section.name}`.\n" in page for section in SECTIONS
    )


def test_results_are_loaded_by_name(tmp_path: Path) -> None:
    (tmp_path / "wire.result.json").write_text(json.dumps(result(fm_bytes_per_token=22.1)))
    (tmp_path / "wire.json").write_text("{}")
    assert load(tmp_path) == {"wire": result(fm_bytes_per_token=22.1)}
