"""A connection up to its HELLO."""

from __future__ import annotations

import pytest
from support.fm_pair import messages
from support.fm_vectors import write

from seedance.daemon.protocol.fm_messages import Error, Hello, Infer
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_session import Failed

HELLO = Hello(client_id="c")


def test_an_opening_is_one_hello() -> None:
    opening = ServerOpening()
    opening.receive_data(write([(0, HELLO)]))
    assert opening.events_received() == [HelloReceived(HELLO)]
    assert (opening.data_to_send(), opening.should_close) == ([], False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(write([(0, HELLO), (0, HELLO)]), id="two"),
        pytest.param(write([(1, Infer(stream=1, model="m"))]), id="another kind"),
        pytest.param(b"FM\x01\0\0\0\x01" + write([(0, HELLO)])[7:], id="a sequence number"),
    ],
)
def test_an_opening_that_is_none(data: bytes) -> None:
    opening = ServerOpening()
    opening.receive_data(data)
    opening.receive_data(data)
    (event,) = opening.events_received()
    assert isinstance(event, Failed)
    assert messages(opening.data_to_send()) == [Error(stream=0, code="protocol_error", message=event.message)]
    assert opening.close_code == 1002


def test_an_owner_without_the_session_refuses() -> None:
    opening = ServerOpening()
    opening.receive_data(write([(0, HELLO)]))
    error = Error(stream=0, code="gone", message="cannot resume: it has expired", oldest_seq=7)
    opening.refuse(error)
    assert messages(opening.data_to_send()) == [error]
    assert (opening.should_close, opening.close_code) == (True, 1008)


def test_an_opening_may_just_end() -> None:
    opening = ServerOpening()
    opening.receive_eof()
    assert (opening.should_close, opening.events_received(), opening.data_to_send()) == (True, [], [])
