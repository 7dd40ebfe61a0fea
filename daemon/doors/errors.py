"""Errors as a door tells them to its client: the protocol's stable codes, HTTP statuses and JSON bodies."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from seedance.errors import EngineError, QuotaExceeded, SeedanceError

# code → HTTP status, OpenAI's error type. The table is the protocol's own; a code that is not in it is `internal`.
_HTTP: Final[dict[str, tuple[int, str]]] = {
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "gone": (410, "invalid_request_error"),
    "invalid_request": (400, "invalid_request_error"),
    "context_too_long": (413, "invalid_request_error"),
    "quota_exceeded": (429, "insufficient_quota"),
    "rate_limited": (429, "rate_limit_error"),
    "overloaded": (503, "overloaded_error"),
    "engine_unavailable": (503, "service_unavailable_error"),
    "deadline_exceeded": (504, "timeout_error"),
    "flow_control": (400, "invalid_request_error"),
    "protocol_error": (400, "invalid_request_error"),
    "internal": (500, "server_error"),
}
CODES: Final = frozenset(_HTTP)
# Statuses whose answer should tell when to come back, and the seconds told when nobody knows better.
_RETRY_STATUSES: Final = frozenset({429, 503})
_RETRY_AFTER_S: Final = 1.0

_encode: Final = msgspec.json.Encoder().encode


class ApiError(SeedanceError):
    """A request cannot be served: `code` is one of `CODES`, `param` names the field at fault.

    `status` overrides the code's HTTP status: a body over the size limit is an `invalid_request` with 413.
    `oldest_seq` is the oldest sequence of a stream that is kept, where the one asked for is `gone`.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        status: int | None = None,
        oldest_seq: int | None = None,
    ) -> None:
        super().__init__(code, message)
        self.code = code if code in _HTTP else "internal"
        self.message = message
        self.param = param
        self.status = status if status is not None else _HTTP[self.code][0]
        if retry_after_s is None and self.status in _RETRY_STATUSES:
            retry_after_s = _RETRY_AFTER_S
        self.retry_after_s = retry_after_s
        self.oldest_seq = oldest_seq

    def __str__(self) -> str:
        return self.message

    @property
    def openai_code(self) -> str:
        """Return the code in OpenAI's error object; its clients have a word of their own for an unknown model."""
        return "model_not_found" if (self.code, self.param) == ("not_found", "model") else self.code

    @property
    def openai_type(self) -> str:
        """Return OpenAI's `type` of this error."""
        return _HTTP[self.code][1]


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request whose field `param` is wrong."""
    return ApiError("invalid_request", message, param=param)


def api_error(error: SeedanceError) -> ApiError:
    """Return any of our errors as the client may see it; the text of an unexpected one stays inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuotaExceeded):
        return ApiError(
            "rate_limited",
            f"cannot serve this request now: the limit '{error.limit}' is reached; "
            f"come back in {_whole_seconds(error.retry_after_s)} s",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, EngineError):
        return ApiError(error.code, error.message)
    return ApiError("internal", "cannot serve this request: an internal error, which the server's log explains")


def retry_after(error: ApiError) -> str | None:
    """Return the value of the Retry-After header in whole seconds (RFC 9110, 10.2.3), None where there is none."""
    return None if error.retry_after_s is None else str(_whole_seconds(error.retry_after_s))


def openai_error_body(error: ApiError) -> bytes:
    """Return OpenAI's error object as JSON: an HTTP body, or the data of a server-sent event."""
    body = {
        "message": error.message,
        "type": error.openai_type,
        "param": error.param,
        "code": error.openai_code,
    }
    return _encode({"error": body if error.oldest_seq is None else {**body, "oldest_seq": error.oldest_seq}})


def infer_error(error: ApiError, stream_id: str | None = None) -> bytes:
    """Return the JSON WebSocket door's error message, about one stream or, without an id, about the connection."""
    body: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.retry_after_s is not None:
        body["retry_after_ms"] = math.ceil(error.retry_after_s * 1000)
    if error.oldest_seq is not None:
        body["oldest_seq"] = error.oldest_seq
    return _encode({"error": body} if stream_id is None else {"id": stream_id, "error": body})


def _whole_seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))
