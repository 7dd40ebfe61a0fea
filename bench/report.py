"""What both comparisons do with their figures: medians with their spread, the machine, files, a picture."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """A median and the quartiles around it, of so many samples."""

    median: float
    low: float
    high: float
    samples: int


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and the quartiles (by the inclusive method; of fewer than two samples, the sample itself)."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high, len(samples))


def percentile(samples: Sequence[int], percent: float) -> int:
    """Return the smallest sample that at least `percent` % of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def rounded(value: float) -> float:
    """Return a figure with four significant digits, for people."""
    return float(f"{value:.4g}")


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine to compare figures."""
    cpu = ""
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    if match:
        cpu = match[1]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each distribution, None where it is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def save(path: Path, samples: Any) -> None:
    """Write raw samples as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(samples), indent=1))
    say(f"raw samples: {path}")


def say(text: str) -> None:
    """Tell people how it goes; the result is the last line of standard output, this is not."""
    print(text, file=sys.stderr, flush=True)


def print_result(result: Mapping[str, Any]) -> None:
    """Print the one line of JSON that programs read."""
    sys.stderr.flush()
    print(json.dumps(result), flush=True)


def draw(path: Path, panels: Sequence[tuple[str, str, Mapping[str, Mapping[str, Spread]]]]) -> None:
    """Draw one panel of grouped bars each: (title, unit, group → bar → figure); left out without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        say("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False)
    for axis, (title, unit, groups) in zip(axes[0], panels, strict=True):
        bars = list(dict.fromkeys(bar for figures in groups.values() for bar in figures))
        width = 0.8 / max(len(bars), 1)
        for number, bar in enumerate(bars):
            present = [(at, figures[bar]) for at, figures in enumerate(groups.values()) if bar in figures]
            places = [at + (number - (len(bars) - 1) / 2) * width for at, _ in present]
            heights = [one.median for _, one in present]
            errors = [[one.median - one.low for _, one in present], [one.high - one.median for _, one in present]]
            axis.bar(places, heights, width, yerr=errors, label=bar, capsize=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    say(f"picture: {path}")
