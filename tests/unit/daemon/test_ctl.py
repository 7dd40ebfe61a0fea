"""Errors of the command line: one line on standard error, and a status that says what kind it is."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from seedance.daemon import ctl

CONFIG = ["--config", "/nowhere/seedanced.toml"]


def _commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*words, name))


COMMANDS = dict(_commands(ctl.commands))


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["nonsense"], 2, "cannot understand the command line: no such command 'nonsense'; see `seedancectl --help`"),
        (["status", "--nonsense"], 2, "cannot understand the command line: no such option"),
        (
            ["tenant", "add"],
            2,
            "cannot understand the command line: missing argument 'TENANT'; see `",
        ),
        (["tenant", "add", "../x"], 2, 'cannot take "../x" as a name; write'),
        (["top", "--interval", "0"], 2, "cannot understand the command line: invalid value for '--interval'"),
        (["init", "/nowhere", "--engine", "vllm"], 2, "cannot serve without a model"),
        ([*CONFIG, "trace", "nonsense"], 2, "cannot find a tool 'nonsense'"),
        ([*CONFIG, "status"], 78, "cannot use '/nowhere/seedanced.toml': cannot find it"),
        ([*CONFIG, "check"], 78, "cannot use '/nowhere/seedanced.toml': cannot find it"),
        ([*CONFIG, "check", "/nowhere/other.toml"], 78, "cannot use '/nowhere/other.toml': cannot find it"),
        ([*CONFIG, "limits", "remove"], 78, "cannot use '/nowhere/seedanced.toml': cannot find it"),
    ],
)
def test_errors(arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run(arguments) == status
    said = capsys.readouterr()
    assert said.err.startswith(f"seedancectl: {text}")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.parametrize("group", [(), ("tenant",), ("key",), ("limits",)])
def test_a_group_without_a_command_says_what_there_is(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ctl.run(list(group))
    said = capsys.readouterr()
    assert "Commands:" in said.out + said.err


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(" ".join(("Usage: seedancectl", *words)))
    if not isinstance(COMMANDS[words], click.Group):
        assert f"Example:\n    seedancectl {' '.join(words)}" in shown


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    ctl.run(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("0 all well", "1 it could", "2 the command line is wrong", "78 the configuration", "130 interrupted"):
        assert words in shown
