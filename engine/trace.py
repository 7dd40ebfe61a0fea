"""Traces: which requests came when, as JSON lines, to be recorded by a daemon and replayed by a simulation.

The first line says what the file is, each further one is a request, in order of time:

    {"format": "seedance-trace", "version": 1}
    {"at_s": 0.25, "tenant": "acme", "prompt_tokens": 512, "output_tokens": 128}

`at_s` is in seconds since any moment. `output_tokens` is how many came out, or would have, had nothing ended the
request early. Optional: `max_tokens`, the most that were asked for (else as many as came out), `priority`, `rtt_s` and
`rtt_variance_s` of the client's connection, and `deadline_s`, seconds after its arrival within which the first token
is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from seedance.errors import ConfigError

FORMAT: Final = "seedance-trace"
VERSION: Final = 1

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a trace."""

    at_s: _Seconds
    tenant: str
    prompt_tokens: _Count
    output_tokens: _Count
    max_tokens: _Count | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    rtt_s: _Seconds = 0.0
    rtt_variance_s: _Seconds = 0.0
    deadline_s: _Seconds | None = None


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


_HEAD: Final = msgspec.json.Decoder(_Head)
_ARRIVAL: Final = msgspec.json.Decoder(Arrival)
_ENCODER: Final = msgspec.json.Encoder()


def head() -> bytes:
    """Return the first line of a trace."""
    return _ENCODER.encode(_Head(FORMAT, VERSION)) + b"\n"


def encode(arrival: Arrival) -> bytes:
    """Return the line of a request."""
    return _ENCODER.encode(arrival) + b"\n"


def parse(lines: Iterable[bytes], path: str) -> Iterator[Arrival]:
    """Yield the requests of a trace, given its lines; empty ones are skipped.

    Raises ConfigError at a line that is none, or out of order.
    """
    before_s = 0.0
    is_first = True
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if is_first:
            _check_head(text, path, number)
            is_first = False
            continue
        try:
            arrival = _ARRIVAL.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            reason = f"cannot read a request: {exc}; write e.g. {_EXAMPLE}"
            raise ConfigError(path, f"line {number}", reason) from exc
        if arrival.at_s < before_s:
            reason = f"cannot go back to {arrival.at_s:g} s after {before_s:g} s; sort the lines by at_s"
            raise ConfigError(path, f"line {number}", reason)
        before_s = arrival.at_s
        yield arrival
    if is_first:
        _check_head(b"", path, 1)


_EXAMPLE: Final = encode(Arrival(at_s=0.25, tenant="acme", prompt_tokens=512, output_tokens=128)).decode().strip()


def _check_head(text: bytes, path: str, number: int) -> None:
    try:
        found: _Head | None = _HEAD.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if found is None or found.format != FORMAT or found.version != VERSION:
        reason = f"cannot take this for a trace; its first line must be {head().decode().strip()}"
        raise ConfigError(path, f"line {number}", reason)
