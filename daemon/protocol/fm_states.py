"""The life of an FM session as a table, shared with the client libraries through `vectors/states.json`.

Nothing that is done in a state is decided here, and nothing else decides what the state is. A server's session runs
through the same states: it is RECONNECTING while it is parked.

What a client does:

* RECONNECTING: wait `reconnect_delay_s` (not before the first attempt), see that the key is still good, connect.
* RESTORING: send HELLO, with the resume token if there is one; send nothing numbered.
* CONNECTED: send again what the server has not, then what waited; ping.
* CLOSED: nothing any more; a new session may be begun.
"""

from __future__ import annotations

import enum
from typing import Final

from seedance.errors import LocalProtocolError


class State(enum.StrEnum):
    """Where a session stands."""

    RECONNECTING = "reconnecting"
    RESTORING = "restoring"
    CONNECTED = "connected"
    CLOSED = "closed"


class Trigger(enum.StrEnum):
    """What may happen to a session."""

    OPENED = "opened"  # there is a connection
    WELCOMED = "welcomed"  # both know where to go on
    LOST = "lost"  # the connection ended, or failed, or its peer is gone
    REFUSED = "refused"  # the peer ended it with a code of FINAL_CODES
    CLOSED = "closed"  # the owner wants no more


TRANSITIONS: Final[dict[State, dict[Trigger, State]]] = {
    State.RECONNECTING: {
        Trigger.OPENED: State.RESTORING,
        Trigger.LOST: State.RECONNECTING,
        Trigger.CLOSED: State.CLOSED,
    },
    State.RESTORING: {
        Trigger.WELCOMED: State.CONNECTED,
        Trigger.LOST: State.RECONNECTING,
        Trigger.REFUSED: State.CLOSED,
        Trigger.CLOSED: State.CLOSED,
    },
    State.CONNECTED: {
        Trigger.LOST: State.RECONNECTING,
        Trigger.REFUSED: State.CLOSED,
        Trigger.CLOSED: State.CLOSED,
    },
    State.CLOSED: {
        Trigger.LOST: State.CLOSED,
        Trigger.CLOSED: State.CLOSED,
    },
}

FINAL_CODES: Final = frozenset(
    ("unauthorized", "not_found", "gone", "invalid_request", "flow_control", "protocol_error")
)
"""Codes that another attempt would meet again; after any other one a client reconnects."""

MAX_RECONNECT_DELAY_S: Final = 30.0


def next_state(state: State, trigger: Trigger) -> State:
    """Return the state that follows; raises LocalProtocolError where the table has none."""
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        raise LocalProtocolError(f"cannot be '{trigger}' while '{state}'") from None


def reconnect_delay_s(attempt: int, part: float) -> float:
    """Return how long to wait before an attempt, counted from 1 since the last connection that was welcomed.

    The ceiling is 1, 2, 4 … up to 30 s; `part` is random, from 0 to 1, and says how much of it (full jitter). A
    `retry_after_ms` that the server told is the least, whatever comes out here.
    """
    return min(MAX_RECONNECT_DELAY_S, 2.0 ** min(attempt - 1, 5)) * part
