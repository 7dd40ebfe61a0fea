"""Response heads refuse what would break the framing."""

from __future__ import annotations

import json

import pytest

from seedance.daemon.protocol.response import error_object, response_head, switching_head
from seedance.errors import LocalProtocolError


def test_writes_a_head() -> None:
    assert response_head(429, [("Retry-After", "3"), ("X", "é")]) == (
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nX: \xe9\r\n"
    )
    assert (
        switching_head([("Upgrade", "websocket")]) == b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
    )


@pytest.mark.parametrize("status", [0, 99, 100, 101, 299, 600])
def test_refuses_statuses_that_are_no_final_answer(status: int) -> None:
    with pytest.raises(LocalProtocolError):
        response_head(status, [])


@pytest.mark.parametrize(
    "field",
    [
        ("Content-Length", "3"),
        ("transfer-encoding", "chunked"),
        ("Connection", "close"),
        ("X", "a\r\nY: b"),
        ("X", "a\nb"),
        ("X", "a\rb"),
        ("X", "a\0b"),
        ("X: a\r\nY", "b"),
        ("X Y", "a"),
        ("", "a"),
        ("X", "\u20ac"),
    ],
)
def test_refuses_fields(field: tuple[str, str]) -> None:
    with pytest.raises(LocalProtocolError, match="^cannot send"):
        response_head(200, [field])


def test_error_object_is_openais() -> None:
    assert json.loads(error_object("cannot", "invalid_request_error", "not_found", "model")) == {
        "error": {"message": "cannot", "type": "invalid_request_error", "param": "model", "code": "not_found"}
    }
    assert json.loads(error_object("é\n", "server_error", "internal"))["error"]["param"] is None
