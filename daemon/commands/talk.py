"""`seedancectl chat` and `infer`: try the doors, with a real key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from seedance.daemon import hints
from seedance.daemon.client import Client
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context
from seedance.daemon.sockets import first_tcp

_tenant_option = click.option("--tenant", help="Use the example key of this tenant.")
_key_option = click.option("--key", "api_key", help="API key; the first of the example's without it.")
_address_option = click.option("--address", help="HOST:PORT or unix:PATH; from the configuration without it.")
_max_tokens_option = click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)


@click.command(epilog=example("chat 'Hello!'", "chat --tenant acme"))
@click.argument("question", required=False)
@_tenant_option
@_key_option
@_address_option
@_max_tokens_option
@click.pass_obj
def chat(
    context: Context,
    question: str | None,
    tenant: str | None,
    api_key: str | None,
    address: str | None,
    max_tokens: int,
) -> None:
    """Ask QUESTION and print the answer as it comes.

    Without it, talk until Ctrl-D.
    """
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


@click.command(epilog=example("infer 'Once upon' --max-tokens 64"))
@click.argument("prompt")
@_tenant_option
@_key_option
@_address_option
@_max_tokens_option
@click.pass_obj
def infer(
    context: Context, prompt: str, tenant: str | None, api_key: str | None, address: str | None, max_tokens: int
) -> None:
    """Continue PROMPT over the JSON WebSocket."""
    _print_stream(_client(context, tenant, api_key, address).infer(prompt, max_tokens=max_tokens))


def _client(context: Context, tenant: str | None, api_key: str | None, address: str | None) -> Client:
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
