"""Steps of which one that fails does not keep the others."""

from __future__ import annotations

import errno

import pytest

from seedance.errors import KernelError
from seedance.qos.teardown import run_all


def failing(what: str, number: int) -> object:
    raise KernelError(what, number)


def test_results_in_order() -> None:
    assert run_all([lambda: 1, lambda: 2]) == [1, 2]
    assert run_all([]) == []


def test_all_run_and_all_failures_are_told() -> None:
    done: list[int] = []
    steps = [
        lambda: failing("take a away", errno.EBUSY),
        lambda: done.append(1),
        lambda: failing("take b away", errno.EPERM),
    ]
    with pytest.raises(KernelError) as caught:
        run_all(steps)
    assert done == [1]
    assert caught.value.errno == errno.EBUSY
    assert "cannot take a away; cannot take b away: Operation not permitted (errno 1)" in str(caught.value)


def test_a_single_failure_is_raised_as_it_is() -> None:
    error = KernelError("take a away", errno.EBUSY)

    def fail() -> None:
        raise error

    with pytest.raises(KernelError) as caught:
        run_all([fail])
    assert caught.value is error
