"""Heads of HTTP responses, and OpenAI's error object."""

from __future__ import annotations

import http
from collections.abc import Sequence
from typing import Final

import msgspec

from seedance.daemon.protocol.head import FIELDS
from seedance.errors import LocalProtocolError

Headers = Sequence[tuple[str, str]]

# Statuses whose responses end with the head (RFC 9110 §15.3.5, §15.4.5).
BODILESS: Final = frozenset((204, 304))
JSON: Final = (("Content-Type", "application/json"),)

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in http.HTTPStatus
}
_OURS: Final = frozenset(("connection", "content-length", "transfer-encoding"))
_json_encoder: Final = msgspec.json.Encoder()


def error_object(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    """Return OpenAI's error object as JSON; `kind` is its `type`, `code` one of the protocol's stable codes."""
    return _json_encoder.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def response_head(status: int, headers: Headers) -> bytes:
    """Return the status line and fields of a final response, without the empty line.

    Raises LocalProtocolError on an unknown or interim status, and on fields that the connection itself sets.
    """
    line = _STATUS_LINES.get(status)
    if line is None or status < http.HTTPStatus.OK:
        raise LocalProtocolError(f"cannot answer with status {status}")
    for name, _ in headers:
        if name.lower() in _OURS:
            raise LocalProtocolError(f"cannot send the field '{name}': it is set by the connection")
    return line + _field_block(headers)


def switching_head(headers: Headers) -> bytes:
    """Return a whole "101 Switching Protocols"."""
    return _STATUS_LINES[http.HTTPStatus.SWITCHING_PROTOCOLS] + _field_block(headers) + b"\r\n"


def _field_block(headers: Headers) -> bytes:
    """Return fields as they go on the wire; refuse what would smuggle in another field."""
    try:
        block = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1")
    except UnicodeEncodeError as exc:
        raise LocalProtocolError("cannot send a header field with characters outside latin-1") from exc
    if FIELDS.fullmatch(block) is None or block.count(b"\r\n") != len(headers):
        raise LocalProtocolError("cannot send a header field with a line break or a name that is no token")
    return block
