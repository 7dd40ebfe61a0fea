"""What `driver.Driver` promises, on both drivers, over real sockets."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial

import pytest
from support.sockets import Recorder, Rig, read_all, read_exactly, tcp_pair

from seedance.daemon.ring.driver import Flow
from seedance.daemon.ring.frame_store import FrameStore, StoredFrames

BIG = random.Random(1).randbytes(3 << 20)


def send_each(rig: Rig, fds: Sequence[int], frames: Sequence[bytes]) -> list[tuple[int, int]]:
    """Send frames out of a store, of which nobody else knows."""
    store = FrameStore()
    addresses, lengths = array.array("L", map(store.add, frames)), array.array("I", map(len, frames))
    stored = StoredFrames(memoryview(addresses), memoryview(lengths), store)
    return rig.driver.send_each(memoryview(array.array("I", fds)), stored)


@pytest.mark.parametrize("tcp", [False, True])
def test_bytes_arrive_both_ways(any_rig: Rig, tcp: bool) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=tcp)
        peer.sendall(b"to us")
        await recorder.wait(lambda seen: seen.data == b"to us")
        assert flow.send(b"to ") == 0
        assert flow.send(b"the peer") == 0
        assert await any_rig.in_thread(lambda: read_exactly(peer, 11)) == b"to the peer"

    any_rig.run(main)


def test_what_one_turn_sends_to_a_flow_is_one_send(any_rig: Rig) -> None:
    async def main() -> None:
        flow, _, peer = any_rig.flow()
        before = any_rig.driver.statistics().sends
        for part in (b"a", b"b", b"c"):
            flow.send(part)
        assert await any_rig.in_thread(lambda: read_exactly(peer, 3)) == b"abc"
        assert any_rig.driver.statistics().sends == before + 1

    any_rig.run(main)


def test_flush_sends_now(any_rig: Rig) -> None:
    async def main() -> None:
        flow, _, peer = any_rig.flow()
        flow.send(b"now")
        any_rig.driver.flush()
        assert peer.recv(16) == b"now"

    any_rig.run(main)


def test_one_enter_carries_the_sends_of_a_turn(ring_rig: Rig) -> None:
    async def main() -> None:
        flows = [ring_rig.flow() for _ in range(64)]
        await ring_rig.turns()
        before = ring_rig.driver.statistics()
        for number, (flow, _, _) in enumerate(flows):
            flow.send(b"%d" % number)
        await asyncio.sleep(0)  # a turn
        after = ring_rig.driver.statistics()
        assert after.sends - before.sends == 64
        assert after.enters - before.enters == 1
        for number, (_, _, peer) in enumerate(flows):
            assert peer.recv(16) == b"%d" % number

    ring_rig.run(main)


def test_more_flows_than_one_batch_holds(any_rig: Rig) -> None:
    async def main() -> None:
        flows = [any_rig.flow() for _ in range(700)]
        for number, (flow, _, _) in enumerate(flows):
            flow.send(b"%d." % number)
        await any_rig.turns()
        for number, (_, _, peer) in enumerate(flows):
            assert peer.recv(16) == b"%d." % number

    any_rig.run(main)


def test_a_frame_to_each_of_many_flows(any_rig: Rig) -> None:
    async def main() -> None:
        flows = [any_rig.flow() for _ in range(700)]
        fds = [flow.fd for flow, _, _ in flows]
        for step in range(3):
            assert send_each(any_rig, fds, [b"%d.%d" % (step, number) for number in range(700)]) == []
            await any_rig.turns()
            for number, (_, _, peer) in enumerate(flows):
                assert peer.recv(16) == b"%d.%d" % (step, number)

    any_rig.run(main)


def test_a_frame_to_each_keeps_the_order_of_its_flow(any_rig: Rig) -> None:
    async def main() -> None:
        flows = [any_rig.flow() for _ in range(4)]
        fds = [flow.fd for flow, _, _ in flows]
        flows[1][0].send(b"before ")
        assert (flows[1][0].backlog_bytes, flows[1][0].waiting_bytes) == (7, 0), "its turn has not come: nobody is slow"
        flows[3][0].close()
        assert send_each(any_rig, fds, [b"now"] * 4) == []
        assert send_each(any_rig, fds[:2], [b" and again"] * 2) == []
        flows[0][0].send(b" after")
        await any_rig.turns()
        expected = [b"now and again after", b"before now and again", b"now", b""]
        for (_, _, peer), text in zip(flows, expected, strict=True):
            assert await any_rig.in_thread(partial(peer.recv, len(text) or 1)) == text

    any_rig.run(main)


def test_a_frame_to_each_of_which_some_do_not_keep_up(any_rig: Rig) -> None:
    async def main() -> None:
        flows = [any_rig.flow(send_buffer=8192) for _ in range(3)]
        fds = [flow.fd for flow, _, _ in flows]
        frames = [BIG[at : at + 6000] for at in range(0, 600_000, 6000)]
        reading = [any_rig.in_thread(partial(read_exactly, peer, 600_000)) for _, _, peer in flows[1:]]
        waiting: dict[int, int] = {}
        for frame in frames:
            waiting |= dict(send_each(any_rig, fds, [frame] * 3))
            await asyncio.sleep(0.001)
        assert waiting[fds[0]] == flows[0][0].waiting_bytes == flows[0][0].backlog_bytes > 400_000
        assert await asyncio.gather(*reading) == [BIG[:600_000]] * 2
        assert await any_rig.in_thread(lambda: read_exactly(flows[0][2], 600_000)) == BIG[:600_000]

    any_rig.run(main)


def test_what_follows_a_frame_to_each_does_not_overtake_it(any_rig: Rig) -> None:
    async def main() -> None:
        flow, _, peer = any_rig.flow(send_buffer=8192)
        for at in range(0, len(BIG), 9000):
            piece = BIG[at : at + 9000]
            send_each(any_rig, [flow.fd], [piece[:6000]])
            flow.send(piece[6000:8000])
            send_each(any_rig, [flow.fd], [piece[8000:]])
            await asyncio.sleep(0)
        assert flow.backlog_bytes > 0, "the socket should be full"
        assert await any_rig.in_thread(lambda: read_exactly(peer, len(BIG))) == BIG

    any_rig.run(main)


def test_a_flow_that_ends_in_the_turn_of_a_frame_to_each(any_rig: Rig) -> None:
    async def main() -> None:
        closed, closed_seen, closed_peer = any_rig.flow()
        aborted, aborted_seen, _ = any_rig.flow()
        other, _, other_peer = any_rig.flow()
        send_each(any_rig, [closed.fd, aborted.fd, other.fd], [b"last words"] * 3)
        closed.close()
        aborted.abort()
        replacement, _, replacement_peer = any_rig.flow()
        other.send(b", and more")
        assert await any_rig.in_thread(lambda: read_exactly(closed_peer, 10)) == b"last words"
        assert await any_rig.in_thread(partial(closed_peer.recv, 1)) == b""
        assert await any_rig.in_thread(lambda: read_exactly(other_peer, 20)) == b"last words, and more"
        closed_peer.close()
        await closed_seen.wait(lambda seen: bool(seen.lost))
        await aborted_seen.wait(lambda seen: bool(seen.lost))
        replacement.send(b"nothing else")
        assert await any_rig.in_thread(lambda: read_exactly(replacement_peer, 12)) == b"nothing else"

    any_rig.run(main)


def test_a_frame_to_each_of_a_batch_costs_one_system_call(ring_rig: Rig) -> None:
    async def main() -> None:
        flows = [ring_rig.flow() for _ in range(64)]
        await ring_rig.turns()
        before = ring_rig.driver.statistics()
        send_each(ring_rig, [flow.fd for flow, _, _ in flows], [b"now"] * 64)
        await asyncio.sleep(0)  # a turn
        after = ring_rig.driver.statistics()
        assert (after.sends - before.sends, after.enters - before.enters) == (64, 1)

    ring_rig.run(main)


def test_large_frames_to_each(any_rig: Rig) -> None:
    async def main() -> None:
        flows = [any_rig.flow() for _ in range(40)]
        frames = [BIG[number : number + 30_000] for number in range(40)]
        send_each(any_rig, [flow.fd for flow, _, _ in flows], frames)
        await any_rig.turns()
        for (_, _, peer), frame in zip(flows, frames, strict=True):
            assert await any_rig.in_thread(partial(read_exactly, peer, 30_000)) == frame

    any_rig.run(main)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_short_send_loses_and_reorders_nothing(any_rig: Rig, tcp: bool) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=tcp, send_buffer=8192)
        at = 0
        rest = 0
        while at < len(BIG):
            rest = flow.send(BIG[at : at + 6000])
            at += 6000
            await asyncio.sleep(0)
        assert rest > 0, "the socket should be full"
        assert flow.backlog_bytes > 0
        received = await any_rig.in_thread(lambda: read_exactly(peer, len(BIG)))
        assert received == BIG
        await recorder.wait(lambda seen: seen.drained > 0)
        assert flow.backlog_bytes == 0
        assert any_rig.driver.statistics().partial_sends > 0

    any_rig.run(main)


@pytest.mark.parametrize("end", ["stays open", "closes", "is detached"])
@pytest.mark.parametrize("send_buffer", [8192, None])
def test_very_much_in_one_turn_is_a_backlog_before_the_socket_was_asked(
    any_rig: Rig, send_buffer: int | None, end: str
) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(send_buffer=send_buffer)
        waiting = [flow.send(BIG[at : at + 1000]) for at in range(0, len(BIG), 1000)]
        assert waiting[0] == 0
        assert 0 < waiting[-1] == max(waiting) < len(BIG)
        detached: list[int] = []
        if end == "closes":
            flow.close()
        elif end == "is detached":
            flow.detach(detached.append)
        assert await any_rig.in_thread(lambda: read_exactly(peer, len(BIG))) == BIG
        if end == "stays open":
            await recorder.wait(lambda seen: seen.drained > 0)
            assert flow.send(b"more") == 0
            assert await any_rig.in_thread(lambda: read_exactly(peer, 4)) == b"more"
        elif end == "closes":
            assert await any_rig.in_thread(lambda: peer.recv(1)) == b""
            peer.close()
            await recorder.wait(lambda seen: seen.lost == [None])
        else:
            while not detached:
                await asyncio.sleep(0)
            os.close(detached[0])
            assert recorder.lost == []

    any_rig.run(main)


def test_a_flow_that_cannot_be_detached_can_be_aborted(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, _ = any_rig.flow(send_buffer=8192)
        flow.send(BIG)
        await any_rig.turns()
        detached: list[int] = []
        flow.detach(detached.append)
        await any_rig.turns()
        assert detached == []
        flow.abort()
        await recorder.wait(lambda seen: seen.lost == [None])
        assert detached == []
        assert flow.fd == -1

    any_rig.run(main)


def test_one_huge_send_beside_small_ones(any_rig: Rig) -> None:
    async def main() -> None:
        huge, _, huge_peer = any_rig.flow(send_buffer=8192)
        small, _, small_peer = any_rig.flow()
        huge.send(BIG)
        small.send(b"small")
        await any_rig.turns()
        assert small_peer.recv(16) == b"small"
        assert await any_rig.in_thread(lambda: read_exactly(huge_peer, len(BIG))) == BIG

    any_rig.run(main)


def test_a_stalled_peer_delays_nobody(any_rig: Rig) -> None:
    async def main() -> None:
        stalled = [any_rig.flow(send_buffer=4608) for _ in range(5)]
        lively = [any_rig.flow(send_buffer=4608) for _ in range(15)]
        sent = bytearray()
        for step in range(400):
            frame = b"%04d" % step * 15
            sent += frame
            for flow, _, _ in stalled + lively:
                flow.send(frame)
            await asyncio.sleep(0)
            for _, _, peer in lively:
                assert read_exactly(peer, len(frame)) == frame
        assert all(flow.backlog_bytes == 0 for flow, _, _ in lively)
        for flow, _, peer in stalled:
            assert flow.backlog_bytes > 0
            received = await any_rig.in_thread(lambda peer=peer: read_exactly(peer, len(sent)))  # type: ignore[misc]
            assert received == sent

    any_rig.run(main)


@pytest.mark.parametrize("size", [0, 5, len(BIG)])
def test_close_delivers_what_was_sent_and_then_the_end(any_rig: Rig, size: int) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True, send_buffer=8192)
        await any_rig.turns()  # the receive is armed: it must not hold the socket open
        if size:
            flow.send(BIG[:size])
        flow.close()
        flow.close()
        assert flow.send(b"too late") == 0
        assert await any_rig.in_thread(lambda: read_all(peer)) == BIG[:size]
        peer.close()
        await recorder.wait(lambda seen: bool(seen.lost))
        assert recorder.lost == [None]
        assert flow.fd == -1
        assert any_rig.driver.statistics().flows == 0

    any_rig.run(main)


def test_close_with_unread_input_does_not_cut_the_answer_off(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True)
        peer.sendall(b"x" * 100_000)
        await recorder.wait(lambda seen: bool(seen.data))
        flow.send(b"413 too large")
        flow.close()
        peer.sendall(b"y" * 100_000)
        assert await any_rig.in_thread(lambda: read_all(peer)) == b"413 too large"

    any_rig.run(main)


def test_a_peer_that_never_closes_is_left_after_the_linger_time(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, _ = any_rig.flow(tcp=True)
        flow.close()
        started = any_rig.loop.time()
        await recorder.wait(lambda seen: bool(seen.lost))
        assert 1.5 < any_rig.loop.time() - started < 4

    any_rig.run(main)


def test_a_stalled_peer_costs_no_turns(ring_rig: Rig) -> None:
    async def main() -> None:
        flows = [ring_rig.flow(tcp=True, send_buffer=8192) for _ in range(2)]
        for flow, _, _ in flows:
            flow.send(BIG)
        flows[0][0].close()
        await asyncio.sleep(0.05)
        before = ring_rig.driver.statistics().enters
        await asyncio.sleep(0.2)
        assert ring_rig.driver.statistics().enters - before < 10

    ring_rig.run(main)


def test_abort_resets_and_drops_the_backlog(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True, send_buffer=8192)
        flow.send(BIG)
        await any_rig.turns()
        flow.abort()
        flow.abort()
        await recorder.wait(lambda seen: bool(seen.lost))
        assert recorder.lost == [None]
        with pytest.raises(ConnectionResetError):
            await any_rig.in_thread(lambda: read_all(peer))

    any_rig.run(main)


def test_abort_right_after_open_and_send(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, _ = any_rig.flow()
        flow.send(b"never mind")
        flow.abort()
        await recorder.wait(lambda seen: bool(seen.lost))
        assert recorder.lost == [None]

    any_rig.run(main)


def test_the_peers_end_is_told_once_and_we_can_still_send(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True)
        peer.sendall(b"all")
        peer.shutdown(socket.SHUT_WR)
        await recorder.wait(lambda seen: seen.eof == 1)
        assert recorder.data == b"all"
        flow.send(b"answer")
        flow.close()
        assert await any_rig.in_thread(lambda: read_all(peer)) == b"answer"
        await recorder.wait(lambda seen: bool(seen.lost))
        assert recorder.eof == 1

    any_rig.run(main)


def test_a_reset_is_an_error(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True)
        await any_rig.turns()
        _reset(peer)
        await recorder.wait(lambda seen: bool(seen.lost))
        [error] = recorder.lost
        assert error is not None and error.errno == errno.ECONNRESET
        assert flow.fd == -1

    any_rig.run(main)


def test_a_reset_while_sends_are_waiting(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True, send_buffer=8192)
        flow.send(BIG)
        await any_rig.turns()
        assert flow.backlog_bytes
        _reset(peer)
        await recorder.wait(lambda seen: bool(seen.lost))
        assert len(recorder.lost) == 1
        flow.send(b"nobody is there")

    any_rig.run(main)


@pytest.mark.parametrize("end", ["is aborted", "is reset"])
def test_a_backlog_that_goes_with_its_flow_costs_no_turns(any_rig: Rig, end: str) -> None:
    """It was worked off piece by piece; its rest must not have the loop look for the next piece for ever."""

    async def main() -> None:
        ends = []
        for _ in range(3):
            flow, recorder, peer = any_rig.flow(tcp=True, send_buffer=8192)
            for at in range(0, len(BIG), 1000):
                flow.send(BIG[at : at + 1000])
            if end == "is aborted":
                flow.abort()
            else:
                _reset(peer)
            ends.append(recorder)
        for recorder in ends:
            await recorder.wait(lambda seen: bool(seen.lost))

    any_rig.run(main)


def test_sending_to_a_peer_that_is_gone(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True)
        flow.pause_reading()
        await any_rig.turns()
        peer.close()
        for _ in range(100):
            flow.send(b"hello?")
            await asyncio.sleep(0.001)
            if recorder.lost:
                break
        [error] = recorder.lost
        assert error is not None and error.errno in (errno.EPIPE, errno.ECONNRESET)

    any_rig.run(main)


def test_paused_reading_leaves_the_bytes_where_they_are(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow()
        flow.pause_reading()
        flow.pause_reading()
        await any_rig.turns()
        peer.sendall(b"later")
        await asyncio.sleep(0.02)
        assert recorder.data == b""
        flow.resume_reading()
        await recorder.wait(lambda seen: seen.data == b"later")

    any_rig.run(main)


def test_pausing_and_resuming_in_one_turn(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow()
        await any_rig.turns()
        for number in range(20):
            flow.pause_reading()
            if number % 3 == 0:
                await any_rig.turns(1)
            flow.resume_reading()
            peer.sendall(b".")
        await recorder.wait(lambda seen: len(seen.data) == 20)

    any_rig.run(main)


def test_closing_a_paused_flow_is_seen_to_its_end(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True)
        flow.pause_reading()
        await any_rig.turns()
        flow.close()
        assert await any_rig.in_thread(lambda: read_all(peer)) == b""
        peer.close()
        await recorder.wait(lambda seen: bool(seen.lost))

    any_rig.run(main)


def test_detach_gives_the_descriptor_away_after_all_is_sent(any_rig: Rig) -> None:
    async def main() -> None:
        flow, recorder, peer = any_rig.flow(tcp=True, send_buffer=8192)
        peer.sendall(b"head")
        await recorder.wait(lambda seen: seen.data == b"head")
        given: asyncio.Future[int] = any_rig.loop.create_future()
        flow.send(BIG)
        flow.detach(given.set_result)
        reading = any_rig.in_thread(lambda: read_exactly(peer, len(BIG)))
        fd = await given
        assert flow.fd == -1
        assert any_rig.driver.statistics().flows == 0
        assert await reading == BIG
        with socket.socket(fileno=fd) as ours:
            ours.settimeout(5)
            peer.sendall(b"body")
            assert ours.recv(16) == b"body"
            ours.sendall(b"still open")
            assert peer.recv(16) == b"still open"
        assert recorder.data == b"head"
        assert not recorder.lost

    any_rig.run(main)


def test_bytes_that_come_during_a_detach_are_not_lost(any_rig: Rig) -> None:
    async def main() -> None:
        for _ in range(50):
            flow, recorder, peer = any_rig.flow()
            given: asyncio.Future[int] = any_rig.loop.create_future()
            sender = threading.Thread(target=peer.sendall, args=(b"0123456789",))
            sender.start()
            flow.detach(given.set_result)
            fd = await given
            await any_rig.in_thread(sender.join)
            with socket.socket(fileno=fd) as ours:
                ours.setblocking(False)
                try:
                    rest = ours.recv(16)
                except BlockingIOError:
                    rest = b""
            assert bytes(recorder.data) + rest == b"0123456789"

    any_rig.run(main)


def test_the_next_owner_of_a_number_gets_nothing_of_the_last(any_rig: Rig) -> None:
    async def main() -> None:
        numbers = set()
        for _ in range(60):
            old, old_recorder, old_peer = any_rig.flow(tcp=True, send_buffer=8192)
            await any_rig.turns(1)
            old.send(BIG[:200_000])
            old_peer.sendall(b"old" * 100)
            old.abort()
            await old_recorder.wait(lambda seen: bool(seen.lost))
            new, new_recorder, new_peer = any_rig.flow(tcp=True)
            numbers.add(new.fd)
            new.send(b"fresh")
            new_peer.sendall(b"new")
            await new_recorder.wait(lambda seen: len(seen.data) >= 3)
            assert new_recorder.data == b"new"
            assert await any_rig.in_thread(lambda peer=new_peer: read_exactly(peer, 5)) == b"fresh"  # type: ignore[misc]
            new.abort()
            await new_recorder.wait(lambda seen: bool(seen.lost))
            new_peer.close()
            old_peer.close()
        assert len(numbers) < 60, "no number was used twice: nothing was tested"

    any_rig.run(main)


def test_a_number_is_nobody_elses_until_the_end_was_told(any_rig: Rig) -> None:
    """What an endpoint knows by its descriptor's number must be gone when another flow gets it."""

    async def main() -> None:
        for end in ("abort", "reset"):
            flow, recorder, peer = any_rig.flow(tcp=True)
            await any_rig.turns(1)
            number = flow.fd
            if end == "abort":
                flow.abort()
                assert flow.fd == -1
            else:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            taken: list[int] = []
            while not recorder.lost:
                copy = os.dup(2)
                taken.append(copy)
                assert recorder.lost or copy != number
                await asyncio.sleep(0)
            for copy in taken:
                os.close(copy)

    any_rig.run(main)


def test_scarce_receive_buffers_end_no_flow(scarce_rig: Rig) -> None:
    async def main() -> None:
        flows = [scarce_rig.flow() for _ in range(20)]
        await scarce_rig.turns()
        for number, (_, _, peer) in enumerate(flows):
            peer.sendall(bytes([number]) * 50_000)
        for number, (_, recorder, _) in enumerate(flows):
            await recorder.wait(lambda seen: len(seen.data) == 50_000)
            assert recorder.data == bytes([number]) * 50_000
        assert scarce_rig.driver.statistics().receive_buffers_exhausted > 0

    scarce_rig.run(main)


def test_an_endpoint_that_raises_loses_its_own_flow_only(any_rig: Rig) -> None:
    class Faulty(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("a bug")

    async def main() -> None:
        told: list[dict[str, object]] = []
        any_rig.loop.set_exception_handler(lambda _, context: told.append(context))
        good, good_recorder, good_peer = any_rig.flow()
        faulty, faulty_recorder, faulty_peer = any_rig.flow()
        faulty.endpoint = broken = Faulty()
        faulty_peer.sendall(b"x")
        await broken.wait(lambda seen: bool(seen.lost))
        good_peer.sendall(b"y")
        await good_recorder.wait(lambda seen: seen.data == b"y")
        assert isinstance(told[0]["exception"], ValueError)
        assert good.fd >= 0
        assert not faulty_recorder.lost

    any_rig.run(main)


def test_listening_accepts_until_closed(any_rig: Rig) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            accepted: list[int] = []
            listening = any_rig.driver.listen(listener, accepted.append)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(100)]
            while len(accepted) < 100:
                await asyncio.sleep(0.001)
            assert all(not os.get_blocking(fd) and not os.get_inheritable(fd) for fd in accepted)
            listening.close()
            listening.close()
            late = socket.create_connection(listener.getsockname())  # stays in the listener's queue
            await asyncio.sleep(0.02)
            assert len(accepted) == 100
            for client in [*clients, late]:
                client.close()
            for fd in accepted:
                os.close(fd)

    any_rig.run(main)


def test_accepting_goes_on_when_descriptors_are_free_again(any_rig: Rig) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepted: list[int] = []
            clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(lowest, *(c.fileno() for c in clients)) + 1, hard))
            try:
                listening = any_rig.driver.listen(listener, accepted.append)
                await asyncio.sleep(0.05)
                assert len(accepted) < 3
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            while len(accepted) < 3:
                await asyncio.sleep(0.01)
            listening.close()
            for fd in accepted:
                os.close(fd)
            for client in clients:
                client.close()

    any_rig.run(main)


def test_many_flows_with_random_lives_stay_byte_exact(any_rig: Rig) -> None:
    choose = random.Random(7)

    async def main() -> None:
        async def life(number: int) -> None:
            flow, recorder, peer = any_rig.flow(tcp=number % 2 == 0, send_buffer=choose.choice([4608, 32768, None]))
            sent = bytearray()
            reader = any_rig.in_thread(lambda: read_all(peer)) if number % 8 else None
            for _ in range(choose.randrange(1, 30)):
                piece = choose.randbytes(choose.choice([1, 60, 700, 40_000]))
                flow.send(piece)
                sent += piece
                if choose.random() < 0.7:
                    await asyncio.sleep(0)
            if reader is None:
                flow.abort()
            else:
                flow.close()
                assert await reader == sent
                peer.close()
            await recorder.wait(lambda seen: bool(seen.lost))

        for _ in range(4):
            await asyncio.gather(*(life(number) for number in range(24)))
        assert any_rig.driver.statistics().flows == 0

    any_rig.run(main)


def _reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    peer.close()


def test_a_loop_closed_with_open_flows_leaves_no_descriptor(any_rig: Rig) -> None:
    async def main() -> None:
        flows: list[Flow] = [any_rig.flow()[0] for _ in range(10)]
        for flow in flows:
            flow.send(b"x")
        ours, peer = tcp_pair()
        ours.close()
        peer.close()

    any_rig.run(main)  # the rig's own end checks
