"""The opening handshake of a WebSocket, the server's half (RFC 6455 §4.2).

Origin is not checked: what admits is an API key, which a browser never sends by itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Final

from seedance.daemon.protocol.head import Request
from seedance.errors import RemoteProtocolError

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_VERSION: Final = "13"
_KEY_BYTES: Final = 16
_BAD_REQUEST: Final = 400
_UPGRADE_REQUIRED: Final = 426


class HandshakeRefused(RemoteProtocolError):
    """A request cannot become a WebSocket; answer with status `code` and `headers`."""

    def __init__(self, message: str, code: int, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message, code)
        self.headers = headers


def accept_response_headers(request: Request, subprotocols: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the header fields of the 101 answer (§4.2.2); raises HandshakeRefused.

    The subprotocol is the one that `choose_subprotocol` gives; where that is none, no field says so and a client that
    insists on one ends the connection (§4.1).
    """
    upgrade = (("Upgrade", "websocket"), ("Connection", "Upgrade"))
    if not request.is_websocket_upgrade:
        raise HandshakeRefused("cannot serve this path without a WebSocket upgrade", _UPGRADE_REQUIRED, upgrade[:1])
    if request.method != "GET" or request.http_version != "1.1" or request.has_body:
        raise HandshakeRefused("cannot upgrade anything but a GET of HTTP/1.1 without a body", _BAD_REQUEST)
    if request.get("sec-websocket-version") != _VERSION:
        raise HandshakeRefused(
            f"cannot speak this WebSocket version; use {_VERSION}",
            _UPGRADE_REQUIRED,
            (("Sec-WebSocket-Version", _VERSION), *upgrade[:1]),
        )
    key = (request.get("sec-websocket-key") or "").encode("latin-1")
    try:
        valid = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        valid = False
    if not valid:
        raise HandshakeRefused(
            f"cannot use the Sec-WebSocket-Key: it is not {_KEY_BYTES} bytes in base64", _BAD_REQUEST
        )
    accept = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode("ascii")
    headers = [*upgrade, ("Sec-WebSocket-Accept", accept)]
    chosen = choose_subprotocol(request, subprotocols)
    if chosen is not None:
        headers.append(("Sec-WebSocket-Protocol", chosen))
    return headers


def choose_subprotocol(request: Request, subprotocols: Sequence[str]) -> str | None:
    """Return the first of our `subprotocols` that the client offers, or None."""
    offered = [offer.strip(" \t") for offer in (request.get("sec-websocket-protocol") or "").split(",")]
    return next((name for name in subprotocols if name in offered), None)
