"""`seedancectl trace`: tools that look into the kernel for a while, each a program of its own."""

from __future__ import annotations

import ast
import contextlib
import importlib
from pathlib import Path
from typing import Final

import click

from seedance.daemon import tables
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console
from seedance.daemon.trace._session import command_line
from seedance.errors import ConfigError

FOLDER: Final = Path(__file__).resolve().parent.parent / "trace"


def tools(folder: Path = FOLDER) -> dict[str, str]:
    """Return the tools by name, and of each the first line of what it says of itself."""
    found = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = said.partition("\n")[0]
    return found


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=example("trace", "trace run_queue --help"),
)
@click.argument("tool", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def trace(context: Context, tool: str | None, arguments: tuple[str, ...]) -> int:
    """Run a tracing tool, or list them.

    What follows the tool's name goes to it. Tools need root, and BCC for Python with kernel headers; each says so when
    something is missing.
    """
    known = tools()
    if tool is None:
        tables.print_tools(known, console())
        return 0
    if tool not in known:
        raise click.UsageError(
            f"cannot find a tool '{tool}'; there is: {', '.join(known) or 'none'}", click.get_current_context()
        )
    pins: list[str] = []
    with contextlib.suppress(ConfigError):  # the tool's own default does for a daemon that has defaults
        kernel = context.config().kernel
        pins = ["--pins", f"{kernel.bpffs}/{kernel.name}"]
    module = importlib.import_module(f"seedance.daemon.trace.{tool}")
    command = command_line(module.TOOL, module.__doc__ or "")
    try:
        return int(command.main([*pins, *arguments], f"seedancectl trace {tool}", standalone_mode=False) or 0)
    except click.Abort:  # how a tool is meant to end
        return 0
