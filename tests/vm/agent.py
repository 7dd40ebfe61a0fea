"""The guest's end of the wire: runs what the host asks for, one command at a time, over a virtio port.

A host begins with GREETING and `WORD_BYTES` of its choice, and gets both back: what either side reads before that was
meant for a host that left. Then frames go both ways: a head (`HEAD`: kind, length), then as many bytes. A REQUEST is a
JSON object: `argv`, and if wanted `cwd`, `environment` and `input` (true: INPUT frames follow, an empty one ends them).
The answer is OUTPUT and ERROR frames as the command writes, and a STATUS frame: its exit status in decimal, of a killed
one minus the signal.

A host that hangs up takes its command along, and so does one that speaks while a command runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Final

PORT: Final = "agent"
HEAD: Final = struct.Struct("!cI")
GREETING: Final = b"\0seedance\0"
WORD_BYTES: Final = 16
REQUEST: Final = b"R"
INPUT: Final = b"I"
OUTPUT: Final = b"O"
ERROR: Final = b"E"
STATUS: Final = b"S"

_CHUNK: Final = 1 << 16
_PAUSE_S: Final = 0.1


class HungUp(Exception):
    """The host closed its end, or another one took it over."""


class Wire:
    """Frames over a descriptor that does not block; every wait ends when the host leaves."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._received = bytearray()

    def wait(self, events: int) -> None:
        """Wait for `events` of the port; raise HungUp when the host is not, or no more, there."""
        poll = select.poll()
        poll.register(self.fd, events)
        for _fd, found in poll.poll():
            if found & select.POLLHUP:
                raise HungUp

    def read(self, size: int) -> bytes:
        while len(self._received) < size:
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                self.wait(select.POLLIN)
                continue
            if not data:
                raise HungUp
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT)

    def meet(self) -> None:
        """Wait for a host and return its greeting."""
        seen = bytearray()
        while not seen.endswith(GREETING):
            try:
                seen += self.read(1)
            except HungUp:  # a port without a host polls as such at once, time and again
                time.sleep(_PAUSE_S)
        self.write(GREETING + self.read(WORD_BYTES))

    def receive(self) -> tuple[bytes, bytes]:
        """Return a frame's kind and content; anything else is a new host's greeting, the old one having left unseen."""
        head = self.read(HEAD.size)
        kind, length = HEAD.unpack(head)
        if kind not in (REQUEST, INPUT):
            self._received[:0] = head
            raise HungUp
        return kind, self.read(length)

    def send(self, kind: bytes, data: bytes) -> None:
        self.write(HEAD.pack(kind, len(data)) + data)


def run(wire: Wire, request: dict[str, Any]) -> None:
    """Run one command to its end, its output going out as it comes."""
    with contextlib.ExitStack() as stack:
        given: IO[bytes] | int = subprocess.DEVNULL
        if request.get("input"):
            given = stack.enter_context(tempfile.TemporaryFile(dir="/var/tmp"))
            take_input(wire, given)
        process = subprocess.Popen(
            request["argv"],
            cwd=request.get("cwd") or "/root",
            env={**os.environ, **request.get("environment", {})},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
    try:
        relay(wire, process)
        wire.send(STATUS, str(process.wait()).encode())
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def take_input(wire: Wire, file: IO[bytes]) -> None:
    """Take the host's input to its end, before the command starts: so neither of them waits for the other."""
    while True:
        kind, data = wire.receive()
        if kind != INPUT:
            raise HungUp
        if not data:
            break
        file.write(data)
    file.seek(0)


def relay(wire: Wire, process: subprocess.Popen[bytes]) -> None:
    """Pass output on until the command has ended and its pipes are empty.

    A daemon that it left behind may keep the pipes open for ever: the command's end counts, not theirs.
    """
    assert process.stdout and process.stderr
    kinds = {process.stdout.fileno(): OUTPUT, process.stderr.fileno(): ERROR}
    ended = os.pidfd_open(process.pid)
    poll = select.poll()
    for fd in kinds:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    poll.register(ended, select.POLLIN)
    poll.register(wire.fd, select.POLLIN)
    try:
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wire.fd in ready:
                raise HungUp
            for fd in ready & kinds.keys():
                if not pass_on(wire, fd, kinds[fd]):
                    poll.unregister(fd)
                    del kinds[fd]
            if ended in ready and not ready & kinds.keys():
                return
    finally:
        os.close(ended)
        process.stdout.close()
        process.stderr.close()


def pass_on(wire: Wire, fd: int, kind: bytes) -> bool:
    """Pass on what a pipe holds; return False at its end."""
    try:
        data = os.read(fd, _CHUNK)
    except BlockingIOError:
        return True
    if data:
        wire.send(kind, data)
    return bool(data)


def serve(wire: Wire) -> None:
    """Serve a host until it hangs up."""
    while True:
        kind, data = wire.receive()
        if kind != REQUEST:
            raise HungUp
        try:
            run(wire, json.loads(data))
        except OSError as exc:
            wire.send(ERROR, f"cannot run the command: {exc}\n".encode())
            wire.send(STATUS, b"127")


def find_port(name: str) -> Path:
    """Return the device file of a virtio port; without udev there is no link of its name."""
    (found,) = (
        path.parent.name for path in Path("/sys/class/virtio-ports").glob("*/name") if path.read_text() == f"{name}\n"
    )
    return Path("/dev", found)


def main() -> None:
    """Serve host after host."""
    wire = Wire(os.open(find_port(PORT), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    while True:
        with contextlib.suppress(HungUp):
            wire.meet()
            serve(wire)


if __name__ == "__main__":
    main()
