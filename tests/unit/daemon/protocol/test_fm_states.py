"""The table of states: who can get where."""

from __future__ import annotations

import pytest

from seedance.daemon.doors.errors import CODES
from seedance.daemon.protocol.fm_states import (
    FINAL_CODES,
    TRANSITIONS,
    State,
    Trigger,
    next_state,
    reconnect_delay_s,
)
from seedance.errors import LocalProtocolError


def test_the_way_of_a_connection_that_breaks() -> None:
    state = State.RECONNECTING
    seen = [state]
    for trigger in (Trigger.OPENED, Trigger.WELCOMED, Trigger.LOST, Trigger.OPENED, Trigger.LOST, Trigger.OPENED):
        state = next_state(state, trigger)
        seen.append(state)
    assert [str(each) for each in seen] == [
        *("reconnecting", "restoring", "connected", "reconnecting", "restoring", "reconnecting", "restoring"),
    ]


def test_every_state_has_a_row_and_closed_is_final() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(TRANSITIONS[State.CLOSED].values()) == {State.CLOSED}
    for state in State:
        assert next_state(state, Trigger.CLOSED) is State.CLOSED


@pytest.mark.parametrize(
    ("state", "trigger"),
    [
        (State.RECONNECTING, Trigger.WELCOMED),
        (State.CONNECTED, Trigger.OPENED),
        (State.CLOSED, Trigger.OPENED),
        (State.RECONNECTING, Trigger.REFUSED),
    ],
)
def test_what_the_table_does_not_have(state: State, trigger: Trigger) -> None:
    with pytest.raises(LocalProtocolError, match=f"cannot be '{trigger}' while '{state}'"):
        next_state(state, trigger)


def test_final_codes_are_codes() -> None:
    assert FINAL_CODES < CODES
    assert not FINAL_CODES & {"overloaded", "engine_unavailable", "rate_limited", "internal"}


def test_delays_double_up_to_half_a_minute() -> None:
    assert [reconnect_delay_s(attempt, 1.0) for attempt in (1, 2, 3, 4, 5, 6, 1000)] == [1, 2, 4, 8, 16, 30, 30]
    assert reconnect_delay_s(3, 0.25) == 1.0
    assert reconnect_delay_s(9, 0.0) == 0.0
