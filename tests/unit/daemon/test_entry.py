"""Ctrl-C while the commands load: no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["seedanced", "seedancectl"])
def test_an_interrupt_while_the_modules_load_ends_the_command_without_a_word(command: str) -> None:
    program = f"from seedance.daemon.entry import {command}; {command}()"
    # What is imported is listed on standard error as it comes: msgspec comes early, and after the entry.
    argv = [sys.executable, "-X", "importtime", "-c", program, "--help"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.split()[-1] == "msgspec._core":
                process.send_signal(signal.SIGINT)
                break
        out, rest = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert not out
    assert all(line.startswith("import time:") for line in [*told, *rest.splitlines()])


def test_the_handler_that_was_there_is_there_again() -> None:
    program = (
        "import signal; before = signal.getsignal(signal.SIGINT); from seedance.daemon.entry import _ended_by_interrupt"
        "\nwith _ended_by_interrupt(): assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL"
        "\nassert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
