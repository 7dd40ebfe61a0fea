"""`Last-Event-ID`, by which a reader of server-sent events goes on: the stream's token, a colon, the last sequence."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from seedance.daemon.doors.errors import ApiError, invalid

FIELD: Final = "last-event-id"
# What a token is made of is for the log of streams to say; here it matters that it fits into an event's id.
_ID: Final = re.compile(r"([\w.-]{1,256}):([0-9]{1,18})", re.ASCII)


class LastEvent(msgspec.Struct, frozen=True):
    """Where a reader is; `seq` 0 is before the first event."""

    token: str
    seq: int


def id_prefix(token: str) -> bytes:
    """Return what stands before the sequence in the ids of a stream's events, from the start of the line on."""
    return b"id: %b:" % token.encode()


def parse(id: str) -> LastEvent:
    """Return what the id of an event says. Raises ApiError."""
    found = _ID.fullmatch(id)
    if found is None:
        raise invalid(
            "cannot go on after this event: 'Last-Event-ID' must be the id of an event of the stream, as it came",
            "Last-Event-ID",
        )
    return LastEvent(found[1], int(found[2]))


def of_path(name: str, id: str | None) -> LastEvent:
    """Return where a reader of `/v2/streams/<name>` is, by its `Last-Event-ID` or else by the path.

    The path names the stream by its token, or by the id of an event. Raises ApiError.
    """
    found = _ID.fullmatch(name if ":" in name else f"{name}:0")
    if found is None:
        raise ApiError("not_found", f"cannot find the stream '{name[:200]}'; the path ends with its resume token")
    if id is None:
        return LastEvent(found[1], int(found[2]))
    last = parse(id)
    if last.token != found[1]:
        raise invalid("cannot go on with this stream: 'Last-Event-ID' is of another one", "Last-Event-ID")
    return last
