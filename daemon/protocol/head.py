"""One HTTP/1.x request head: read strictly, in one way only.

The gateway reads a head to learn whose connection it is, and the worker reads the same bytes again: were there two
readers, a head that they understand differently would let one tenant speak with another one's key. So there is this
one function, and where RFC 9112 lets a recipient repair what it got (bare LF, obs-fold, white space before the colon,
repeated lengths) it refuses instead: a repair is what request smuggling is made of.

No library does this for us. llhttp (through httptools) lets several hosts, two spaces in the request line, other
protocols' names and chunk extensions of any length pass, tells its errors apart by text only, and calls back per
field; h11 accepts a bare LF as the end of a line. Both are held against this file in the tests instead.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from seedance.errors import RemoteProtocolError


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer may make us hold.

    `head_bytes` counts from the method to the empty line, both included. `chunk_line_bytes` bounds one chunk-size line
    without its CRLF, `chunk_extension_bytes` all extensions of one body together. `buffer_bytes` is the mark over which
    a connection asks not to be read from while it is not reading itself.
    """

    head_bytes: int = 32 << 10
    headers: int = 100
    target_bytes: int = 8 << 10
    body_bytes: int = 8 << 20
    chunk_line_bytes: int = 256
    chunk_extension_bytes: int = 4 << 10
    trailer_bytes: int = 4 << 10
    buffer_bytes: int = 64 << 10


DEFAULT_LIMITS: Final = Limits()


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request head that passed every check.

    `path` is as it came, percent-encoding included; `query` is what followed the first "?". Names in `headers` are in
    lower case, values are latin-1 without surrounding white space. `content_length` is None without such a field.
    `head_bytes` is how much of the input the head took.
    """

    method: str
    path: str
    query: str
    http_version: str
    headers: list[tuple[str, str]]
    combined: dict[str, str]
    content_length: int | None
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    is_websocket_upgrade: bool
    head_bytes: int

    def get(self, name: str) -> str | None:
        """Return a field's value; several fields of one name are joined by ", " (RFC 9110 §5.3).

        A credential that comes twice thus equals neither of the two.
        """
        return self.combined.get(name)

    @property
    def has_body(self) -> bool:
        """Tell whether bytes of a body follow the head."""
        return self.chunked or bool(self.content_length)


_TOKEN: Final = rb"!#$%&'*+\-.^_`|~0-9A-Za-z"
_REQUEST_LINE: Final = re.compile(rb"([" + _TOKEN + rb"]++) ([!-~]++) HTTP/([0-9]\.[0-9])\r\n")
# Every quantifier is possessive: a block that does not match is refused in one pass, whatever it holds.
FIELDS: Final = re.compile(rb"(?:[" + _TOKEN + rb"]++:[\t -~\x80-\xff]*+\r\n)*+")
# What a line that is no field looks like, most telling first.
_FAULTS: Final = (
    (re.compile(rb"[ \t]"), "a header field is folded over several lines"),
    (re.compile(rb"[^:]*+\Z"), "a header line has no colon"),
    (re.compile(rb"[^:]*[ \t]:"), "there is white space between a field name and its colon"),
    (re.compile(rb"(?![" + _TOKEN + rb"]++:)"), "a field name is not a token"),
    (re.compile(rb"[^\r]*\r"), "a header field contains a bare CR"),
    (re.compile(rb""), "a header field contains a control character"),
)
_FIRST_BYTES: Final = frozenset(byte for byte in range(256) if re.match(rb"[" + _TOKEN + rb"]", bytes((byte,))))
_HOST_CHARACTERS: Final = r"[A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]"
_HOST: Final = re.compile(_HOST_CHARACTERS + "*")
_ABSOLUTE: Final = re.compile(r"https?://" + _HOST_CHARACTERS + r"+(?=[/?]|\Z)", re.IGNORECASE)
_LENGTH: Final = re.compile(r"[0-9]+")
_LENGTH_DIGITS: Final = 18
_CODINGS: Final = re.compile(r"(?:[^\s,]+[ \t]*,[ \t]*)+chunked")
_ONCE: Final = frozenset(("host", "content-length", "transfer-encoding"))
_SUPPORTED_VERSIONS: Final = frozenset(("1.1", "1.0"))


def parse_head(data: bytes | bytearray, limits: Limits = DEFAULT_LIMITS, scanned: int = 0) -> Request | None:
    """Return the request head at the start of `data`, or None while it is incomplete.

    `scanned` is the length that `data` had at the last call that returned None: with it, a head that comes byte by
    byte is searched once, not once a byte. Raises RemoteProtocolError with the HTTP status to answer as `code`; the
    outcome does not depend on how the bytes were cut.
    """
    if data and data[0] not in _FIRST_BYTES:
        raise _malformed("the request line begins with no method")
    start = max(scanned - 3, 0)
    end = data.find(b"\r\n\r\n", start, limits.head_bytes)
    seen = min(len(data), limits.head_bytes) if end < 0 else end
    # Every LF must have a CR before it; the one for the LF at `start` lies a byte earlier.
    if data.count(b"\n", start, seen) != data.count(b"\r\n", max(start - 1, 0), seen):
        raise _malformed("a line ends in a bare LF; lines end in CRLF")
    if end < 0:
        if seen < limits.head_bytes:
            return None
        if data.find(b"\r\n", 0, seen) < 0:
            raise _target_too_long(limits)
        raise RemoteProtocolError(f"cannot take a request head of more than {limits.head_bytes} bytes", 431)
    return _parse(data, end, limits)


def _parse(data: bytes | bytearray, end: int, limits: Limits) -> Request:
    line = _REQUEST_LINE.match(data)
    if line is None:
        raise _malformed("the request line is not 'METHOD target HTTP/1.1'")
    method, target, version = (part.decode("ascii") for part in line.groups())
    if version not in _SUPPORTED_VERSIONS:
        raise RemoteProtocolError(f"cannot speak HTTP/{version}; use HTTP/1.1", 505)
    if len(target) > limits.target_bytes:
        raise _target_too_long(limits)
    headers, combined = _fields(bytes(data[line.end() : end + 2]), limits)
    _check_host(combined.get("host"), version)
    path, query = _split_target(method, target)
    content_length, chunked = _framing(combined, version)
    connection = _members(combined.get("connection"))
    keep_alive = "close" not in connection and (version == "1.1" or "keep-alive" in connection)
    return Request(
        method,
        path,
        query,
        version,
        headers,
        combined,
        content_length,
        chunked,
        keep_alive,
        _expects_continue(combined.get("expect"), version),
        "upgrade" in connection and "websocket" in _members(combined.get("upgrade")),
        end + 4,
    )


def _fields(block: bytes, limits: Limits) -> tuple[list[tuple[str, str]], dict[str, str]]:
    if FIELDS.fullmatch(block) is None:
        raise _malformed(_field_fault(block))
    lines = block.decode("latin-1").split("\r\n")
    lines.pop()
    if len(lines) > limits.headers:
        raise RemoteProtocolError(f"cannot take more than {limits.headers} header fields", 431)
    headers: list[tuple[str, str]] = []
    combined: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        headers.append((name, value))
        if name not in combined:
            combined[name] = value
        elif name in _ONCE:
            raise _malformed(f"there is more than one {name} field")
        else:
            combined[name] += ", " + value
    return headers, combined


def _field_fault(block: bytes) -> str:
    """Say what is wrong with the first bad line of a block of fields."""
    for line in block.split(b"\r\n"):
        if FIELDS.fullmatch(line + b"\r\n") is None:
            return next(reason for pattern, reason in _FAULTS if pattern.match(line))
    raise AssertionError("every line is a field, but the block is not")


def _check_host(host: str | None, version: str) -> None:
    if host is None:
        if version == "1.1":
            raise _malformed("there is no host field")
    elif _HOST.fullmatch(host) is None:
        raise _malformed("the host field is not a host")


def _split_target(method: str, target: str) -> tuple[str, str]:
    """Split origin-form, absolute-form or, for OPTIONS, "*" (RFC 9112 §3.2); CONNECT is a proxy's business."""
    if "#" in target or method == "CONNECT":
        raise _malformed("the target is no path; use 'METHOD /path?query HTTP/1.1'")
    path, _, query = target.partition("?")
    if not path.startswith("/"):
        absolute = _ABSOLUTE.match(target)
        if absolute:
            path = path[absolute.end() :] or "/"
        elif target != "*" or method != "OPTIONS":
            raise _malformed("the target is no path; use 'METHOD /path?query HTTP/1.1'")
    return path, query


def _framing(fields: dict[str, str], version: str) -> tuple[int | None, bool]:
    """Return the body's length and whether it is chunked (RFC 9112 §6, without any of its repairs)."""
    length, coding = fields.get("content-length"), fields.get("transfer-encoding")
    if coding is not None:
        if length is not None:
            raise _malformed("there are both a transfer-encoding and a content-length field")
        if version == "1.0":
            raise _malformed("HTTP/1.0 has no transfer codings")
        if coding.lower() != "chunked":
            # Without chunked at the end nobody knows where the body ends, hence 400 and not 501 (§6.3).
            known_end = _CODINGS.fullmatch(coding.lower()) and "chunked" not in _members(coding[: -len("chunked")])
            raise RemoteProtocolError("cannot decode any transfer coding but chunked", 501 if known_end else 400)
        return None, True
    if length is None:
        return None, False
    if _LENGTH.fullmatch(length) is None:
        raise _malformed("the content-length field is not a number of bytes")
    if len(length) > _LENGTH_DIGITS:
        raise RemoteProtocolError("cannot take a body of so many bytes", 413)
    return int(length), False


def _expects_continue(expect: str | None, version: str) -> bool:
    if expect is None or version == "1.0":
        return False
    if expect.lower() != "100-continue":
        raise RemoteProtocolError("cannot meet any expectation but 100-continue", 417)
    return True


def _members(value: str | None) -> frozenset[str]:
    """Return the members of a comma-separated list in lower case."""
    if value is None:
        return frozenset()
    return frozenset(member.strip(" \t").lower() for member in value.split(","))


def _malformed(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"cannot read the request: {reason}", 400)


def _target_too_long(limits: Limits) -> RemoteProtocolError:
    return RemoteProtocolError(f"cannot take a target of more than {limits.target_bytes} bytes", 414)
