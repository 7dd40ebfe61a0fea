"""Every driver test runs on io_uring and on its epoll twin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sockets import Rig, rig

from seedance.daemon.ring.loop import RingLoop
from seedance.errors import KernelError


def io_uring_missing() -> str:
    """Return why there is no io_uring here, or an empty text."""
    try:
        RingLoop().close()
    except KernelError as exc:
        return str(exc)
    return ""


MISSING = io_uring_missing()


@pytest.fixture(params=["io_uring", "epoll"])
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "io_uring" and MISSING:
        pytest.skip(MISSING)
    with rig(request.param) as made:
        yield made


@pytest.fixture
def ring_rig() -> Iterator[Rig]:
    if MISSING:
        pytest.skip(MISSING)
    with rig("io_uring") as made:
        yield made


@pytest.fixture
def scarce_rig() -> Iterator[Rig]:
    """A ring with four receive buffers."""
    if MISSING:
        pytest.skip(MISSING)
    with rig("io_uring", receive_buffers=4) as made:
        yield made
