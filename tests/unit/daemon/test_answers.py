"""The gateway's own responses."""

from __future__ import annotations

import json

import pytest

from seedance.daemon.answers import health, refusal
from seedance.daemon.doors.errors import ApiError


@pytest.mark.parametrize(
    ("state", "status", "told"), [("ready", 200, "ok"), ("starting", 503, "starting"), ("dead", 503, "dead")]
)
def test_health_is_the_engines(state: str, status: int, told: str) -> None:
    head, _, body = health(state, keep_alive=True, with_body=True).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].split()[1] == str(status)
    assert f"Content-Length: {len(body)}" in lines
    assert ("Retry-After: 1" in lines) == (status == 503)
    assert "Connection: close" not in lines
    assert json.loads(body) == {"status": told}


def test_head_gets_the_length_but_no_body() -> None:
    whole = health("ready", keep_alive=False, with_body=True)
    bare = health("ready", keep_alive=False, with_body=False)
    assert whole.startswith(bare)
    assert bare.endswith(b"Connection: close\r\n\r\n")


def test_a_refusal_is_openais_error_object_and_the_last_word() -> None:
    head, _, body = refusal(ApiError("unauthorized", "cannot"), (("Allow", "GET"),)).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 401 Unauthorized"
    assert {"WWW-Authenticate: Bearer", "Allow: GET", "Connection: close"} <= set(lines)
    assert json.loads(body)["error"] == {
        "message": "cannot",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_a_refusal_for_now_says_when_to_come_back() -> None:
    assert b"\r\nRetry-After: 7\r\n" in refusal(ApiError("overloaded", "cannot", retry_after_s=6.5))
