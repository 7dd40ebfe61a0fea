"""HTTP byte by byte: what a library would not send, and what it would hide of the answer."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Self

import msgspec

TIMEOUT_S = 20.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger


class Response(msgspec.Struct):
    """A response; the names of `fields` are in lower case."""

    status: int
    fields: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, complete."""
        assert self.fields["content-type"] == "application/json"
        error: dict[str, Any] = self.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return error


class Connection:
    """A blocking connection to "host:port" or "unix:/path"."""

    def __init__(self, address: str, *, receive_buffer_bytes: int = 0) -> None:
        if address.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: Any = address.removeprefix("unix:")
        else:
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            host, _, port = address.rpartition(":")
            where = host, int(port)
        if receive_buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(where)
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, *data: bytes) -> None:
        """Send each piece in a packet of its own, as far as TCP lets one."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in data:
            self.sock.sendall(piece)

    def head(self) -> tuple[int, dict[str, str]]:
        """Read one response head: the status, and the fields."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        fields: dict[str, str] = {}
        while (field := self._file.readline().rstrip(b"\r\n")) != b"":
            name, _, value = field.decode("latin-1").partition(": ")
            assert name.lower() not in fields
            fields[name.lower()] = value
        return int(line.split()[1]), fields

    def chunks(self) -> Iterator[bytes]:
        """Read a chunked body."""
        return (data for _, data in self.sized_chunks())

    def sized_chunks(self) -> Iterator[tuple[bytes, bytes]]:
        """Read a chunked body, each chunk with the digits of its size."""
        while size := int(digits := self._file.readline().removesuffix(b"\r\n"), 16):
            yield digits, self._file.read(size)
            assert self._file.readline() == b"\r\n"
        assert self._file.readline() == b"\r\n"

    def response(self, *, has_body: bool = True) -> Response:
        """Read one response; `has_body` is False for the answer to HEAD. Interim responses are not passed over."""
        status, fields = self.head()
        if not has_body or status < 200:
            return Response(status, fields, b"")
        if "transfer-encoding" in fields:
            assert fields["transfer-encoding"] == "chunked"
            return Response(status, fields, b"".join(self.chunks()))
        if "content-length" in fields:
            return Response(status, fields, self._file.read(int(fields["content-length"])))
        return Response(status, fields, self.rest())

    def read(self, length: int) -> bytes:
        return self._file.read(length)

    def rest(self) -> bytes:
        """Read up to the end."""
        return self._file.read()

    def is_closed(self) -> bool:
        """Wait for the peer to close, however it does; False when something comes instead."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def finish_sending(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close()

    def close(self) -> None:
        self._file.close()
        self.sock.close()


def request(
    method: str,
    path: str,
    key: str | None = None,
    body: object = None,
    fields: Mapping[str, str] | None = None,
    version: str = "1.1",
) -> bytes:
    """Return a request; a `body` that is not bytes is sent as JSON, with its length."""
    lines = [f"{method} {path} HTTP/{version}", "Host: test"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (fields or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def events(body: bytes) -> list[Any]:
    """Return the data of the server-sent events in a stream that ended well; comments and pings are passed over."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    blocks = [block for block in blocks if block and not block.startswith(b":")]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    assert blocks.pop() == b"data: [DONE]"
    return [msgspec.json.decode(block.removeprefix(b"data: ")) for block in blocks]
