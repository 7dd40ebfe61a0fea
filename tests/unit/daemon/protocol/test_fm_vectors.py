"""Every vector that ships, against the server's and the client's side of the protocol."""

from __future__ import annotations

from typing import Any

import pytest
from support.fm_vectors import cases, described, load, read, write

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import DEFAULT_PAYLOAD_BYTES, Kind
from seedance.daemon.protocol.fm_messages import Error, Hello, Infer, Welcome
from seedance.daemon.protocol.fm_opening import ServerOpening
from seedance.daemon.protocol.fm_receiver import Placed, Receiver, unwrap
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Failed, Session
from seedance.daemon.protocol.fm_states import (
    FINAL_CODES,
    TRANSITIONS,
    State,
    reconnect_delay_s,
)
from seedance.daemon.protocol.fm_timing import HEARTBEAT_S, MAX_MISSES, RoundTrip
from seedance.errors import RemoteProtocolError

OUTCOMES = {
    "in_order": Placed.IN_ORDER,
    "early": Placed.EARLY,
    "duplicate": Placed.DROPPED,
    "flow_control": Placed.TOO_FAR,
    "protocol_error": Placed.STRANGE,
}


def each(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["summary"]) for case in cases(name)])


def last_words(session: Session | ServerOpening) -> list[Any]:
    data = session.data_to_send() if isinstance(session, ServerOpening) else session.data_to_send(2.0)
    return [message for each in data for _, message in read(each, DEFAULT_PAYLOAD_BYTES)]


@each("frames.json")
def test_frames(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    frames = [described(fields) for fields in case["frames"]]
    assert read(data, DEFAULT_PAYLOAD_BYTES) == frames
    if case.get("canonical", True):
        assert write(frames) == data


def test_every_kind_has_a_vector() -> None:
    assert {fields["kind"] for case in cases("frames.json") for fields in case["frames"]} == set(Kind.__members__)


@each("invalid.json")
def test_invalid(case: dict[str, Any]) -> None:
    data, limit = bytes.fromhex(case["hex"]), case.get("payload_bytes", DEFAULT_PAYLOAD_BYTES)
    with pytest.raises(RemoteProtocolError, match="^cannot ") as caught:
        read(data, limit)
    assert caught.value.code == case["close_code"]
    opening = ServerOpening(limit)
    opening.receive_data(data)
    (failed,) = opening.events_received()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.close_code) == (case["error"], case["close_code"])
    assert (opening.should_close, opening.close_code) == (True, case["close_code"])
    assert last_words(opening) == [Error(stream=0, code=failed.code, message=failed.message)]


def server() -> Session:
    session = ServerSession("s", "t", 1000)
    session.connect(Hello(client_id="c"), 0.0)
    assert session.data_to_send(0.0)
    return session


def client() -> Session:
    session = ClientSession("c")
    session.connect(0.0)
    welcome = Welcome(
        session_id="s", epoch=1, resume_token="t", resume_for_ms=1, oldest_seq=1, next_seq=1, last_seq=0, window=128
    )
    session.receive_data(write([(0, welcome)]), 0.0)
    session.infer(Infer(stream=1, model="m"))
    assert session.data_to_send(0.0)
    return session


@each("refused.json")
def test_refused(case: dict[str, Any]) -> None:
    session = server() if case["to"] == "server" else client()
    session.events_received()
    *before, last = (bytes.fromhex(data) for data in case["hex"])
    for data in before:
        session.receive_data(data, 1.0)
    assert not session.should_close
    session.receive_data(last, 1.0)
    failed = session.events_received()[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.close_code) == (case["error"], case["close_code"])
    assert session.close_code == case["close_code"]
    assert last_words(session) == [Error(stream=0, code=failed.code, message=failed.message)]


@each("sequences.json")
def test_sequences(case: dict[str, Any]) -> None:
    expected, seq_id = case["expected_seq"], case["seq_id"]
    receiver = Receiver(expected)
    assert receiver.place(seq_id, b"x", 0, 1, 0.0, RoundTrip()) is OUTCOMES[case["outcome"]]
    if "seq" in case:
        assert unwrap(seq_id, expected) == case["seq"]


def test_states() -> None:
    states = load("states.json")
    ours = {
        str(state): {str(trigger): str(after) for trigger, after in row.items()} for state, row in TRANSITIONS.items()
    }
    assert states["transitions"] == ours
    assert states["start"] == State.RECONNECTING
    assert states["final"] == sorted(FINAL_CODES)
    assert states["delays_s"] == [reconnect_delay_s(attempt, 1.0) for attempt in range(1, 9)]
    assert (states["heartbeat_s"], states["misses"]) == (HEARTBEAT_S, MAX_MISSES)
