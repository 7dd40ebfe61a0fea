"""`seedancectl`: the command that looks into a running daemon, makes keys and tries the doors."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console

from seedance import __version__
from seedance.daemon import app, control, example, hints, keys, tables
from seedance.daemon import config as configuration
from seedance.daemon.client import Client
from seedance.daemon.config import Config
from seedance.daemon.sockets import first_tcp
from seedance.errors import ConfigError, SeedanceError
from seedance.qos.quota import read_name


class _Context:
    """What every command needs: the configuration file's path, and the daemon behind it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def config(self) -> Config:
        return configuration.load(self.path)

    def control_path(self) -> str:
        return str(Path(self.config().paths.run) / control.SOCKET_NAME)

    def ask(self, request: control.Request) -> control.Reply:
        reply = control.ask(self.control_path(), request)
        if isinstance(reply, control.Failed):
            raise click.ClickException(reply.message)
        return reply

    def status(self) -> control.StatusReport:
        reply = self.ask(control.GetStatus())
        assert isinstance(reply, control.StatusReport)
        return reply


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "path",
    default=app.DEFAULT_CONFIG,
    show_default=True,
    metavar="PATH",
    help="The daemon's configuration.",
)
@click.version_option(__version__, prog_name="seedancectl")
@click.pass_context
def commands(context: click.Context, path: str) -> None:
    """Look into a running seedanced, make keys for its tenants, and try it."""
    context.obj = _Context(path)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything, as JSON.")
@click.pass_obj
def status(context: _Context, as_json: bool) -> None:
    """Show how the daemon is: engine, gateway, tenants, bad files, limits that are off."""
    report = context.status()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        tables.print_status(report, Console())


@commands.command()
@click.pass_obj
def tenants(context: _Context) -> None:
    """List the tenants of the running daemon, with their quotas."""
    tables.print_tenants(context.status(), Console())


@commands.command()
@click.pass_obj
def reload(context: _Context) -> None:
    """Have the tenant files read again. Changed listeners need a restart."""
    reply = context.ask(control.Reload())
    assert isinstance(reply, control.Reloaded)
    for word, names in (("added", reply.added), ("changed", reply.changed), ("removed", reply.removed)):
        click.echo(f"{word}: {', '.join(names) or 'none'}")
    if reply.note:
        click.echo(reply.note, err=True)
    for bad in reply.bad_files:
        click.echo(str(ConfigError(bad.path, bad.key, bad.reason)), err=True)
    if reply.bad_files:
        sys.exit(1)


@commands.command()
@click.pass_obj
def stop(context: _Context) -> None:
    """End the daemon."""
    reply = context.ask(control.Stop())
    assert isinstance(reply, control.Stopping)
    click.echo(f"seedanced, pid {reply.pid}, is stopping")


@commands.command()
@click.argument("path", required=False)
@click.pass_obj
def check(context: _Context, path: str | None) -> None:
    """Check the configuration and all tenant files; exits with 78 when something is wrong."""
    sys.exit(app.check(configuration.load(path or context.path)))


@commands.group()
def key() -> None:
    """Make API keys."""


@key.command("new")
@click.argument("tenant")
@click.pass_obj
def key_new(context: _Context, tenant: str) -> None:
    """Make an API key for TENANT and print it, this once: only its hash is kept, in the tenant's file.

    A tenant that has no file gets one. A running daemon takes the key at once.
    """
    config = context.config()
    try:
        path = Path(config.paths.tenants) / f"{read_name(tenant)}.toml"
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    new = keys.new_key()
    before = configuration.read_text(str(path)) if path.exists() else ""
    replace_file(path, keys.add_key_to_file(before, keys.hash_key(new), str(path)))
    click.echo(new)
    try:
        context.ask(control.Reload())
    except SeedanceError:
        click.echo("seedanced is not running; the key counts from its next start", err=True)


def replace_file(path: Path, text: str) -> None:
    """Put a file in the place of another, whole or not at all; owner and permissions stay. Raises OSError.

    A new one can be read by its owner alone.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            if path.exists():
                old = path.stat()
                os.fchmod(fd, stat.S_IMODE(old.st_mode))
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, old.st_uid, old.st_gid)
            file.flush()
            os.fsync(fd)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


_tenant_option = click.option("--tenant", help="Use the example key of this tenant.")
_key_option = click.option("--key", "api_key", help="API key; the first of the example's without it.")
_address_option = click.option("--address", help="HOST:PORT or unix:PATH; from the configuration without it.")
_max_tokens_option = click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)


@commands.command()
@click.argument("question", required=False)
@_tenant_option
@_key_option
@_address_option
@_max_tokens_option
@click.pass_obj
def chat(
    context: _Context,
    question: str | None,
    tenant: str | None,
    api_key: str | None,
    address: str | None,
    max_tokens: int,
) -> None:
    """Ask QUESTION and print the answer as it comes; without it, talk until Ctrl-D."""
    client = _client(context, tenant, api_key, address)
    model = client.model()
    messages: list[dict[str, str]] = []
    if question is not None:
        messages.append({"role": "user", "content": question})
        _print_stream(client.chat(messages, model=model, max_tokens=max_tokens))
        return
    click.echo(f"{model}; Ctrl-C ends an answer, Ctrl-D the conversation")
    for line in _lines():
        messages.append({"role": "user", "content": line})
        answer = _print_stream(client.chat(messages, model=model, max_tokens=max_tokens))
        messages.append({"role": "assistant", "content": answer})


@commands.command()
@click.argument("prompt")
@_tenant_option
@_key_option
@_address_option
@_max_tokens_option
@click.pass_obj
def infer(
    context: _Context, prompt: str, tenant: str | None, api_key: str | None, address: str | None, max_tokens: int
) -> None:
    """Continue PROMPT over the JSON WebSocket."""
    _print_stream(_client(context, tenant, api_key, address).infer(prompt, max_tokens=max_tokens))


def _client(context: _Context, tenant: str | None, api_key: str | None, address: str | None) -> Client:
    if api_key is None:
        known = hints.read_keys(context.path)
        if tenant is None and known:
            tenant = next(iter(known))
        if tenant is None or tenant not in known:
            which = "a key" if tenant is None else f"a key of tenant '{tenant}'"
            where = Path(context.path).with_name(hints.KEYS_FILE)
            raise click.ClickException(
                f"cannot find {which} in '{where}'; give one by --key (`seedancectl key new TENANT` makes one)"
            )
        api_key = known[tenant]
    if address is None:
        listen = context.config().listen
        names = [str(tcp) for tcp in listen.tcp if tcp.port]
        address = first_tcp(names) or (f"unix:{listen.unix}" if listen.unix else None)
    if address is None:  # the kernel has chosen the port: the daemon knows
        address = first_tcp(context.status().listeners)
    assert address is not None, "a configuration has a place to listen"
    return Client(address, api_key)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if line.strip():
            yield line


def _print_stream(parts: Iterator[str]) -> str:
    """Print the parts as they come, up to the end or Ctrl-C; returns the whole text."""
    text = ""
    try:
        for part in parts:
            text += part
            click.echo(part, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(" …", nl=False)
    click.echo()
    return text


@commands.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--engine", type=click.Choice(["vllm", "synthetic"]), default="synthetic", show_default=True)
@click.option("--model", default="", help="Hub name or path of the model; needed with vllm.")
@click.option("--name", default="", help="Name under which clients ask for it.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
def init(directory: Path, engine: str, model: str, name: str, port: int) -> None:
    """Write an example into DIRECTORY: a configuration, tenants acme and globex, and their keys in keys.env.

    Run again, it keeps the tenants and their keys.
    """
    if engine == "vllm" and not model:
        raise click.UsageError("cannot serve without a model: give --model, or --engine synthetic")
    for path in example.create(directory, engine=engine, model=model, name=name, port=port):
        click.echo(f"wrote {path}")
    click.echo(f"run it with: seedanced --config {directory / example.CONFIG_FILE}")


def main() -> None:
    """Run the command; an error is one line on standard error."""
    try:
        commands()
    except ConfigError as exc:
        click.echo(f"seedancectl: {exc}", err=True)
        sys.exit(app.EXIT_CONFIG)
    except SeedanceError as exc:
        click.echo(f"seedancectl: {exc}", err=True)
        sys.exit(1)
    except OSError as exc:
        click.echo(f"seedancectl: cannot use '{exc.filename}': {exc.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
