"""An event loop whose clock jumps: waiting takes no time, and sockets still work."""

from __future__ import annotations

import asyncio
import inspect
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


_SPIN_TURNS = 1000
_SPIN_S = 1e-9
"""What so many turns in which nobody waited take together. A timer may fire by the clock's resolution, this much, too
early and be set anew: in a clock that stands still it would do so for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Return at once; when no descriptor was ready, the time that would have been waited has passed."""

    now = 0.0
    _turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        ready = super().select(0)
        self._turns = 0 if ready or timeout > 0 else self._turns + 1
        if not ready and timeout > 0:
            self.now += timeout
        elif self._turns >= _SPIN_TURNS:
            self.now, self._turns = self.now + _SPIN_S, 0
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop that begins at 0 s and skips every wait for a timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function, with the same parameters."""

    def sync(*arguments: Any, **named: Any) -> None:
        run_in_virtual_time(test(*arguments, **named))

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    sync.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return sync
