"""The gateway on real sockets and both drivers; the test plays supervisor, workers and clients."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.gateway import Client, Connection, Harness, gateway, key_of, request, ring_loop

from seedance.daemon import links
from seedance.daemon.gateway import probe_marks
from seedance.engine.packets import pair

Scenario = Callable[[Harness], Awaitable[None]]
Run = Callable[..., None]

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n"


@pytest.fixture(params=["io_uring", "epoll"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a scenario against a gateway on each driver."""
    with ring_loop(request.param) as (loop, driver):

        async def play(scenario: Scenario, settings: dict[str, Any]) -> None:
            async with gateway(loop, driver, **settings) as harness:
                await scenario(harness)

        yield lambda scenario, **settings: loop.run_until_complete(play(scenario, settings))


def _error(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_health_follows_the_engine_and_keeps_the_connection(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        client = await harness.client(HEALTH)
        status, fields, body = await client.response()
        assert (status, fields["retry-after"], json.loads(body)["status"]) == (503, "1", "starting")
        harness.supervisor.send(links.EngineStatus("ready"))
        harness.supervisor.send(links.Query())
        await harness.supervisor.next()
        client.send(HEALTH + HEALTH + b"HEAD /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        for _ in range(2):
            status, fields, body = await client.response()
            assert (status, json.loads(body)) == (200, {"status": "ok"})
            assert "connection" not in fields
        last = await client.rest()
        assert last.startswith(b"HTTP/1.1 200 OK\r\n")
        assert last.endswith(b"Connection: close\r\n\r\n")

    run(scenario)


def test_health_takes_get_only(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        client = await harness.client(b"POST /healthz HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello")
        status, fields, _ = await client.response()
        assert (status, fields["allow"]) == (405, "GET, HEAD")

    run(scenario)


@pytest.mark.parametrize(
    "authorization", ["", "Authorization: Bearer sk-seed-nobody-has-this\r\n", "Authorization: x\r\n"]
)
def test_without_a_known_key_the_answer_is_401(run: Run, authorization: str) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        client = await harness.client(f"GET /v1/models HTTP/1.1\r\nHost: test\r\n{authorization}\r\n".encode())
        status, fields, body = await client.response()
        assert (status, fields["www-authenticate"], fields["connection"]) == (401, "Bearer", "close")
        assert _error(body)["code"] == "invalid_api_key"
        assert await client.rest() == b""
        assert harness.supervisor.is_empty

    run(scenario)


def test_a_refusal_arrives_while_the_client_is_still_sending(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        length = 300_000
        client = await harness.client(
            b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % length + bytes(length)
        )
        status, _, _ = await client.response()
        assert status == 401

    run(scenario)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\nHost: test\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"GET / HTTP/2.0\r\nHost: test\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 5000, 431),
    ],
)
def test_what_is_no_request_head_is_refused(run: Run, data: bytes, expected: int) -> None:
    async def scenario(harness: Harness) -> None:
        client = await harness.client(data)
        status, fields, body = await client.response()
        assert (status, fields["connection"]) == (expected, "close")
        assert _error(body)["code"] == "invalid_request"

    run(scenario)


async def _handed(worker: Any) -> tuple[links.Handover, Connection]:
    message, [fd] = await worker.next()
    assert isinstance(message, links.Handover)
    worker.send(links.Taken())
    return message, Connection(fd)


async def _line(client: Client) -> bytes:
    async with asyncio.timeout(5):
        return await client.reader.readline()


def test_a_connection_reaches_its_tenants_worker_with_the_bytes_read(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme", "globex")
        client = await harness.client(request("globex"))
        worker = await harness.wanted("globex")
        message, connection = await _handed(worker)
        assert message.data == request("globex")
        assert message.listener == "127.0.0.1:0"
        assert message.peer == "{}:{}".format(*client.writer.get_extra_info("sockname"))
        with connection as sock:
            sock.sendall(b"from the worker\n")
            assert await _line(client) == b"from the worker\n"

    run(scenario)


def test_a_head_may_come_byte_by_byte(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        client = await harness.client()
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request("acme"):
            client.send(bytes((byte,)))
            await client.writer.drain()
            await asyncio.sleep(0)
        message, connection = await _handed(await harness.wanted("acme"))
        with connection:
            assert message.data == request("acme")

    run(scenario)


def test_of_a_long_body_no_more_is_read_than_the_limit_on_heads(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        whole = request("acme", method="POST", body=bytes(range(256)) * 2000)
        await harness.client(whole)
        message, connection = await _handed(await harness.wanted("acme"))
        assert len(message.data) <= 4096
        received = message.data
        with connection as sock:
            while len(received) < len(whole):
                received += await asyncio.to_thread(sock.recv, 1 << 20)
        assert received == whole

    run(scenario)


def test_one_worker_is_asked_for_and_gets_everyone_who_waits_in_order(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        for number in range(5):
            client = await harness.client(request("acme", f"/{number}"))
            await client.writer.drain()
        worker = await harness.wanted("acme")
        seen = []
        for _ in range(5):
            message, connection = await _handed(worker)
            with connection:
                seen.append(message.data.split()[1])
        assert sorted(seen) == [b"/%d" % number for number in range(5)]
        assert harness.supervisor.is_empty

    run(scenario)


def test_a_connection_that_shows_another_key_is_handed_on(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme", "globex")
        client = await harness.client(request("acme"))
        acme = await harness.wanted("acme")
        message, connection = await _handed(acme)
        back = links.HandBack(message.peer, message.listener, request("globex", "/second"))
        with connection as sock:
            acme.send(back, sock.fileno())
        globex = await harness.wanted("globex")
        message, connection = await _handed(globex)
        assert message.data == request("globex", "/second")
        with connection as sock:
            sock.sendall(b"globex\n")
            assert await _line(client) == b"globex\n"

    run(scenario)


def test_a_worker_and_the_gateway_that_disagree_do_not_pass_a_connection_to_and_fro(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        client = await harness.client(request("acme"))
        worker = await harness.wanted("acme")
        message, connection = await _handed(worker)
        with connection as sock:
            worker.send(links.HandBack(message.peer, message.listener, message.data), sock.fileno())
        assert (await client.response())[0] == 401

    run(scenario)


def test_a_tenants_connections_are_limited_until_the_worker_releases_some(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme", connections=2)
        kept = []
        await harness.client(request("acme"))
        worker = await harness.wanted("acme")
        await harness.client(request("acme"))
        for _ in range(2):
            kept.append((await _handed(worker))[1])
        third = await harness.client(request("acme"))
        status, fields, body = await third.response()
        assert (status, _error(body)["code"], fields["retry-after"]) == (429, "rate_limited", "1")
        worker.send(links.Released(1))
        kept.pop().sock.close()
        harness.supervisor.send(links.Query())
        counted, _ = await harness.supervisor.next()
        assert (counted.accepted, counted.refused, counted.waiting, counted.held) == (3, 1, 0, 1)
        await harness.client(request("acme"))
        kept.append((await _handed(worker))[1])
        for connection in kept:
            connection.sock.close()

    run(scenario)


def test_who_waits_for_a_worker_that_cannot_be_had_is_refused(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        client = await harness.client(request("acme"))
        await harness.supervisor.next()
        harness.supervisor.send(links.WorkerFailed("acme", "the tenant's worker keeps ending"))
        status, fields, body = await client.response()
        assert (status, _error(body)["code"], fields["retry-after"]) == (503, "overloaded", "1")
        await harness.client(request("acme"))
        message, _ = await harness.supervisor.next()
        assert message == links.WorkerWanted("acme")

    run(scenario)


def test_too_many_waiting_are_refused(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        for _ in range(2):
            await harness.client(request("acme"))
        await harness.supervisor.next()
        third = await harness.client(request("acme"))
        assert (await third.response())[0] == 503

    run(scenario, max_waiting=2)


def test_over_the_total_of_connections_the_answer_is_503(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        for _ in range(3):
            await harness.client(HEALTH)
        assert (await (await harness.client(HEALTH)).response())[0] == 503

    run(scenario, max_connections=3)


def test_what_a_worker_did_not_take_goes_to_the_next_one(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        taken, untaken = await harness.client(request("acme", "/taken")), await harness.client()
        first = await harness.wanted("acme")
        message, connection = await _handed(first)
        assert message.data == request("acme", "/taken")
        untaken.send(request("acme", "/untaken"))
        message, [fd] = await first.next()
        os.close(fd)
        connection.sock.close()
        assert await taken.rest() == b""
        first.close()
        second = await harness.wanted("acme")
        message, connection = await _handed(second)
        assert message.data == request("acme", "/untaken")
        with connection as sock:
            sock.sendall(b"served\n")
            assert await _line(untaken) == b"served\n"
        assert second.is_empty

    run(scenario)


def test_a_link_that_comes_twice_is_one(run: Run) -> None:
    """As when a worker is started unasked while the gateway asks for it."""

    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        worker = harness.attach("acme", copies=2)
        for path in ("/one", "/two", "/three"):
            client = await harness.client(request("acme", path))
            message, connection = await _handed(worker)
            assert message.data == request("acme", path)
            with connection as sock:
                sock.sendall(b"served\n")
                assert await _line(client) == b"served\n"
            assert await client.rest() == b""  # nobody else has it open
        worker.send(links.Released(3))
        worker.close()
        await harness.client(request("acme", "/four"))
        await harness.wanted("acme")

    run(scenario)


def test_a_worker_that_dies_with_packets_unread_leaves_what_it_took(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        ours, theirs = pair()
        with theirs:
            harness.supervisor.send(links.WorkerAttached("acme", 1_000_000), theirs.fileno())
        for path in ("/taken", "/untaken"):
            await harness.client(request("acme", path))
        with ours:
            await asyncio.to_thread(_receive_blocking, ours)
            ours.send(links.TO_GATEWAY.encode(links.Taken()))
            while not select.select([ours], [], [], 0)[0]:
                await asyncio.sleep(0.001)
        second = await harness.wanted("acme")
        message, connection = await _handed(second)
        assert message.data == request("acme", "/untaken")
        connection.sock.close()
        harness.supervisor.send(links.Query())
        counted, _ = await harness.supervisor.next()
        assert (counted.waiting, counted.held) == (0, 1)
        assert second.is_empty

    run(scenario)


def _receive_blocking(sock: socket.socket) -> None:
    sock.setblocking(True)
    _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
    for fd in fds:
        os.close(fd)


def test_a_worker_that_is_let_go_still_takes_what_is_in_flight(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        client = await harness.client(request("acme", "/late"))
        first = await harness.wanted("acme")
        message, [fd] = await first.next()
        harness.supervisor.send(links.WorkerDetached("acme"))
        await harness.client(request("acme", "/next"))
        second = await harness.wanted("acme")
        assert not first.closed.is_set()
        first.send(links.Taken())
        await first.closed.wait()
        with Connection(fd) as sock:
            sock.sendall(b"served\n")
            assert await _line(client) == b"served\n"
        message, connection = await _handed(second)
        assert message.data == request("acme", "/next")
        connection.sock.close()

    run(scenario)


def test_a_dead_worker_is_followed_by_another_one(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        await harness.client(request("acme"))
        worker = await harness.wanted("acme")
        (await _handed(worker))[1].sock.close()
        worker.close()
        await harness.client(request("acme"))
        (await _handed(await harness.wanted("acme")))[1].sock.close()
        harness.supervisor.send(links.Query())
        counted, _ = await harness.supervisor.next()
        assert counted.held == 1

    run(scenario)


def test_a_detached_worker_reads_the_end_of_its_link(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        worker = harness.attach("acme")
        await harness.client(request("acme"))
        (await _handed(worker))[1].sock.close()
        harness.supervisor.send(links.WorkerDetached("acme"))
        async with asyncio.timeout(5):
            await worker.closed.wait()
        await harness.client(request("acme"))
        (await _handed(await harness.wanted("acme")))[1].sock.close()

    run(scenario)


def test_a_removed_tenant_loses_its_worker_and_its_key(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme", "globex")
        worker = harness.attach("acme")
        waiting = await harness.client(request("globex"))
        assert (await harness.supervisor.next())[0] == links.WorkerWanted("globex")
        harness.set_tenants("other")
        async with asyncio.timeout(5):
            await worker.closed.wait()
        assert (await waiting.response())[0] == 401
        assert (await (await harness.client(request("acme"))).response())[0] == 401

    run(scenario)


def test_the_list_of_tenants_may_come_in_pieces(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("old")
        entries = [links.TenantEntry(name, 1, None, []) for name in ("a", "b")]
        harness.supervisor.send(links.Tenants(entries[:1], False))
        await harness.client(request("old"))
        await harness.wanted("old")  # the former list counts until the last piece
        harness.supervisor.send(links.Tenants(entries[1:], True))
        harness.supervisor.send(links.Query())
        await harness.supervisor.next()
        assert (await (await harness.client(request("old"))).response())[0] == 401

    run(scenario)


def test_a_slow_head_is_refused_and_a_silent_connection_closed(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        slow = await harness.client(b"GET / HTTP/1.1\r\n")
        silent = await harness.client()
        assert (await slow.response())[0] == 408
        assert await silent.rest() == b""

    run(scenario, head_timeout_s=0.05)


def test_when_too_many_are_silent_the_oldest_makes_room(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        silent = [await harness.client(), await harness.client()]
        client = await harness.client(HEALTH)
        assert (await client.response())[0] == 503
        assert await silent[0].rest() == b""

    run(scenario, max_greeting=2)


def test_a_handed_over_socket_carries_the_tenants_mark_where_that_is_allowed(run: Run) -> None:
    expected = 0 if probe_marks() else 8

    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme", "globex")
        await harness.client(request("globex"))
        _, connection = await _handed(await harness.wanted("globex"))
        with connection as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == expected

    run(scenario)


def test_the_key_decides_and_not_the_path(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        harness.set_tenants("acme")
        await harness.client(f"GET /nowhere?key={key_of('acme')} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        message, connection = await _handed(await harness.wanted("acme"))
        with connection:
            assert message.data.startswith(b"GET /nowhere?key=")

    run(scenario)
