"""Server-sent events (WHATWG HTML §9.2), as written by a server.

Everything here returns the bytes of whole events or comments; putting them into HTTP chunks is the connection's
business, except in `EventTemplate`, whose one formatting does both.
"""

from __future__ import annotations

import re
from typing import Final

from seedance.errors import LocalProtocolError

HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    # no-transform keeps intermediaries from compressing, and thereby from buffering.
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
)
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b"\n\n"
"""A sign of life between events: empty lines, which are no event (§9.2.6).

vLLM's load client (0.32.0) reads nothing any more behind a comment. There are two of them for who splits at double line
breaks and expects each part to begin with its field.
"""

_LINE_BREAK: Final = re.compile(rb"\r\n|\r|\n")
_NOT_IN_ID: Final = re.compile(r"[\r\n\0]")


def event(data: bytes, id: str | None = None) -> bytes:
    """Return one event; each line of `data` becomes a `data:` line, and a reader joins them with LF.

    Raises LocalProtocolError when `id` holds a line break or NUL, which would make a reader ignore it.
    """
    if id is None:
        head = b""
    elif _NOT_IN_ID.search(id):
        raise LocalProtocolError("cannot send an event id with a line break or NUL in it")
    else:
        head = b"id: %b\n" % id.encode()
    return head + _lines(b"data: ", data) + b"\n"


def comment(text: str) -> bytes:
    """Return a comment, which readers ignore."""
    return _lines(b": ", text.encode()) + b"\n"


def comment_line(text: str) -> bytes:
    """Return a comment without an empty line behind it, for streams whose events have ids.

    OpenAI's client (2.x) takes an empty line for an event without data once it has seen an id; §9.2.6 says otherwise.
    """
    return _lines(b": ", text.encode())


def retry_line(milliseconds: int) -> bytes:
    """Return the time after which a reader is to connect again, in a line to be put in front of an event."""
    return b"retry: %d\n" % milliseconds


def _lines(prefix: bytes, data: bytes) -> bytes:
    if b"\n" not in data and b"\r" not in data:
        return prefix + data + b"\n"
    return b"".join([prefix + line + b"\n" for line in _LINE_BREAK.split(data)])


class EventTemplate:
    """Events that differ in one place: everything else is put together once.

    `prefix` and `suffix` surround the part that changes, usually a JSON string with its quotes. None of the three may
    contain a line break; JSON without indentation never does. Only the constant parts are checked. `before` and
    `behind` are what surrounds it in the event.
    """

    __slots__ = ("_bare", "_framed", "_overhead", "before", "behind")

    def __init__(self, prefix: bytes, suffix: bytes) -> None:
        if _LINE_BREAK.search(prefix + suffix):
            raise LocalProtocolError("cannot build an event template with a line break in it")
        self.before, self.behind = b"data: " + prefix, suffix + b"\n\n"
        self._overhead = len(self.before) + len(self.behind)
        self._bare = self.before.replace(b"%", b"%%") + b"%b" + self.behind.replace(b"%", b"%%")
        self._framed = b"%x\r\n" + self._bare + b"\r\n"

    def event(self, text: bytes) -> bytes:
        """Return the event around `text`."""
        return self._bare % text

    def chunk(self, text: bytes) -> bytes:
        """Return the event around `text` as one HTTP chunk."""
        return self._framed % (self._overhead + len(text), text)
