"""How a test ends a task of its own."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until it is over; raises what it raises.

    To wait for it with CancelledError suppressed would also swallow the cancellation of whoever waits.
    """
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
