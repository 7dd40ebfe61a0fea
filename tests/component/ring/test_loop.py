"""The ring loop is an ordinary asyncio loop: what ordinary code needs of one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading

import pytest
from support.sockets import Rig

from seedance.daemon.ring import loop as loop_module
from seedance.daemon.ring.loop import RingLoop, new_loop
from seedance.errors import KernelError


def test_timers_keep_their_order_and_time(any_rig: Rig) -> None:
    async def main() -> None:
        fired: list[str] = []
        loop = any_rig.loop
        started = loop.time()
        loop.call_later(0.03, fired.append, "second")
        loop.call_later(0.01, fired.append, "first")
        await asyncio.sleep(0.05)
        assert fired == ["first", "second"]
        assert 0.05 <= loop.time() - started < 1

    any_rig.run(main)


def test_another_thread_wakes_the_loop(any_rig: Rig) -> None:
    async def main() -> None:
        woken = asyncio.Event()
        timer = threading.Timer(0.02, any_rig.loop.call_soon_threadsafe, (woken.set,))
        timer.start()
        await woken.wait()
        timer.join()
        assert await any_rig.in_thread(threading.get_ident) != threading.get_ident()

    any_rig.run(main)


def test_other_threads_run_while_the_loop_waits(any_rig: Rig) -> None:
    async def main() -> None:
        def count() -> int:
            turns = 0
            stop = threading.Event()
            threading.Timer(0.1, stop.set).start()
            while not stop.is_set():
                turns += 1
            return turns

        # A loop that held the interpreter lock in its waits would give the thread next to nothing.
        assert await any_rig.in_thread(count) > 10_000

    any_rig.run(main)


def test_a_signal_handler_runs(any_rig: Rig) -> None:
    async def main() -> None:
        caught = asyncio.Event()
        any_rig.loop.add_signal_handler(signal.SIGUSR1, caught.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await caught.wait()
        any_rig.loop.remove_signal_handler(signal.SIGUSR1)

    any_rig.run(main)


def test_subprocesses_and_their_pipes(any_rig: Rig) -> None:
    async def main() -> None:
        code = "import sys; data = sys.stdin.read(); print(len(data)); sys.exit(3)"
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await child.communicate(b"x" * 300_000)
        assert (out, child.returncode) == (b"300000\n", 3)

    any_rig.run(main)


def test_asyncio_streams_carry_large_writes(any_rig: Rig) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(-1))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        data = os.urandom(1 << 20)
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    any_rig.run(main)


def test_readers_and_writers_are_level_triggered(any_rig: Rig) -> None:
    async def main() -> None:
        ours, peer = socket.socketpair()
        ours.setblocking(False)
        seen: list[bytes] = []
        any_rig.loop.add_reader(ours, lambda: seen.append(ours.recv(1)))
        peer.sendall(b"abc")
        while len(seen) < 3:
            await asyncio.sleep(0)
        assert b"".join(seen) == b"abc"
        writable = asyncio.Event()
        any_rig.loop.add_writer(ours, writable.set)
        await writable.wait()
        any_rig.loop.remove_writer(ours)
        any_rig.loop.remove_reader(ours)
        peer.sendall(b"d")
        await any_rig.turns()
        assert len(seen) == 3
        ours.close()
        peer.close()

    any_rig.run(main)


def test_a_closed_descriptors_number_is_polled_for_its_new_owner(any_rig: Rig) -> None:
    async def main() -> None:
        for _ in range(30):
            ours, peer = socket.socketpair()
            ours.setblocking(False)
            got = asyncio.Event()
            any_rig.loop.add_reader(ours, got.set)
            await any_rig.turns(1)
            assert not got.is_set()
            peer.sendall(b"x")
            await got.wait()
            any_rig.loop.remove_reader(ours)
            ours.close()
            peer.close()

    any_rig.run(main)


def test_connecting_to_nobody_is_refused(any_rig: Rig) -> None:
    async def main() -> None:
        with socket.socket() as unbound:
            unbound.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*unbound.getsockname())

    any_rig.run(main)


def test_auto_falls_back_to_epoll_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("set up io_uring", 1)

    monkeypatch.setattr(loop_module, "Uring", refuse)
    with caplog.at_level(logging.INFO):
        loop, driver = new_loop("auto")
    loop.close()
    assert driver.statistics().driver == "epoll"
    assert [record.getMessage() for record in caplog.records] == [
        "cannot set up io_uring: Operation not permitted (errno 1); using epoll"
    ]
    with pytest.raises(KernelError):
        new_loop("io_uring")


def test_a_ring_belongs_to_the_thread_that_made_it(ring_rig: Rig) -> None:
    failures: list[BaseException] = []

    def misuse() -> None:
        try:
            assert isinstance(ring_rig.loop, RingLoop)
            ring_rig.loop.driver.ring.submit()
        except KernelError as exc:
            failures.append(exc)

    thread = threading.Thread(target=misuse)
    thread.start()
    thread.join()
    assert len(failures) == 1  # EEXIST: SINGLE_ISSUER
