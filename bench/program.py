"""What the comparisons have in common as programs: an argument, how they end, a server for as long as a block lasts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.openai_servers import ServerProcess
from bench.processes import BenchError, end_in_order
from bench.report import BUILD


def command_line(description: str) -> argparse.ArgumentParser:
    """Return a parser with what all of them take: `--build`, the folder of programs and results, as a whole path."""
    parser = argparse.ArgumentParser(description=f"{description}; see bench/README.md.")
    parser.add_argument("--build", type=lambda text: Path(text).resolve(), default=str(BUILD))
    return parser


def run(main: Callable[[], None], failures: tuple[type[Exception], ...] = (BenchError,)) -> None:
    """Run a comparison; SIGTERM unwinds it, and one of `failures` ends it with its text."""
    end_in_order()
    try:
        main()
    except failures as exc:
        sys.exit(str(exc))


@contextlib.contextmanager
def started(server: ServerProcess) -> Iterator[None]:
    """Have a server run until the end of the block."""
    try:
        server.start()
        yield
    finally:
        server.stop()
