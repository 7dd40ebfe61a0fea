"""The units of systemd: right by systemd's own judgement, and with a reason for every protection that is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

UNITS: Final = Path(__file__).resolve().parents[2] / "systemd"
NAMES: Final = ("seedanced.service", "seedanced.socket", "seedance.slice")
MAX_EXPOSURE: Final = 2.5
OFFLINE_VERSION: Final = 250
SUBGROUP_VERSION: Final = 254
"""systemd has `security --offline` since the one, and `DelegateSubgroup=` since the other."""


def systemd_version() -> int:
    if not shutil.which("systemd-analyze"):
        return 0
    printed = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.match(r"systemd (\d+)", printed)
    return int(match[1]) if match else 0


needs_systemd: Final = pytest.mark.skipif(
    systemd_version() < OFFLINE_VERSION, reason="no systemd-analyze of version 250 or newer"
)


def security(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", *options]
    return subprocess.run([*command, str(UNITS / NAMES[0])], capture_output=True, text=True, check=False)


def comments() -> str:
    lines = (UNITS / NAMES[0]).read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


def word_for(name: str) -> str:
    """Return how the unit's comments speak of a row of the report: `X=~Y` is about Y, anything else about itself.

    Of alternatives in brackets, such as `CAP_SET(UID|GID|PCAP)`, any will do; the word is a regular expression.
    """
    setting, _, taken = name.partition("=~")
    if not taken:
        return re.escape(setting.partition("/")[0])
    return taken if "(" in taken else re.escape(taken)


@needs_systemd
def test_the_units_are_right(tmp_path: Path) -> None:
    for name in NAMES:
        text = re.sub(r"/usr/bin/seedance\w+", "/bin/true", (UNITS / name).read_text())
        if systemd_version() < SUBGROUP_VERSION:
            text = re.sub(r"(?m)^DelegateSubgroup=.*\n", "", text)
        (tmp_path / name).write_text(text)
    units = [str(tmp_path / name) for name in NAMES]
    command = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", *units]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.returncode == 0


@needs_systemd
def test_the_exposure_is_low() -> None:
    result = security(f"--threshold={MAX_EXPOSURE * 10:.0f}")
    level = re.search(r"Overall exposure level for seedanced\.service: ([\d.]+)", result.stdout)
    assert level is not None, result.stderr
    assert float(level[1]) <= MAX_EXPOSURE
    assert result.returncode == 0


@needs_systemd
def test_every_missing_protection_has_its_reason_in_the_unit() -> None:
    rows: list[dict[str, Any]] = json.loads(security("--json=short").stdout)
    exposed = [str(row["name"]) for row in rows if row.get("exposure")]
    assert exposed
    said = comments()
    assert [name for name in exposed if not re.search(word_for(name), said)] == []
