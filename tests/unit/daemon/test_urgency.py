"""How urgent a request is: what its header says, and what the kernel knows of its connection."""

from __future__ import annotations

import os
import socket

import pytest

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.urgency import deadline_of, round_trip, urgency
from seedance.engine.request import NOT_URGENT, Urgency


def test_a_tcp_connection_has_a_round_trip() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            for _ in range(3):
                accepted.sendall(b"x")
                assert client.recv(1) == b"x"
            rtt_s, deviation_s = round_trip(accepted.fileno())
            assert 0 < rtt_s < 1
            assert 0 < deviation_s < 1
            found = urgency(accepted.fileno(), 250, 10.0)
            assert (found.deadline_s, found.rtt_s > 0) == (10.25, True)
            assert accepted.send(b"y") == 1, "the socket is its owner's still"


def test_what_is_no_tcp_connection_has_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert round_trip(ours.fileno()) == (0.0, 0.0)
    reading, writing = os.pipe()
    assert round_trip(reading) == (0.0, 0.0)
    os.close(reading)
    os.close(writing)
    assert urgency(-1, None, 10.0) == NOT_URGENT
    assert urgency(-1, 1, 10.0) == Urgency(10.001, 0.0, 0.0)


@pytest.mark.parametrize(("value", "deadline_ms"), [("1", 1), (" 250 ", 250), ("86400000", 86_400_000)])
def test_a_deadline_in_a_header(value: str, deadline_ms: int) -> None:
    assert deadline_of([("host", "x"), ("x-deadline-ms", value)]) == deadline_ms


def test_no_header_is_no_deadline() -> None:
    assert deadline_of([("host", "x")]) is None


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "1e3", "soon", "86400001", "9" * 5000, "\u0663", "1,2"])
def test_what_is_no_deadline(value: str) -> None:
    with pytest.raises(ApiError, match="cannot use the header 'X-Deadline-Ms'") as caught:
        deadline_of([("x-deadline-ms", value)])
    assert (caught.value.code, caught.value.status) == ("invalid_request", 400)
    assert len(str(caught.value)) < 200


def test_two_deadlines_are_none() -> None:
    with pytest.raises(ApiError, match="once"):
        deadline_of([("x-deadline-ms", "1"), ("x-deadline-ms", "1")])
