"""Taking things away in several steps, where one that fails must not keep the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from seedance.errors import KernelError

T = TypeVar("T")


def run_all(steps: Iterable[Callable[[], T]]) -> list[T]:
    """Run every step, whatever the others do; returns what they returned.

    Those that raise KernelError are put together into one, which is raised after the last step.
    """
    done: list[T] = []
    failures: list[KernelError] = []
    for step in steps:
        try:
            done.append(step())
        except KernelError as exc:
            failures.append(exc)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        first, *others = failures
        raise KernelError("; ".join((first.what, *map(str, others))), first.errno) from first
    return done
