"""The JSON WebSocket door through the whole daemon, with the `websockets` library."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_ids, expected_text, prompt_ids, whole_tokens
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from seedance.engine.synthetic_vocabulary import synthetic_token_text

PROMPT = "Once upon a time"
SUBPROTOCOL = "seedance.json.v1"
TIMEOUT_S = 20.0


def dial(daemon: Daemon, tenant: str = "acme", path: str = "/v2/infer", **options: Any) -> ClientConnection:
    options = {
        "additional_headers": {"Authorization": f"Bearer {daemon.keys[tenant]}"},
        "subprotocols": [SUBPROTOCOL],
        "ping_interval": None,
        "max_queue": None,  # or it stops reading, and does not see the answer to its close
        "proxy": None,
        **options,
    }
    socket: ClientConnection = connect(f"ws://{daemon.address}{path}", **options)
    return socket


@pytest.fixture
def socket(doors: Daemon) -> Iterator[ClientConnection]:
    with dial(doors) as socket:
        yield socket


def ask(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 10, **fields}))


def message(socket: ClientConnection) -> dict[str, Any]:
    received: dict[str, Any] = json.loads(socket.recv(TIMEOUT_S))
    return received


def answer(socket: ClientConnection) -> tuple[str, dict[str, Any]]:
    """Read one stream without an id: its text and its last message."""
    text = ""
    while "delta" in (received := message(socket)):
        assert received.keys() == {"delta"}
        assert "\ufffd" not in received["delta"]
        text += received["delta"]
    return text, received


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_engines_text_and_the_usage(socket: ClientConnection) -> None:
    tokens = whole_tokens(PROMPT, 300)
    ask(socket, max_tokens=tokens)
    text, last = answer(socket)
    assert text == expected_text(PROMPT, tokens)
    assert last["finish_reason"] == "length"
    assert last["usage"]["prompt_tokens"] == len(prompt_ids(PROMPT))
    assert last["usage"]["completion_tokens"] == tokens


def test_one_stream_after_the_other_needs_no_ids(socket: ClientConnection) -> None:
    for seed in range(5):
        ask(socket, seed=seed, max_tokens=whole_tokens(PROMPT, 10, seed))
        assert answer(socket)[0] == expected_text(PROMPT, whole_tokens(PROMPT, 10, seed), seed)


def test_a_model_need_not_be_named_and_messages_do_as_well(socket: ClientConnection) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = whole_tokens(messages, 20)
    socket.send(json.dumps({"messages": messages, "max_tokens": tokens}))
    text, last = answer(socket)
    assert text == expected_text(messages, tokens)
    assert last["usage"]["prompt_tokens"] == len(prompt_ids(messages))


def test_token_ids_and_stop_strings(socket: ClientConnection) -> None:
    whole = expected_text([300, 301], 60)
    stop = whole[40:46]
    assert whole.find(stop) == 40
    ask(socket, prompt=[300, 301], max_tokens=60, stop=[stop])
    text, last = answer(socket)
    assert (text, last["finish_reason"]) == (whole[:40], "stop")


def test_a_binary_message_is_json_as_well(socket: ClientConnection) -> None:
    socket.send(json.dumps({"prompt": PROMPT, "max_tokens": 3, "seed": 4}).encode())
    assert answer(socket)[0] == expected_text(PROMPT, 3, 4)


def test_several_streams_run_at_once_by_id(socket: ClientConnection) -> None:
    tokens = {f"s{number}": whole_tokens(PROMPT, 60, number) for number in range(8)}
    for number, stream_id in enumerate(tokens):
        ask(socket, id=stream_id, seed=number, max_tokens=tokens[stream_id])
    texts: dict[str, str] = collections.defaultdict(str)
    order: list[str] = []
    ended: dict[str, str] = {}
    while len(ended) < len(tokens):
        received = message(socket)
        order.append(received["id"])
        if "delta" in received:
            texts[received["id"]] += received["delta"]
        else:
            ended[received["id"]] = received["finish_reason"]
    assert texts == {name: expected_text(PROMPT, tokens[name], number) for number, name in enumerate(tokens)}
    assert set(ended.values()) == {"length"}
    # All are under way together, none waits for the end of another.
    assert set(order[: len(order) // 2]) == set(tokens)


def test_without_a_stream_there_is_one_message(socket: ClientConnection) -> None:
    ask(socket, stream=False, id="whole", max_tokens=40, logprobs=1)
    received = message(socket)
    assert (received["id"], received["text"]) == ("whole", expected_text(PROMPT, 40))
    assert (received["finish_reason"], received["usage"]["completion_tokens"]) == ("length", 40)
    tokens = [synthetic_token_text(token_id) for token_id in expected_ids(PROMPT, 40)]
    assert [entry["token"] for entry in received["logprobs"]] == tokens
    assert all(len(entry["top_logprobs"]) == 1 for entry in received["logprobs"])


def test_a_stream_with_log_probabilities(socket: ClientConnection) -> None:
    ask(socket, max_tokens=30, logprobs=0)
    tokens, text = [], ""
    while "delta" in (received := message(socket)):
        text += received["delta"]
        tokens += [entry["token"] for entry in received["logprobs"]]
    assert tokens == [synthetic_token_text(token_id) for token_id in expected_ids(PROMPT, 30)]
    assert text == expected_text(PROMPT, 30)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_cancelled_stream_ends_with_what_there_was(doors: Daemon, socket: ClientConnection) -> None:
    ask(socket, id="a", max_tokens=5000)
    ask(socket, id="b", max_tokens=5000)
    text = ""
    while not text:
        received = message(socket)
        text += received["delta"] if received["id"] == "a" else ""
    socket.send('{"cancel":"a"}')
    while (received := message(socket))["id"] == "b" or "delta" in received:
        text += received["delta"] if received["id"] == "a" else ""
    assert (received["id"], received["finish_reason"]) == ("a", "abort")
    tokens = received["usage"]["completion_tokens"]
    assert 0 < tokens < 5000
    assert expected_text(PROMPT, tokens).removesuffix("\ufffd") == text
    wait_until(lambda: doors.tenant("acme").used.streams == 1)
    # The other one goes on, and the id is free again.
    assert message(socket)["id"] == "b"
    ask(socket, id="a", max_tokens=2, seed=3)
    while (received := message(socket))["id"] == "b":
        pass
    assert expected_text(PROMPT, 2, 3).startswith(received["delta"])
    socket.send('{"cancel":"b"}')
    socket.send('{"cancel":"nobody"}')


def test_the_stream_without_an_id_is_cancelled_by_null(socket: ClientConnection) -> None:
    ask(socket, max_tokens=5000)
    assert "delta" in message(socket)
    socket.send('{"cancel":null}')
    assert answer(socket)[1]["finish_reason"] == "abort"
    ask(socket, max_tokens=2)
    assert answer(socket)[1]["finish_reason"] == "length"


def test_an_id_can_be_used_once_at_a_time(socket: ClientConnection) -> None:
    for stream_id in ("x", None):
        ask(socket, id=stream_id, max_tokens=100)
        ask(socket, id=stream_id, max_tokens=100)
        refused = [received for received in _until_end(socket) if "error" in received]
        assert [(received.get("id"), received["error"]["code"]) for received in refused] == [
            (stream_id, "invalid_request")
        ]


def _until_end(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    while "finish_reason" not in (received := message(socket)):
        yield received


def test_closing_ends_the_streams(doors: Daemon) -> None:
    with dial(doors) as socket:
        for number in range(3):
            ask(socket, id=str(number), max_tokens=5000)
        assert message(socket)
        wait_until(lambda: doors.tenant("acme").used.streams == 3)
        socket.close(1000, "enough")
        assert socket.close_code == 1000
    wait_until(doors.is_at_rest)


# -- errors -----------------------------------------------------------------------------------------------------------

BAD_MESSAGES = {
    "no JSON": "{",
    "no object": "[1]",
    "nothing to generate": "{}",
    "prompt and messages": '{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
    "wrong type": '{"prompt": 7}',
    "over the range": '{"prompt": "a", "temperature": 3}',
    "not served": '{"prompt": "a", "best_of": 2}',
    "n": '{"prompt": "a", "n": 2}',
    "empty prompt": '{"prompt": ""}',
    "unknown token": '{"prompt": [99999]}',
    "id of a wrong type": '{"id": 3, "prompt": "a"}',
    "half a surrogate pair": '{"prompt": "\\ud800"}',
    "too deep": '{"prompt": ' + "[" * 10_000 + "]" * 10_000 + "}",
}


@pytest.mark.parametrize("text", BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_bad_message_gets_an_error_and_changes_nothing(socket: ClientConnection, text: str) -> None:
    ask(socket, id="before", max_tokens=40)
    socket.send(text)
    received = list(_until_end(socket))
    (error,) = [entry["error"] for entry in received if "error" in entry]
    assert error["code"] == "invalid_request"
    assert error["message"].startswith("cannot ")
    assert "".join(entry.get("delta", "") for entry in received) == expected_text(PROMPT, 40).removesuffix("\ufffd")


def test_an_error_names_the_stream_that_it_is_about(socket: ClientConnection) -> None:
    ask(socket, id="mine", model="gpt-4")
    received = message(socket)
    assert (received["id"], received["error"]["code"]) == ("mine", "not_found")
    ask(socket, id="long", prompt=" word" * 9000)
    received = message(socket)
    assert (received["id"], received["error"]["code"]) == ("long", "context_too_long")
    ask(socket, id="mine", max_tokens=1)
    assert message(socket)["id"] == "mine"


def test_a_message_over_the_limit_ends_the_connection(doors: Daemon, socket: ClientConnection) -> None:
    ask(socket, max_tokens=5000)
    ask(socket, prompt="x" * (64 << 10))
    with pytest.raises(ConnectionClosedError):
        while True:
            socket.recv(TIMEOUT_S)
    assert socket.close_code == 1009
    wait_until(doors.is_at_rest)


def test_a_text_that_is_not_utf8_ends_the_connection(doors: Daemon, socket: ClientConnection) -> None:
    socket.send(b'{"prompt":"\xff"}', text=True)
    with pytest.raises(ConnectionClosedError):
        socket.recv(TIMEOUT_S)
    assert socket.close_code == 1007
    wait_until(doors.is_at_rest)


def test_a_broken_frame_ends_the_connection(doors: Daemon, socket: ClientConnection) -> None:
    ask(socket, max_tokens=5000)
    socket.socket.sendall(Frame(Opcode.TEXT, b"not masked").serialize(mask=False))
    with pytest.raises(ConnectionClosedError):
        while True:
            socket.recv(TIMEOUT_S)
    assert socket.close_code == 1002
    wait_until(doors.is_at_rest)


# -- the connection ---------------------------------------------------------------------------------------------------


def test_the_subprotocol_is_agreed_on(doors: Daemon) -> None:
    for offered, chosen in (([SUBPROTOCOL], SUBPROTOCOL), (["other", SUBPROTOCOL], SUBPROTOCOL), (None, None)):
        with dial(doors, subprotocols=offered) as socket:
            assert socket.subprotocol == chosen
            ask(socket, max_tokens=1)
            assert message(socket)


def test_a_browser_shows_its_key_as_a_subprotocol_which_is_not_told_back(doors: Daemon) -> None:
    before = doors.tenant("globex").used.requests
    offered = [SUBPROTOCOL, f"seedance.key.{doors.keys['globex']}"]
    with dial(doors, additional_headers={}, subprotocols=offered) as socket:
        assert socket.subprotocol == SUBPROTOCOL
        ask(socket, max_tokens=1)
        assert answer(socket)[1]["finish_reason"] == "length"
    with dial(doors, additional_headers={}, path=f"/v2/infer?key={doors.keys['globex']}") as socket:
        ask(socket, max_tokens=1)
        assert answer(socket)[1]["finish_reason"] == "length"
    assert doors.tenant("globex").used.requests == before + 2


def test_an_unknown_key_is_refused_before_the_upgrade(doors: Daemon) -> None:
    with pytest.raises(InvalidStatus) as caught:
        dial(doors, additional_headers={"Authorization": "Bearer sk-seed-of-nobody"})
    assert caught.value.response.status_code == 401


def test_what_is_no_upgrade_is_told_so(doors: Daemon) -> None:
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    for fields, status in (
        ({}, 426),
        ({**upgrade, "Sec-WebSocket-Version": "8"}, 426),
        ({**upgrade, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "short"}, 400),
    ):
        with Connection(doors.address) as connection:
            connection.send(request("GET", "/v2/infer", doors.keys["acme"], fields=fields))
            response = connection.response()
            assert (response.status, response.error["code"]) == (status, "invalid_request")


def test_requests_may_come_with_the_handshake(doors: Daemon) -> None:
    frame = Frame(Opcode.TEXT, b'{"prompt":"Hi","max_tokens":2,"stream":false}').serialize(mask=True)
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    with Connection(doors.address) as connection:
        connection.send(request("GET", "/v2/infer", doors.keys["acme"], fields=upgrade) + frame)
        assert connection.head()[0] == 101
        first, length = connection.read(2)
        assert first == 0x81
        assert json.loads(connection.read(int.from_bytes(connection.read(2)) if length == 126 else length))[
            "text"
        ] == expected_text("Hi", 2)
        connection.send(Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True))
        assert connection.rest() == Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=False)


def test_an_upgrade_on_a_connection_that_has_served_http(doors: Daemon) -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    with Connection(doors.address) as connection:
        connection.send(request("GET", "/v1/models", doors.keys["acme"]))
        assert connection.response().status == 200
        # The other tenant's, so the connection goes back to the gateway and on to another worker first.
        connection.send(request("GET", "/v2/infer", doors.keys["globex"], fields=upgrade))
        assert connection.head()[0] == 101
        assert doors.tenant("globex").connections == 1
        connection.send(Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True))
        assert connection.rest() == Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=False)


def test_pings_are_answered_while_a_stream_runs(socket: ClientConnection) -> None:
    ask(socket, max_tokens=300)
    for payload in (b"", b"x" * 125):
        assert socket.ping(payload).wait(TIMEOUT_S)
    assert answer(socket)[1]["finish_reason"] == "length"


def test_a_message_may_come_in_fragments(socket: ClientConnection) -> None:
    socket.send(iter(['{"prompt":"Once', ' upon a time",', '"max_tokens":2}']))
    assert answer(socket)[0] == expected_text(PROMPT, 2)


def test_an_idle_client_that_answers_pings_stays_and_one_that_does_not_goes(doors: Daemon) -> None:
    """The configuration asks for a sign of life each second."""
    with dial(doors) as alive, Connection(doors.address) as dead:
        upgrade = {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version": "13",
        }
        dead.send(request("GET", "/v2/infer", doors.keys["acme"], fields=upgrade))
        assert dead.head()[0] == 101
        begun = time.monotonic()
        assert dead.read(2) == Frame(Opcode.PING, b"").serialize(mask=False)
        while not dead.is_closed():
            pass
        assert 1.5 < time.monotonic() - begun < 6
        ask(alive, max_tokens=1)
        assert answer(alive)[1]["finish_reason"] == "length"


def test_the_closing_handshake_of_either_side(doors: Daemon) -> None:
    with dial(doors) as socket:
        socket.close(4000, "mine")
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(TIMEOUT_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4000
        assert not isinstance(caught.value, ConnectionClosedOK)
    with dial(doors) as socket:
        ask(socket, max_tokens=5000)
        assert message(socket)
        socket.socket.shutdown(1)  # no close frame: as good as gone
        wait_until(doors.is_at_rest)
