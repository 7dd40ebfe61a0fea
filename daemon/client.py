"""A small blocking client for `seedancectl`: chat by server-sent events, and one prompt over the JSON WebSocket."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from seedance.daemon.doors.infer import SUBPROTOCOL
from seedance.daemon.protocol.frame import (
    FIN_BIT,
    LENGTH_16,
    LENGTH_64,
    MASK_BIT,
    MAX_LENGTH_16,
    OPCODE_BITS,
    Opcode,
    unmask,
)
from seedance.errors import RemoteProtocolError, ResourceBroken, SeedanceError

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 60.0
_MASK_BYTES: Final = 4
_UNIX: Final = "unix:"


class ApiRefused(SeedanceError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})"


class Client:
    """One server and one key; `address` is "host:port" or "unix:/path". Every call makes a connection of its own.

    Raises ResourceBroken when there is no connection, ApiRefused when the server says no.
    """

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}"}

    def model(self) -> str:
        """Return the name of the model that is served."""
        with self._request("GET", "/v1/models") as response:
            models: list[Mapping[str, Any]] = msgspec.json.decode(response.read())["data"]
        return str(models[0]["id"])

    def chat(self, messages: Sequence[Mapping[str, str]], **parameters: Any) -> Iterator[str]:
        """Yield the answer to a conversation as it comes."""
        body = {"messages": messages, "stream": True, **parameters}
        with self._request("POST", "/v1/chat/completions", body) as response:
            for chunk in _events(response):
                if "error" in chunk:
                    raise ApiRefused(response.status, chunk["error"]["message"])
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

    def infer(self, prompt: str, **parameters: Any) -> Iterator[str]:
        """Yield the continuation of a prompt as it comes, over a WebSocket."""
        with contextlib.closing(_WebSocket(self._connect(), self._address, self._headers)) as websocket:
            websocket.send(Opcode.TEXT, msgspec.json.encode({"prompt": prompt, "stream": True, **parameters}))
            while True:
                message = msgspec.json.decode(websocket.receive())
                if "error" in message:
                    raise ApiRefused(http.client.SWITCHING_PROTOCOLS, message["error"]["message"])
                yield message.get("delta", "")
                if "finish_reason" in message:
                    return

    def _connect(self) -> socket.socket:
        try:
            if self._address.startswith(_UNIX):
                sock = _connect_unix(self._address.removeprefix(_UNIX))
            else:
                host, _, port = self._address.rpartition(":")
                sock = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        except OSError as exc:
            raise ResourceBroken(
                f"cannot connect to seedanced at {self._address} ({exc.strerror or exc}): is it running?"
            ) from exc
        sock.settimeout(_SILENCE_S)
        return sock

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(_host_of(self._address))
        connection.sock = self._connect()
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        with contextlib.closing(connection):
            try:
                connection.request(method, path, data, headers)
                with contextlib.closing(connection.getresponse()) as response:
                    if response.status != http.client.OK:
                        raise ApiRefused(response.status, _message_of(response.read()))
                    yield response
            except (OSError, http.client.HTTPException) as exc:
                raise ResourceBroken(f"cannot get an answer from seedanced at {self._address}: {exc!r}") from exc


def _connect_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _host_of(address: str) -> str:
    return "localhost" if address.startswith(_UNIX) else address


def _message_of(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def _events(response: BinaryIO | http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the decoded data of each event until the one that says [DONE]; comments are skipped."""
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data)
    raise ResourceBroken("cannot read on: the stream ended before it was done")


class _WebSocket:
    """The client's side of one WebSocket, enough for unfragmented text messages (RFC 6455)."""

    def __init__(self, sock: socket.socket, address: str, headers: Mapping[str, str]) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        nonce = base64.b64encode(os.urandom(16)).decode()
        fields = {
            "Host": _host_of(address),
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": nonce,
            "Sec-WebSocket-Protocol": SUBPROTOCOL,
            **headers,
        }
        lines = ["GET /v2/infer HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        try:
            sock.sendall("\r\n".join(lines).encode("latin-1"))
            self._read_response()
        except SeedanceError:
            self.close()
            raise

    def _read_response(self) -> None:
        status_line = self._file.readline().split(maxsplit=2)
        status = int(status_line[1]) if len(status_line) > 1 and status_line[1].isdigit() else 0
        fields = http.client.parse_headers(self._file)
        if status != http.client.SWITCHING_PROTOCOLS:
            raise ApiRefused(status, _message_of(self._file.read(int(fields.get("content-length", 0)))))

    def send(self, opcode: Opcode, payload: bytes) -> None:
        """Send one message in one frame; a client's frames are masked (§5.1)."""
        length = len(payload)
        if length < LENGTH_16:
            head = struct.pack("!BB", FIN_BIT | opcode, MASK_BIT | length)
        elif length <= MAX_LENGTH_16:
            head = struct.pack("!BBH", FIN_BIT | opcode, MASK_BIT | LENGTH_16, length)
        else:
            head = struct.pack("!BBQ", FIN_BIT | opcode, MASK_BIT | LENGTH_64, length)
        mask = os.urandom(_MASK_BYTES)
        self._sock.sendall(head + mask + unmask(payload, mask))

    def receive(self) -> bytes:
        """Return the next message's payload; pings are answered on the way."""
        while True:
            first, length = self._exactly(2)
            if length == LENGTH_16:
                length = int.from_bytes(self._exactly(2))
            elif length == LENGTH_64:
                length = int.from_bytes(self._exactly(8))
            payload = self._exactly(length)
            opcode = first & OPCODE_BITS
            if opcode == Opcode.PING:
                self.send(Opcode.PONG, payload)
            elif opcode == Opcode.CLOSE:
                raise ResourceBroken(f"cannot read on: the server closed the connection ({payload[2:].decode()})")
            elif opcode != Opcode.PONG:
                if not first & FIN_BIT:
                    raise RemoteProtocolError("cannot read a message in several frames", 1003)
                return payload

    def _exactly(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) < length:
            raise ResourceBroken("cannot read on: the connection broke")
        return data

    def close(self) -> None:
        """Say goodbye and close."""
        with contextlib.suppress(OSError):
            self.send(Opcode.CLOSE, struct.pack("!H", 1000))
        self._file.close()
        self._sock.close()
