"""Bad input through the whole daemon: the documented answer, and nothing else changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.daemon import DRIVERS, Daemon
from support.raw_http import Connection, Response, request
from support.synthetic import MODEL, expected_text

from seedance.daemon.doors.openai_request import ChatRequest, CompletionRequest

PROMPT = "Once upon a time"
# What is wrong inside a body is the same however its bytes came.
one_driver = pytest.mark.parametrize("shared_daemon", DRIVERS[:1], indirect=True)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GOOD = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
GOOD_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


class Served(Connection):
    """A connection that counts how often it was served."""

    served = 0

    def serves(self, daemon: Daemon) -> bool:
        """Whether a normal request is answered as always."""
        self.send(request("POST", COMPLETIONS, daemon.keys["acme"], GOOD))
        response = self.response()
        self.served += 1
        return response.status == 200 and response.json()["choices"][0]["text"] == expected_text(PROMPT, 3)


@pytest.fixture
def connection(doors: Daemon) -> Iterator[Served]:
    """A connection; afterwards a new one is served as always, and nothing but normal requests had any output."""
    before = doors.tenant("acme").used.output_tokens
    with Served(doors.address) as connection:
        yield connection
    with Served(doors.address) as another:
        assert another.serves(doors)
    assert doors.tenant("acme").used.output_tokens - before == 3 * (connection.served + another.served)


@pytest.fixture(params=["gateway", "worker"])
def reader(request: pytest.FixtureRequest, doors: Daemon, connection: Served) -> Served:
    """A connection whose next bytes are read by the gateway, or, as it has served a request, by the worker."""
    if request.param == "worker":
        assert connection.serves(doors)
    return connection


# -- HTTP -------------------------------------------------------------------------------------------------------------

KEY = b"Authorization: Bearer %b\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\n" + KEY

MALFORMED = {
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "one word": (b"HELLO\r\n\r\n", 400),
    "no target": (b"GET HTTP/1.1\r\nHost: test\r\n\r\n", 400),
    "lines that end in LF": (b"GET /v1/models HTTP/1.1\nHost: test\n\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n" + KEY + b"\r\n", 400),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + KEY + b"\r\n", 400),
    "a folded field": (b"GET /v1/models HTTP/1.1\r\nHost: test\r\nX: a\r\n b\r\n" + KEY + b"\r\n", 400),
    "white space before a colon": (b"GET /v1/models HTTP/1.1\r\nHost : test\r\n" + KEY + b"\r\n", 400),
    "a NUL": (b"GET /v1/models HTTP/1.1\r\nHost: test\r\nX: \0\r\n" + KEY + b"\r\n", 400),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", 400),
    "length and chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "an unknown coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "an unknown expectation": (POST + b"Expect: a-miracle\r\nContent-Length: 2\r\n\r\n{}", 417),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a target that is too long": (b"GET /" + b"x" * 9000, 414),
    "a head that is too long": (b"GET /v1/models HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
    "too many fields": (b"GET /v1/models HTTP/1.1\r\nHost: test\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    "a body that is too long": (POST + b"Content-Length: 1048577\r\n\r\n", 413),
    "a length beyond all numbers": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 413),
    "chunks that are too long": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"40000\r\n" + b" " * 0x40000 + b"\r\n") * 5,
        413,
    ),
    "a chunk without a size": (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    "a chunk of another size": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
}


@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_http(doors: Daemon, reader: Served, data: bytes, status: int) -> None:
    with contextlib.suppress(ConnectionError):  # refused before it was all sent
        reader.send(data.replace(b"%b", doors.keys["acme"].encode()))
    response = reader.response()
    assert response.status == status
    assert response.fields["connection"] == "close"
    assert response.error["type"] == "invalid_request_error"
    assert response.error["code"] in ("invalid_request", "protocol_error")
    assert response.error["message"].startswith("cannot ")
    assert reader.is_closed()


def test_the_end_in_the_middle_of_a_body(doors: Daemon, reader: Served) -> None:
    reader.send(request("POST", COMPLETIONS, doors.keys["acme"], fields={"Content-Length": "100"}) + b'{"model":')
    reader.finish_sending()
    response = reader.response()
    assert (response.status, response.error["code"]) == (400, "protocol_error")
    assert reader.is_closed()


@pytest.mark.parametrize("data", [b"", b"GET /v1/mod"])
def test_the_end_before_a_request(reader: Served, data: bytes) -> None:
    if data:
        reader.send(data)
    reader.finish_sending()
    rest = reader.rest()
    assert rest == b"" or rest.startswith(b"HTTP/1.1 400 ")


def test_a_head_that_never_ends(connection: Served) -> None:
    """`head_timeout` is 1 s."""
    begun = time.monotonic()
    connection.send(b"GET /v1/models HTTP/1.1\r\nHost: ")
    response = connection.response()
    assert (response.status, response.error["code"]) == (408, "invalid_request")
    assert 0.5 < time.monotonic() - begun < 6


def test_a_body_that_never_ends(doors: Daemon, connection: Served) -> None:
    """`body_timeout` is 1 s."""
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"], fields={"Content-Length": "100"}) + b"{")
    begun = time.monotonic()
    response = connection.response()
    assert (response.status, response.error["code"]) == (408, "invalid_request")
    assert connection.is_closed()
    assert 0.5 < time.monotonic() - begun < 6


def test_methods_that_a_path_does_not_have(doors: Daemon, connection: Served) -> None:
    key = doors.keys["acme"]
    for method, path, allow in (
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("BREW", "/v1/models/synthetic", "GET, HEAD"),
    ):
        connection.send(request(method, path, key))
        response = connection.response()
        assert (response.status, response.fields["allow"]) == (405, allow)
        assert response.error["code"] == "invalid_request"
    assert connection.serves(doors)
    connection.send(request("HEAD", CHAT, key))
    assert connection.response(has_body=False).status == 405
    connection.send(request("POST", "/v1/models", key, b"{}"))
    assert connection.response().status == 405
    assert connection.is_closed()  # its body was not read


def test_paths_that_are_not_there(doors: Daemon, connection: Served) -> None:
    for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "//v1/models", "/echo", "/v1/models/a%2Fb"):
        connection.send(request("GET", path, doors.keys["acme"]))
        response = connection.response()
        assert response.status == 404
        assert response.error["code"] in ("not_found", "model_not_found")
    assert connection.serves(doors)


# -- keys -------------------------------------------------------------------------------------------------------------

NO_KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "unknown": {"Authorization": "Bearer sk-seed-of-nobody"},
    "of another scheme": {"Authorization": "Basic c2VlZDpzZWVk"},
    "empty": {"Authorization": "Bearer "},
    "not ASCII": {"Authorization": "Bearer schl\xfcssel"},
    "in a cookie": {"Cookie": "key=KEY"},
    "two": {"Authorization": "Bearer KEY, Bearer OTHER"},
    "cut": {"Authorization": "Bearer KEY."},
}


@pytest.mark.parametrize("fields", NO_KEYS.values(), ids=NO_KEYS.keys())
def test_without_a_good_key(doors: Daemon, reader: Served, fields: dict[str, str]) -> None:
    fields = {
        name: value.replace("KEY", doors.keys["acme"]).replace("OTHER", doors.keys["globex"])
        for name, value in fields.items()
    }
    reader.send(request("POST", COMPLETIONS, None, GOOD, fields))
    response = reader.response()
    assert response.status == 401
    assert (response.error["type"], response.error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.fields["www-authenticate"] == "Bearer"
    assert reader.is_closed()


def test_health_needs_no_key(doors: Daemon, connection: Served) -> None:
    connection.send(request("GET", "/healthz") + request("HEAD", "/healthz"))
    assert connection.response().status == 200
    assert connection.response(has_body=False).status == 200
    connection.send(request("POST", "/healthz", None, b"{}"))
    response = connection.response()
    assert (response.status, response.fields["allow"], response.error["code"]) == (405, "GET, HEAD", "invalid_request")


# -- bodies -----------------------------------------------------------------------------------------------------------

NO_JSON = {
    "nothing": b"",
    "white space": b"  ",
    "text": b"hello",
    "cut": b'{"model": "synthetic"',
    "more than one": b"{}{}",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "bad UTF-8": b'{"model": "synthetic", "prompt": "\xff\xfe"}',
    "an overlong form": b'{"model": "synthetic", "prompt": "\xc0\xaf"}',
    "UTF-16": '{"model": "synthetic", "prompt": "a"}'.encode("utf-16"),
    "half a surrogate pair": b'{"model": "synthetic", "prompt": "\\ud800"}',
    "a deep nest": b'{"model": "synthetic", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a deep nest in an unknown field": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"model": "synthetic", "prompt": "a", "temperature": NaN}',
    "a number without end": b'{"model": "synthetic", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
}


@one_driver
@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON.keys())
def test_bodies_that_are_no_request(doors: Daemon, connection: Served, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        connection.send(request("POST", path, doors.keys["acme"], body))
        refused(connection.response(), 400, "invalid_request")
    assert connection.serves(doors)


def refused(response: Response, status: int, code: str, param: str | None = None) -> None:
    assert response.status == status, response.body
    assert response.error["code"] == code
    assert response.error["message"].startswith("cannot ")
    assert response.error["param"] == param or param is None
    assert "connection" not in response.fields  # it can be used again


@one_driver
@pytest.mark.parametrize(
    ("path", "good", "kind"), [(CHAT, GOOD_CHAT, ChatRequest), (COMPLETIONS, GOOD, CompletionRequest)]
)
def test_every_field_of_a_wrong_type(
    doors: Daemon, connection: Served, path: str, good: dict[str, Any], kind: type[msgspec.Struct]
) -> None:
    fields = [field.name for field in msgspec.structs.fields(kind)]
    assert len(fields) > 30
    for field in fields:
        bad: Any = 5 if field == "chat_template_kwargs" else {"x": [1.5]}
        connection.send(request("POST", path, doors.keys["acme"], {**good, field: bad}))
        response = connection.response()
        assert response.status == 400, field
        refused(response, 400, "invalid_request")
        assert (response.error["param"] or "").split(".")[0].startswith(field), field
    assert connection.serves(doors)


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "3", 2**40],
    "temperature": [-0.1, 2.1, "1", True],
    "top_p": [0, 1.1],
    "n": [0, 17],
    "seed": [2**70],
    "stop": [[""], "", ["x"] * 17, "x" * 2000, [3]],
    "stop_token_ids": [[-1], [10_000_000]],
    "logit_bias": [{"1": 101}, {"x": 1}, {"99999": 1}],
    "logprobs": [-1, 21],
    "stream": ["true", 1],
    "prompt": [[], [[]], [1, "a"], [[1], "a"], [-1], [99_999], "", ["", "a"], ["a"] * 65],
    "model": ["", "gpt"],
}


@one_driver
@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_values_out_of_range(doors: Daemon, connection: Served, field: str) -> None:
    for value in OUT_OF_RANGE[field]:
        connection.send(request("POST", COMPLETIONS, doors.keys["acme"], {**GOOD, field: value}))
        response = connection.response()
        if field == "model":
            refused(response, 404, "model_not_found", "model")
        else:
            refused(response, 400, "invalid_request")
            assert response.error["param"].startswith(field), value
    assert connection.serves(doors)


MESSAGES: dict[str, Any] = {
    "none": [],
    "of an unknown role": [{"role": "king", "content": "x"}],
    "without a role": [{"content": "x"}],
    "without content": [{"role": "user"}],
    "with a picture": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "with a number": [{"role": "user", "content": 5}],
}


@one_driver
@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES.keys())
def test_messages_that_cannot_be_served(doors: Daemon, connection: Served, messages: Any) -> None:
    for stream in (False, True):
        body = {**GOOD_CHAT, "messages": messages, "stream": stream}
        connection.send(request("POST", CHAT, doors.keys["acme"], body))
        response = connection.response()
        refused(response, 400, "invalid_request")
        assert response.error["param"].startswith("messages")
    assert connection.serves(doors)


LONG: dict[str, Any] = {
    "in bytes": "word " * 40_000,
    "in tokens": " word" * 9000,
    "as token ids": [300] * 9000,
    "by one": [300] * 8192,
    "one of several": ["short", " word" * 9000],
}


@one_driver
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", LONG.values(), ids=LONG.keys())
def test_a_prompt_that_is_too_long(doors: Daemon, connection: Served, prompt: Any, stream: bool) -> None:
    """The model takes 8,192 tokens, prompt and answer together."""
    body = {**GOOD, "prompt": prompt, "stream": stream}
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
    refused(connection.response(), 413, "context_too_long")
    assert connection.serves(doors)


@one_driver
def test_a_conversation_that_is_too_long(doors: Daemon, connection: Served) -> None:
    messages = [{"role": "user", "content": " word" * 3000}] * 3
    connection.send(request("POST", CHAT, doors.keys["acme"], {**GOOD_CHAT, "messages": messages}))
    refused(connection.response(), 413, "context_too_long")
    assert connection.serves(doors)


def test_the_longest_prompt_that_fits_gets_the_one_token_that_is_left(doors: Daemon) -> None:
    body = {"model": MODEL, "prompt": [300] * 8191, "max_tokens": 100}
    with Connection(doors.address) as connection:
        connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
        response = connection.response()
    assert response.status == 200
    assert response.json()["usage"]["completion_tokens"] == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"
