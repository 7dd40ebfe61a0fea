"""Tell what a machine holds that a test can leave behind: `python3 leftovers.py` prints it as JSON.

Runs in the guest before the tests and after them; what is there only after was left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

CGROUPS: Final = Path("/sys/fs/cgroup")
PINS: Final = Path("/sys/fs/bpf")
CORES: Final = Path("/var/crash")
PACKAGE: Final = "seedance"
SYSTEMDS_OWN: Final = "sd_"
"""How the names of systemd's BPF programs begin: they come and go with its units."""

State = dict[str, list[str]]


def left_behind(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each thing that is there only after."""
    return [f"{kind}: {thing}" for kind in after for thing in after[kind] if thing not in before.get(kind, ())]


def qdiscs(listing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `tc -json qdisc show` as lines; those that every device has for want of another are no one's."""
    return [
        f"{entry['kind']} on {entry.get('dev', '?')}"
        for entry in listing
        if entry["kind"] != "noqueue" and not (entry.get("root") and entry["handle"] == "0:")
    ]


def programs(listing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `bpftool --json prog show` as lines, without systemd's own."""
    return [
        f"{entry['type']} {name} (id {entry['id']})"
        for entry in listing
        if not (name := entry.get("name", "")).startswith(SYSTEMDS_OWN)
    ]


def state() -> State:
    """Return what there is now, by kind."""
    return {
        "cgroup": [str(path) for path in sorted(CGROUPS.glob(f"{PACKAGE}*/**/"))],
        "device": [entry["ifname"] for entry in listed("ip", "-json", "link", "show")],
        "qdisc": qdiscs(listed("tc", "-json", "qdisc", "show")),
        "network namespace": [entry["name"] for entry in listed("ip", "-json", "netns", "list")],
        "pin": [str(path) for path in sorted(PINS.rglob("*"))],
        "BPF program": programs(listed("bpftool", "--json", "prog", "show")),
        "failed unit": words("systemctl", "list-units", "--failed", "--plain", "--no-legend"),
        "process": words("ps", "-C", f"{PACKAGE}d", "-o", "comm="),
        "core dump": [str(path) for path in sorted(CORES.glob("core.*"))],
    }


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def listed(*command: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output(*command) or "[]")
    return found


def words(*command: str) -> list[str]:
    """Return the first word of each line."""
    return [line.split()[0] for line in output(*command).splitlines() if line.strip()]


if __name__ == "__main__":
    json.dump(state(), sys.stdout)
