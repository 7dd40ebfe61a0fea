"""A client of server-sent events that goes on after every cut: asyncio, over HTTP byte by byte."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import msgspec

_LOST = (OSError, asyncio.IncompleteReadError)
_LONGEST_WAIT_S = 0.02
_LIMIT_BYTES = 64 << 10


class Refused(Exception):
    """The answer was an error; `error` is OpenAI's object."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.error: dict[str, Any] = msgspec.json.decode(body)["error"]
        super().__init__(f"{status}: {self.error['message']}")


class Events:
    """A stream as it comes: its events so far, each exactly once and in order, or reading it fails."""

    def __init__(self) -> None:
        self.id = ""
        self.token = ""
        self.seq = 0
        self.chunks: list[dict[str, Any]] = []
        self.is_done = False

    @property
    def last_id(self) -> str:
        return f"{self.token}:{self.seq}"

    def text(self, choice: int = 0) -> str:
        entries = [entry for chunk in self.chunks for entry in chunk["choices"] if entry["index"] == choice]
        return "".join(entry["delta"].get("content", "") if "delta" in entry else entry["text"] for entry in entries)

    def finish_reasons(self) -> dict[int, str]:
        """Return the reason of each choice; none has two."""
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for entry in chunk["choices"]:
                if entry["finish_reason"] is not None:
                    assert entry["index"] not in found
                    found[entry["index"]] = entry["finish_reason"]
        return found

    @property
    def usage(self) -> dict[str, Any]:
        (usage,) = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(usage)

    def take(self, block: bytes) -> None:
        """Take one event, without its empty line."""
        assert not self.is_done
        id, data = [line for line in block.split(b"\n") if not line.startswith(b":")]
        assert id == b"id: %b:%d" % (self.token.encode(), self.seq + 1)
        self.seq += 1
        if data == b"data: [DONE]":
            self.is_done = True
        else:
            self.chunks.append(msgspec.json.decode(data.removeprefix(b"data: ")))


class EventClient:
    """A client that asks for one stream after the other, on one connection for as long as it lasts.

    With `receive_buffer_bytes` little is under way to it that it has not taken.
    """

    def __init__(
        self, address: str, key: str, choose: random.Random | None = None, receive_buffer_bytes: int = 0
    ) -> None:
        self.connections = 0
        self.notes: list[bytes] = []
        self._address = address
        self._key = key
        self._choose = choose or random.Random()
        self._receive_buffer_bytes = receive_buffer_bytes
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(
        self, path: str, body: dict[str, Any], request_key: str = "", events: Events | None = None
    ) -> Events:
        """Ask for a resumable stream, and read all of it, whatever happens to connections; `events` is what to fill."""
        events = Events() if events is None else events
        body = {"stream": True, "resumable": True, **body}
        while not events.is_done:
            try:
                if events.token:
                    await self.resume(events, path if self._choose.random() < 0.5 else "")
                else:
                    await self.ask(events, path, body, request_key)
                await self.read(events)
            except _LOST:
                self.drop()
                await asyncio.sleep(self._choose.uniform(0, _LONGEST_WAIT_S))
        return events

    async def ask(self, events: Events, path: str, body: dict[str, Any], request_key: str = "") -> None:
        """Ask, and read the head of the answer. Raises Refused, or OSError or IncompleteReadError on a cut."""
        fields = {"Idempotency-Key": request_key} if request_key else {}
        await self._request("POST", path, msgspec.json.encode(body), fields)
        await self._head(events)

    async def resume(self, events: Events, path: str = "") -> int:
        """Go on, by POST of any body to `path` or by GET; returns the status. Raises as `ask` does."""
        if path:
            await self._request("POST", path, b"{}", {"Last-Event-ID": events.last_id})
        else:
            await self._request("GET", f"/v2/streams/{events.token}", b"", {"Last-Event-ID": events.last_id})
        return await self._head(events)

    async def read(self, events: Events, chunks: int = 1 << 30) -> None:
        """Read up to the end, or so many of the answer's chunks. Raises as `ask` does."""
        assert self._reader is not None
        for _ in range(chunks):
            size = int(await self._reader.readuntil(b"\n"), 16)
            data = (await self._reader.readexactly(size + 2))[:-2]
            if not size:
                return
            if data == b": ping\n":
                continue
            if not data.endswith(b"\n\n"):  # beside the stream, as it does not end an event
                self.notes.append(data)
                continue
            *blocks, rest = data.split(b"\n\n")
            assert rest == b""
            for block in blocks:
                events.take(block)

    def drop(self) -> None:
        """Cut the connection."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _request(self, method: str, path: str, body: bytes, fields: dict[str, str]) -> None:
        if self._writer is None:
            await self._connect()
            assert self._writer is not None
        lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Authorization: Bearer {self._key}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        lines += [f"Content-Length: {len(body)}"] if body else []
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        sock, limit = socket.socket(), _LIMIT_BYTES
        sock.setblocking(False)
        if self._receive_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
            limit = self._receive_buffer_bytes
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=limit)
        except BaseException:
            sock.close()
            raise
        self.connections += 1

    async def _head(self, events: Events) -> int:
        assert self._reader is not None
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        status = int(first.split()[1])
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if status == 200:
            assert fields["content-type"].startswith("text/event-stream")
            assert events.token in ("", fields["x-resume-token"])
            events.token, events.id = fields["x-resume-token"], fields["x-stream-id"]
        elif status != 204:
            raise Refused(status, await self._reader.readexactly(int(fields["content-length"])))
        return status
