"""Run a tracing tool: put the running kernel's offsets into its program, have BCC run it, show what it counts."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import click

from seedance.bpf import abi
from seedance.bpf.maps import HashMap, open_pinned
from seedance.bpf.observe_abi import HISTOGRAM_SLOTS
from seedance.bpf.offsets import KernelOffsets
from seedance.daemon.trace import _bcc, _headers
from seedance.errors import KernelError, SeedanceError

SYSTEM_PYTHON: Final = "/usr/bin/python3"
PINS: Final = "/sys/fs/bpf/seedance"
_BAR_WIDTH: Final = 40

_PRELUDE: Final = """
struct slot { u32 tenant; u32 slot; };
BPF_TABLE("hash", struct slot, u64, counts, 65536);

static __always_inline void count(u32 tenant, u64 passed_ns)
{
    u64 us = passed_ns / 1000;
    struct slot key = {.tenant = tenant, .slot = us ? bpf_log2l(us) - 1 : 0};

    if (key.slot > $last_slot)
        key.slot = $last_slot;
    counts.atomic_increment(key);
}

static __always_inline u64 read_pointer(u64 address)
{
    u64 value = 0;

    bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
    return value;
}

static __always_inline u32 tenant_of_mark(u64 address)
{
    u32 mark = 0;

    bpf_probe_read_kernel(&mark, sizeof(mark), (void *)address);
    return (mark & $mark_mask) == $mark_base ? mark & ~$mark_mask : 0;
}
"""


class Tool(NamedTuple):
    """A tracing program in BCC's C, which calls `count(tenant index, nanoseconds)`.

    In `text`, `$name` stands for the offset of a struct's field (`offsets`: name → struct, field), and `$pins` for the
    folder of the pinned maps, of which the tool needs `maps`. `noun` is what is counted, in the plural.
    """

    noun: str
    text: str
    offsets: Mapping[str, tuple[str, str]]
    maps: tuple[str, ...] = ()


def program(tool: Tool, pins: Path) -> str:
    """Return what BCC is to compile on this machine. Raises KernelError where the kernel has no BTF."""
    btf = KernelOffsets.of_kernel()
    try:
        offsets = {name: str(btf.offset(struct, field)) for name, (struct, field) in tool.offsets.items()}
    finally:
        btf.close()
    constants = {
        "last_slot": str(HISTOGRAM_SLOTS - 1),
        "mark_base": f"{abi.MARK_BASE:#x}U",
        "mark_mask": f"{abi.MARK_MASK:#x}U",
        "pins": str(pins),
    }
    return string.Template(_PRELUDE + tool.text).substitute(offsets, **constants)


def missing(tool: Tool, pins: Path) -> str:
    """Return "" where the tool can run, as far as files tell, else what is missing and what to do."""
    if os.geteuid():
        return "cannot trace: it needs root"
    for name in tool.maps:
        if not (pins / name).exists():
            return f"cannot trace: there is no '{pins / name}'; seedanced makes it when [kernel] observe is on"
    release = os.uname().release
    if _headers.find(release) is None and not _headers.BUILT_IN.exists():
        return (
            f"cannot trace: BCC needs kernel headers; `apt install linux-headers-{release}` brings them, and those of "
            "another kernel do"
        )
    return ""


def run(
    text: str, *, interval_s: float, count: int = 0, python: str = SYSTEM_PYTHON
) -> Generator[dict[int, list[int]], None, None]:
    """Yield a histogram of each tenant, by index, after each interval: of what came in that interval.

    Slots are those of `observe_abi`; without a `count` there is no end. Raises SeedanceError when BCC is missing or
    cannot run the program.
    """
    with tempfile.TemporaryDirectory(prefix="seedance-trace-") as folder:
        command, environment = [python, "-I", _bcc.__file__], _environment(Path(folder, "kernel"))
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        except OSError as error:
            raise SeedanceError(f"cannot trace: '{python}' does not start: {error.strerror}") from error
        with child:
            try:
                yield from _intervals(child, json.dumps({"text": text, "interval_s": interval_s, "count": count}))
            finally:
                child.terminate()


def render(name: str, noun: str, histogram: Sequence[int]) -> list[str]:
    """Return a tenant's histogram as lines for people."""
    total = sum(histogram)
    shares = ", ".join(f"p{share} < {_time(_percentile(histogram, share))}" for share in (50, 90, 99))
    filled = [slot for slot, seen in enumerate(histogram) if seen]
    largest = max(histogram)
    lines = [f"{name}: {total} {noun}, {shares}"]
    for slot in range(filled[0], filled[-1] + 1):
        bar = "#" * round(_BAR_WIDTH * histogram[slot] / largest)
        lines.append(f"  < {_time(slot):>8} |{bar:<{_BAR_WIDTH}}| {histogram[slot]}")
    return lines


def tenant_names(pins: Path) -> dict[int, str]:
    """Return the tenants' names by index, as the daemon has pinned them; none where it keeps no limits."""
    try:
        with open_pinned(pins / "tenant_limits") as limits:
            rows = HashMap(limits, ctypes.c_uint32, abi.TenantLimit).items()
            return {index: row.name.decode() for index, row in rows}
    except KernelError:
        return {}


def command_line(tool: Tool, about: str) -> click.Command:
    """Return the command line of a tool; `about` is its module's docstring."""

    @click.command(help=about)
    @click.option("--interval", default=1.0, type=click.FloatRange(min=0.1), help="seconds between looks")
    @click.option("--count", default=0, type=click.IntRange(min=0), help="looks; until interrupted without it")
    @click.option("--pins", default=PINS, show_default=True, help="folder of seedanced's maps")
    @click.option("--python", default=SYSTEM_PYTHON, show_default=True, help="interpreter that has BCC")
    def command(interval: float, count: int, pins: str, python: str) -> None:
        try:
            _show(tool, Path(pins), interval, count, python)
        except SeedanceError as error:
            raise click.ClickException(str(error)) from error

    return command


def main(tool: Tool, about: str) -> None:
    """Run a tool as a program of its own."""
    with contextlib.suppress(KeyboardInterrupt):
        command_line(tool, about)(prog_name=f"seedancectl trace {Path(sys.argv[0]).stem}")


def _show(tool: Tool, pins: Path, interval_s: float, count: int, python: str) -> None:
    if reason := missing(tool, pins):
        raise SeedanceError(reason)
    for histograms in run(program(tool, pins), interval_s=interval_s, count=count, python=python):
        names = tenant_names(pins)
        for index, histogram in sorted(histograms.items()):
            click.echo("\n".join(render(names.get(index, f"tenant {index}"), tool.noun, histogram)))
        click.echo(f"-- {sum(map(sum, histograms.values()))} {tool.noun} in {interval_s:g} s")


def _environment(folder: Path) -> dict[str, str]:
    """Return what tells BCC where headers are, if it would not find them; puts them together in a new folder then."""
    release = os.uname().release
    headers = _headers.find(release)
    if headers is None or headers.release == release:
        return dict(os.environ)
    _headers.merge(headers, folder)
    return {**os.environ, "BCC_KERNEL_SOURCE": str(folder)}


def _intervals(child: subprocess.Popen[str], order: str) -> Iterator[dict[int, list[int]]]:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its status says why
        child.stdin.write(order)
        child.stdin.close()
    before: dict[tuple[int, int], int] = {}
    child.stdout.readline()  # "ready"
    for line in child.stdout:
        now = {(tenant, slot): seen for tenant, slot, seen in json.loads(line)}
        yield difference(now, before)
        before = now
    if status := child.wait():
        raise SeedanceError(_failure(status, child))


def difference(now: Mapping[tuple[int, int], int], before: Mapping[tuple[int, int], int]) -> dict[int, list[int]]:
    """Return by tenant how much more each slot counts now; tenants with nothing new are left out."""
    histograms: dict[int, list[int]] = {}
    for (tenant, slot), seen in now.items():
        if came := seen - before.get((tenant, slot), 0):
            histograms.setdefault(tenant, [0] * HISTOGRAM_SLOTS)[slot] += came
    return histograms


def _percentile(histogram: Sequence[int], share: int) -> int:
    """Return the slot that holds the value below which so many hundredths are."""
    rank, seen = -(-sum(histogram) * share // 100), 0
    for slot, here in enumerate(histogram):
        seen += here
        if seen >= rank:
            return slot
    return len(histogram) - 1


def _time(slot: int) -> str:
    """Return the upper end of a slot."""
    us = 2 << slot
    for unit, size in (("s", 1_000_000), ("ms", 1_000)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us} µs"


def _failure(status: int, child: subprocess.Popen[str]) -> str:
    if status == _bcc.NO_BCC:
        python = cast("list[str]", child.args)[0]
        return f"cannot trace: '{python}' has no BCC; `apt install python3-bpfcc` brings it, --python names another"
    return f"cannot trace: BCC could not run the program (status {status}); what it says is above"
