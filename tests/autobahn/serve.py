"""Start a daemon with the echo route open, run the Autobahn suite against it, end it; exit as `run.py` does.

    python tests/autobahn/serve.py --wstest …/wstest [arguments of run.py but --url]

The daemon is the one that is installed beside this interpreter, with the synthetic engine, on a port of the kernel's
choice, in a folder that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

STOP_TIMEOUT_S = 30
LARGEST_MESSAGE = "32MiB"  # cases 9.* send 16 MiB
BIN = Path(sys.executable).parent


def main() -> int:
    """Serve, run the suite with the given arguments, and return its exit status."""
    with tempfile.TemporaryDirectory(prefix="seedance-autobahn-") as state, echo_server(Path(state)) as url:
        suite = [sys.executable, str(Path(__file__).with_name("run.py")), "--url", url, *sys.argv[1:]]
        return subprocess.run(suite, check=False).returncode


@contextlib.contextmanager
def echo_server(state: Path) -> Iterator[str]:
    """Run the daemon and yield the URL of its echo route."""
    init: list[str | Path] = [BIN / "seedancectl", "init", state, "--engine", "synthetic", "--port", "0"]
    subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
    config = state / "seedanced.toml"
    with config.open("a", encoding="utf-8") as file:
        file.write(f'\n[worker]\nmax_message = "{LARGEST_MESSAGE}"\nmax_backlog = "{LARGEST_MESSAGE}"\n')
    command: list[str | Path] = [
        BIN / "seedanced",
        "--config",
        config,
        "--hints",
        "--test-echo",
        "--log-level",
        "warning",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            address, key = wait_ready(daemon.stdout)
            yield f"ws://{address}/echo?key={key}"
        finally:
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()


def wait_ready(lines: Iterator[str]) -> tuple[str, str]:
    """Return the address and a key out of the commands that the daemon prints once it serves."""
    for line in lines:
        if found := re.search(r"http://(\S+?)/\S+ -H 'Authorization: Bearer (\S+)'", line):
            return found[1], found[2]
    raise SystemExit("cannot run the suite: the daemon ended before it was ready")


if __name__ == "__main__":
    sys.exit(main())
