"""An asyncio event loop that waits in an io_uring, and the choice between it and the epoll twin.

Theory of operation. asyncio's selector loop asks a selector for ready descriptors. `RingSelector` answers from the
ring: a registered descriptor is a one-shot poll that is armed again before the next wait, so that readiness is level
triggered as asyncio expects, and arming rides in the same enter as everything else. Beside the polls the driver's
operations (accept, receive, send) live in the same ring and are dispatched from `select`. A turn of the loop is thus
one io_uring_enter: it submits what the last turn produced and waits for what comes next.
"""

from __future__ import annotations

import asyncio
import logging
import select
import selectors
from collections.abc import Mapping
from typing import Any

from seedance.daemon.ring import abi
from seedance.daemon.ring.driver import Driver
from seedance.daemon.ring.epoll_driver import EpollDriver
from seedance.daemon.ring.operations import KIND_POLL, KIND_SHIFT, TAG_MASK
from seedance.daemon.ring.ring_driver import RECEIVE_BUFFERS, RingDriver
from seedance.daemon.ring.uring import Uring
from seedance.errors import KernelError

_log = logging.getLogger(__name__)


class RingSelector(selectors.BaseSelector):
    """A selector over a ring; `driver`, once set, gets every completion that is not a poll's."""

    def __init__(self, ring: Uring) -> None:
        self._ring = ring
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._to_arm: dict[int, selectors.SelectorKey] = {}
        self._armed: dict[int, int] = {}  # fd → generation of its poll in flight
        self._polls: dict[int, selectors.SelectorKey] = {}  # generation → key
        self._generation = 0
        self._map = _KeyMap(self._keys)
        self.driver: RingDriver | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = _fd_of(fileobj)
        if fd in self._keys:
            raise KeyError(f"cannot register descriptor {fd} twice")
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fd] = self._to_arm[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fd = _fd_of(fileobj)
        key = self._keys.pop(fd)
        self._disarm(fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = _fd_of(fileobj)
        old = self._keys[fd]
        key = selectors.SelectorKey(old.fileobj, fd, events, data)
        self._keys[fd] = key
        if events != old.events:
            self._disarm(fd)
            self._to_arm[fd] = key
        elif fd in self._armed:
            self._polls[self._armed[fd]] = key
        else:
            self._to_arm[fd] = key
        return key

    def _disarm(self, fd: int) -> None:
        self._to_arm.pop(fd, None)
        generation = self._armed.pop(fd, None)
        if generation is not None:
            del self._polls[generation]
            self._ring.push(
                abi.OP_POLL_REMOVE,
                -1,
                KIND_POLL << KIND_SHIFT,  # generation 0 is nobody's
                address=KIND_POLL << KIND_SHIFT | generation,
                flags=abi.IOSQE_CQE_SKIP_SUCCESS,
            )
            # The caller may close the descriptor next: the poll must not outlive that, nor meet the next of its number.
            self._ring.submit()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ring, driver = self._ring, self.driver
        for fd, key in self._to_arm.items():
            self._generation += 1
            self._polls[self._generation] = key
            self._armed[fd] = self._generation
            mask = (select.POLLIN if key.events & selectors.EVENT_READ else 0) | (
                select.POLLOUT if key.events & selectors.EVENT_WRITE else 0
            )
            ring.push(abi.OP_POLL_ADD, fd, KIND_POLL << KIND_SHIFT | self._generation, op_flags=mask)
        self._to_arm.clear()
        # A piece of a backlog that goes out whole posts nothing, and the next piece must follow: no waiting then.
        goes_on = driver is not None and driver.stage()
        if (timeout is None or timeout > 0) and not ring.has_completions and not goes_on:
            ring.wait(timeout)
        elif ring.unsubmitted or ring.needs_enter:
            ring.submit()
        completions = ring.completions()
        ready = []
        if driver is not None:
            completions = driver.settle(completions)
        for user_data, result, flags in completions:
            if user_data >> KIND_SHIFT == KIND_POLL:
                event = self._polled(user_data & TAG_MASK, result)
                if event is not None:
                    ready.append(event)
            elif driver is not None:
                driver.dispatch(user_data, result, flags)
        if driver is not None:
            driver.end_turn()
        return ready

    def _polled(self, generation: int, result: int) -> tuple[selectors.SelectorKey, int] | None:
        key = self._polls.pop(generation, None)
        if key is None:
            return None  # disarmed meanwhile
        del self._armed[key.fd]
        self._to_arm[key.fd] = key
        if result < 0:  # a bad descriptor: let the owner's read or write find out
            return key, key.events
        events = 0
        if result & ~select.POLLOUT:  # POLLIN, and POLLHUP or POLLERR, which a read reports best
            events |= selectors.EVENT_READ
        if result & ~select.POLLIN:
            events |= selectors.EVENT_WRITE
        return (key, events & key.events) if events & key.events else None

    def close(self) -> None:
        """End the ring too; the driver, if any, must be closed before."""
        self._keys.clear()
        self._ring.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map


class _KeyMap(Mapping[Any, selectors.SelectorKey]):
    def __init__(self, keys: dict[int, selectors.SelectorKey]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_fd_of(fileobj)]

    def __iter__(self) -> Any:
        return iter(self._keys)


def _fd_of(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


class RingLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a ring; make it in the thread that runs it, after any fork."""

    _closed = True  # until asyncio's own part is set up: its destructor asks

    def __init__(self, *, entries: int = 4096, cq_entries: int = 16384, receive_buffers: int = RECEIVE_BUFFERS) -> None:
        """Raises KernelError where the kernel has no usable io_uring."""
        ring = Uring(entries, cq_entries)
        self._ring_selector = RingSelector(ring)
        try:
            self.driver = RingDriver(ring, self, receive_buffers)
        except KernelError:
            ring.close()
            raise
        self._ring_selector.driver = self.driver
        super().__init__(self._ring_selector)

    def close(self) -> None:
        """Close every flow that is still open, then the loop and its ring."""
        if not self.is_closed():
            self.driver.close()
            self._ring_selector.driver = None
        super().close()


class EpollLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on epoll, with the twin of the ring's driver."""

    def __init__(self) -> None:
        super().__init__(selectors.EpollSelector())
        self.driver = EpollDriver(self)

    def close(self) -> None:
        """Close every flow that is still open, then the loop."""
        if not self.is_closed():
            self.driver.close()
        super().close()


def new_loop(io: str = "auto") -> tuple[asyncio.AbstractEventLoop, Driver]:
    """Return a new event loop and its driver: "io_uring", "epoll", or "auto", which is io_uring where it works.

    Raises KernelError when io_uring was asked for by name and cannot be had.
    """
    if io != "epoll":
        try:
            loop = RingLoop()
        except KernelError as exc:
            if io == "io_uring":
                raise
            _log.warning("%s; using epoll", exc)
        else:
            return loop, loop.driver
    plain = EpollLoop()
    return plain, plain.driver
