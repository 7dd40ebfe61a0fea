"""Long prompts are tokenised in a process of their own, so that the worker's streams do not wait for them.

A thread would not do: a tokenizer's library makes objects of all its tokens at the end, and holds the interpreter's
lock meanwhile (35 ms for 200,000 tokens); one in Python takes the lock again and again. The process is a fork of the
worker, so it has the tokenizer already and is in the tenant's control group; a lower priority has it give way to the
streams. What it has taken for a prompt goes back to the kernel with its end, when there was none for a while.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
from multiprocessing.connection import Connection, Pipe
from typing import Final, NoReturn

from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.process import close_all_but, die_with_parent, set_name
from seedance.daemon.tokenizer import Tokenizer

_NICE: Final = 10
_PLAIN, _CHAT = b"p", b"c"
_TOKEN_IDS, _REFUSED = b"t", b"r"


class PromptProcess:
    """A process that has one tokenizer, forked with its first prompt; one thread at a time gives it prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._link: Connection[bytes, bytes] | None = None
        self._pid = 0

    def encode(self, text: str, chat: bool) -> array.array[int]:
        """Return the token ids of a text, or of a rendered conversation; waits, without the interpreter's lock.

        Raises ApiError when it is no valid Unicode, and when there is no such process, or not any more.
        """
        try:
            link = self._link or self._fork()
            link.send_bytes((_CHAT if chat else _PLAIN) + text.encode("utf-8", "surrogatepass"))
            reply = memoryview(link.recv_bytes())
        except (EOFError, OSError) as exc:
            self.end()
            text = "cannot read a prompt of this length now: the process that does it has ended; ask again"
            raise ApiError("overloaded", text) from exc
        kind, data = bytes(reply[:1]), reply[1:]
        if kind == _REFUSED:
            raise invalid(str(data, "utf-8"))
        token_ids = array.array("I")
        token_ids.frombytes(data)
        return token_ids

    def end(self) -> None:
        """End the process, whatever it does; idempotent, and from any thread. The next prompt gets another one."""
        pid, self._pid, self._link = self._pid, 0, None
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _fork(self) -> Connection[bytes, bytes]:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            _be_prompt_process(theirs, self.tokenizer)
        theirs.close()
        self._pid, self._link = pid, ours
        return ours


def _be_prompt_process(link: Connection[bytes, bytes], tokenizer: Tokenizer) -> NoReturn:
    """Tokenise until the worker has gone; never returns: what is on the stack is the worker's business."""
    try:
        die_with_parent()
        # The worker's connections too: they would stay open for as long as this process has them.
        close_all_but([link.fileno()])
        set_name("seed-prompts")
        with contextlib.suppress(EOFError, OSError):
            os.nice(_NICE)
            while True:
                link.send_bytes(_answer(link.recv_bytes(), tokenizer))
    finally:
        os._exit(0)


def _answer(request: bytes, tokenizer: Tokenizer) -> bytes:
    text = request[1:].decode("utf-8", "surrogatepass")
    encode = tokenizer.encode_chat if request[:1] == _CHAT else tokenizer.encode
    try:
        return _TOKEN_IDS + array.array("I", encode(text)).tobytes()
    except ApiError as exc:
        return _REFUSED + str(exc).encode()
