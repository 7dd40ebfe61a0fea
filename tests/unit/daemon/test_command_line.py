"""How commands end: statuses, and one line of what went wrong."""

from __future__ import annotations

import errno

import click
import pytest

from seedance.daemon.command_line import os_error_text, run
from seedance.errors import ConfigError, KernelError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("/a.toml", "cpu", "cannot take 3"), 78, "cannot use '/a.toml', key 'cpu': cannot take 3"),
        (KernelError("open '/dev/x'", errno.ENOENT), 1, "cannot open '/dev/x': No such file or directory (errno 2)"),
        (
            OSError(errno.ENOSPC, "No space left", "/s/key"),
            1,
            "cannot use '/s/key': No space left; make room on that disk",
        ),
        (OSError(errno.EIO, "Input/output error"), 1, "cannot go on: Input/output error"),
        (click.ClickException("two\n  lines"), 1, "cannot go on: two lines"),
        (click.UsageError("No such thing."), 2, "cannot understand the command line: no such thing"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: Exception, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> None:
        raise error

    assert run(command, "prog", []) == status
    told = capsys.readouterr()
    assert (told.out, told.err.removesuffix("; see `prog --help`\n").removesuffix("\n")) == ("", f"prog: {line}")


def test_an_interrupted_command_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    assert run(command, "prog", []) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_command_that_returns_its_status() -> None:
    assert run(click.Command("c", callback=lambda: 78), "prog", []) == 78
    assert run(click.Command("c", callback=lambda: None), "prog", []) == 0


def test_an_error_of_the_system_without_a_text_of_its_own() -> None:
    assert os_error_text(OSError("all is lost")) == "cannot go on: all is lost"
