"""When what clients may come back for is looked at, as their time is up or there is no room for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from seedance.daemon.session_log import NEVER, SessionLog

_LOOK_S: Final = 1.0
"""So often the bytes of what is kept are counted while a client is away."""


class ExpiryTimer:
    """A timer of the loop for a `SessionLog`; whoever changes that calls `set`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: SessionLog[Any], expire: Callable[[], None]) -> None:
        self._loop = loop
        self._log = log
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Wait for the next time that there may be something to do."""
        self.close()
        due_s = self._log.next_expiry()
        if due_s != NEVER:
            self._timer = self._loop.call_at(min(due_s, self._loop.time() + _LOOK_S), self._expire)

    def close(self) -> None:
        """Wait no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
