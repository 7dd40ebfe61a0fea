"""Whole HTTP responses of the gateway: what can be said before a connection belongs to a tenant."""

from __future__ import annotations

from typing import Final

import msgspec

from seedance.daemon.doors.errors import ApiError, retry_after
from seedance.daemon.protocol.response import JSON, Headers, error_object, response_head
from seedance.engine.adapter import EngineState

HEALTH_PATH: Final = "/healthz"

_OK: Final = 200
_UNAVAILABLE: Final = 503


def health(state: str, *, keep_alive: bool, with_body: bool) -> bytes:
    """Return the answer to a question after the service's health: 200 when the engine is ready, else 503.

    Nothing else is told: anybody may ask, and why an engine is down holds paths of this machine.
    """
    ready = state == EngineState.READY
    body = msgspec.json.encode({"status": "ok" if ready else state})
    headers = JSON if ready else (*JSON, ("Retry-After", "1"))
    answer = _response(_OK if ready else _UNAVAILABLE, headers, body, keep_alive=keep_alive)
    return answer if with_body else answer[: -len(body)]


def refusal(error: ApiError, headers: Headers = ()) -> bytes:
    """Return OpenAI's error object as the last response on a connection."""
    code = error.openai_code
    headers = (*JSON, *headers)
    if error.code == "unauthorized":
        code = "invalid_api_key"  # what OpenAI's clients know
        headers = (*headers, ("WWW-Authenticate", "Bearer"))
    after_s = retry_after(error)
    if after_s is not None:
        headers = (*headers, ("Retry-After", after_s))
    return _response(error.status, headers, error_object(str(error), error.openai_type, code), keep_alive=False)


def _response(status: int, headers: Headers, body: bytes, *, keep_alive: bool) -> bytes:
    connection = b"" if keep_alive else b"Connection: close\r\n"
    return b"%bContent-Length: %d\r\n%b\r\n%b" % (response_head(status, headers), len(body), connection, body)


class Farewell:
    """The endpoint of a connection that gets its last response: whatever the peer still says is not listened to."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """See `driver.Endpoint`."""

    def eof_received(self) -> None:
        """See `driver.Endpoint`."""

    def backlog_drained(self) -> None:
        """See `driver.Endpoint`."""

    def connection_lost(self, error: OSError | None) -> None:
        """See `driver.Endpoint`."""
