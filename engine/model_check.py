"""Check a model's directory in a process of its own: `python -m seedance.engine.model_check DIRECTORY`.

It says how far it is, and in the end what it found, as lines of JSON. A file that is cut off while it is mapped ends a
process by SIGBUS: this one then, and none that serves. It lets everybody else have the processor first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

import seedance
from seedance.engine import model_files
from seedance.engine.model_files import ModelFiles
from seedance.errors import ConfigError

PROGRAM: Final = "seedance.engine.model_check"

_TELL_S: Final = 0.1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to check. With `tokens_only` just what the model's token ids mean is read, with `heads_only` no weights."""

    path: str
    needs_tokenizer: bool = True
    needs_manifest: bool = False
    tokens_only: bool = False
    heads_only: bool = False

    def arguments(self) -> list[str]:
        """Return the command line that asks for this, without the interpreter."""
        flags = {
            "--no-tokenizer": not self.needs_tokenizer,
            "--manifest": self.needs_manifest,
            "--tokens": self.tokens_only,
            "--heads": self.heads_only,
        }
        return ["-P", "-m", PROGRAM, *(flag for flag, is_set in flags.items() if is_set), "--", self.path]


class Read(msgspec.Struct, tag="read", frozen=True):
    """How many bytes have been read, and of how many."""

    done_bytes: int
    total_bytes: int


class Passed(msgspec.Struct, tag="passed", frozen=True):
    """The directory holds a model that fits together."""

    files: ModelFiles


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """What the model's token ids mean."""

    digest: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The directory's model must not be served."""

    reason: str


Line = Read | Passed | Tokens | Refused
decode: Final[Callable[[bytes], Line]] = msgspec.json.Decoder(Line).decode


def environment() -> dict[str, str]:
    """Return the environment in which the program is found."""
    root = str(Path(seedance.__path__[0]).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def check(request: Request, tell: Callable[[Line], None]) -> bool:
    """Check a directory, telling how it goes; returns whether it passed."""
    told_s = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_s
        if done_bytes in (0, total_bytes) or time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            tell(Read(done_bytes, total_bytes))

    try:
        if request.tokens_only:
            tell(Tokens(model_files.tokens_digest(Path(request.path))))
            return True
        files = model_files.inspect(
            Path(request.path), needs_tokenizer=request.needs_tokenizer, needs_manifest=request.needs_manifest
        )
        if not request.heads_only:
            model_files.verify(files, progress)
    except ConfigError as exc:
        tell(Refused(str(exc)))
        return False
    tell(Passed(files))
    return True


def end_text(status: int) -> str:
    """Say how a check ended that said nothing of its own; `status` is negative for a signal."""
    if status == -signal.SIGBUS:
        return "cannot check the model: a file was cut off while it was read, or its disk failed"
    return f"cannot check the model: the check ended with status {status}"


def main() -> None:
    """Run as a program; the exit status is 0 when the model passed."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description="Check a model's directory.")
    parser.add_argument("path")
    parser.add_argument("--no-tokenizer", action="store_true", help="it needs none")
    parser.add_argument("--manifest", action="store_true", help=f"refuse it without {model_files.MANIFEST}")
    parser.add_argument("--tokens", action="store_true", help="say what its token ids mean, and nothing else")
    parser.add_argument("--heads", action="store_true", help="look at its files without reading their weights")
    options = parser.parse_args()
    request = Request(
        path=options.path,
        tokens_only=options.tokens,
        heads_only=options.heads,
        needs_tokenizer=not options.no_tokenizer,
        needs_manifest=options.manifest,
    )
    with contextlib.suppress(OSError):
        os.nice(19)

    def tell(line: Line) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        passed = check(request, tell)
    except BrokenPipeError:  # nobody wants to know any more
        os._exit(1)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
