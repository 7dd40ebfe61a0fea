"""The check of a model's directory as the engine host runs it: a process beside it, which it reads from as it goes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Final

from seedance.engine import model_check
from seedance.engine.model_check import Line, Passed, Read, Refused, Request, Tokens
from seedance.engine.model_files import ModelFiles
from seedance.errors import EngineError

_LINE_BYTES: Final = 64 << 20  # a manifest may be long


async def check_model(request: Request, progress: Callable[[Read], None]) -> ModelFiles:
    """Return what a directory holds. Raises EngineError with the reason why its model must not be served."""
    async with contextlib.aclosing(_lines(request)) as lines:
        async for line in lines:
            if isinstance(line, Read):
                progress(line)
            elif isinstance(line, Passed):
                return line.files
            elif isinstance(line, Refused):
                raise EngineError("invalid_request", line.reason)
    raise AssertionError("a check ends with a result or an error")


async def tokens_of(tokenizer_dir: str) -> str:
    """Return what a model's token ids mean. Raises EngineError when its tokenizer cannot be read."""
    async with contextlib.aclosing(_lines(Request(path=tokenizer_dir, tokens_only=True))) as lines:
        async for line in lines:
            if isinstance(line, Tokens):
                return line.digest
            if isinstance(line, Refused):
                raise EngineError("invalid_request", line.reason)
    raise AssertionError("a check ends with a result or an error")


async def _lines(request: Request) -> AsyncGenerator[Line, None]:
    """Yield what the check says; it is ended when nobody listens any more."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *request.arguments(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=model_check.environment(),
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    try:
        async for data in process.stdout:
            yield model_check.decode(data)
        raise EngineError("internal", model_check.end_text(await process.wait()))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        # To the end of its pipe: what is left open would outlive the loop.
        await process.communicate()
