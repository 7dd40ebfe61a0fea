"""Where the two commands begin: Ctrl-C while their modules load, some tenths of a second, ends them without a word."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


def seedanced() -> None:
    """Be `seedanced`."""
    with _ended_by_interrupt():
        from seedance.daemon.app import main  # noqa: PLC0415
    main()


def seedancectl() -> None:
    """Be `seedancectl`."""
    with _ended_by_interrupt():
        from seedance.daemon.ctl import main  # noqa: PLC0415
    main()


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let the kernel end this process at SIGINT, instead of a KeyboardInterrupt somewhere in an import."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # ignored, as in a shell's background job: it stays so
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
