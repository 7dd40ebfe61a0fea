from __future__ import annotations

import json

import pytest

from seedance.daemon.doors.errors import (
    CODES,
    ApiError,
    api_error,
    infer_error,
    invalid,
    openai_error_body,
    retry_after,
)
from seedance.errors import EngineDead, EngineError, QuotaExceeded, SeedanceError


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("unauthorized", 401),
        ("not_found", 404),
        ("gone", 410),
        ("invalid_request", 400),
        ("context_too_long", 413),
        ("quota_exceeded", 429),
        ("rate_limited", 429),
        ("overloaded", 503),
        ("engine_unavailable", 503),
        ("deadline_exceeded", 504),
        ("flow_control", 400),
        ("protocol_error", 400),
        ("internal", 500),
    ],
)
def test_every_code_has_its_status(code: str, status: int) -> None:
    assert code in CODES
    assert ApiError(code, "x").status == status


def test_openai_s_error_object() -> None:
    body = json.loads(openai_error_body(invalid("cannot use 'n': it is 0", "n")))
    assert body == {
        "error": {
            "message": "cannot use 'n': it is 0",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }


def test_openai_has_a_word_for_an_unknown_model() -> None:
    error = ApiError("not_found", "x", param="model")
    assert (error.code, error.openai_code, error.status) == ("not_found", "model_not_found", 404)
    assert ApiError("not_found", "x").openai_code == "not_found"


def test_errors_that_pass_say_when_to_come_back() -> None:
    assert retry_after(ApiError("rate_limited", "x", retry_after_s=2.1)) == "3"
    assert retry_after(ApiError("rate_limited", "x", retry_after_s=0.01)) == "1"
    assert retry_after(ApiError("engine_unavailable", "x")) == "1"
    assert retry_after(ApiError("unauthorized", "x")) is None


def test_the_websocket_s_error() -> None:
    error = ApiError("overloaded", "cannot serve now", retry_after_s=0.25)
    assert json.loads(infer_error(error)) == {
        "error": {"code": "overloaded", "message": "cannot serve now", "retry_after_ms": 250}
    }
    assert json.loads(infer_error(invalid("x"), 'a"b')) == {
        "id": 'a"b',
        "error": {"code": "invalid_request", "message": "x"},
    }


def test_our_errors_become_api_errors() -> None:
    own = invalid("x")
    assert api_error(own) is own
    limited = api_error(QuotaExceeded("acme", "requests.per_minute", 7.5))
    assert (limited.code, limited.retry_after_s) == ("rate_limited", 7.5)
    assert "acme" not in limited.message
    assert "requests.per_minute" in limited.message
    assert api_error(EngineError("context_too_long", "cannot fit")).status == 413
    assert api_error(EngineDead("cannot reach the engine")).code == "engine_unavailable"
    assert api_error(EngineError("what is this", "x")).code == "internal"


def test_an_unexpected_error_keeps_its_text_inside() -> None:
    error = api_error(SeedanceError("/etc/secret"))
    assert (error.code, error.status) == ("internal", 500)
    assert "secret" not in error.message


def test_a_status_of_its_own() -> None:
    assert ApiError("invalid_request", "cannot take so long a body", status=413).status == 413


def test_what_is_gone_says_what_is_kept() -> None:
    error = ApiError("gone", "cannot", oldest_seq=7)
    assert (error.status, json.loads(openai_error_body(error))["error"]["oldest_seq"]) == (410, 7)
    assert json.loads(infer_error(error))["error"]["oldest_seq"] == 7
