"""Many streams of completions at once, each on a connection of its own; what they said is kept whole."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from support.daemon import Daemon

LIMIT_S = 180.0


class CompletionStreams:
    """`count` streams of `tokens` tokens, of all the daemon's tenants by turns; prompts are the same each time.

    `begun` is how many characters each must have before `until_begun` returns, and `more` is what is asked otherwise.
    """

    def __init__(self, daemon: Daemon, model: str, count: int, tokens: int, *, begun: int = 60, **more: Any) -> None:
        self._daemon = daemon
        self._request = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        self._request |= more
        self._begun = begun
        self.texts = [""] * count
        self.reasons: list[str | None] = [None] * count
        self.notes: list[list[str]] = [[] for _ in range(count)]

    async def run(self) -> None:
        """Run all to their ends."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for number in range(len(self.texts)):
                tasks.create_task(self._stream(number))

    async def until_begun(self) -> None:
        """Return when all are in the middle of what they say."""
        while min(map(len, self.texts)) < self._begun:
            await asyncio.sleep(0.01)

    async def _stream(self, number: int) -> None:
        host, _, port = self._daemon.address.rpartition(":")
        keys = list(self._daemon.keys.values())
        ids = random.Random(number).choices(range(3, 4096), k=16)
        data = json.dumps({**self._request, "prompt": ids})
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {keys[number % len(keys)]}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        while (line := await reader.readline()) and line != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                self.texts[number] += choice["text"]
                self.reasons[number] = choice["finish_reason"]
            elif line.startswith(b": ") and line != b": ping\n":
                self.notes[number].append(line[2:].decode().strip())
        writer.close()
