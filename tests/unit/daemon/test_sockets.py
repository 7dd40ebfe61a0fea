"""Listening sockets: their options, their files, and what is said when they cannot be had."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from seedance.daemon.config import Address, ListenConfig
from seedance.daemon.sockets import (
    SEND_BUFFER_BYTES,
    Listeners,
    first_tcp,
    listen_hint,
    listen_tcp,
    listen_unix,
    lock,
)
from seedance.errors import KernelError


def test_an_accepted_connection_inherits_the_listeners_options() -> None:
    with listen_tcp(Address("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            # The kernel doubles what was asked for, to cover its own bookkeeping.
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SEND_BUFFER_BYTES


def test_a_port_in_use_says_so_and_what_helps() -> None:
    with listen_tcp(Address("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        with pytest.raises(KernelError) as raised:
            listen_tcp(address)
    assert str(raised.value).startswith(f"cannot listen on 127.0.0.1:{address.port}: Address already in use")
    assert "another program listens there" in listen_hint(raised.value)


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.EACCES, "CAP_NET_BIND_SERVICE"), (errno.EADDRNOTAVAIL, "no such address"), (errno.EIO, "")],
)
def test_hints(number: int, word: str) -> None:
    hint = listen_hint(KernelError("listen", number))
    assert word in hint
    assert bool(hint) == bool(word)


def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "sock")
    with listen_unix(path, 0o600) as first:
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(KernelError, match="Address already in use"):
            listen_unix(path, 0o600)
        assert first.getsockname() == path
    with listen_unix(path, 0o666):
        assert os.stat(path).st_mode & 0o777 == 0o666


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(KernelError):
        listen_unix(str(path), 0o600)
    assert path.read_text() == "data"


def test_listeners_are_named_by_what_the_kernel_chose(tmp_path: Path) -> None:
    unix = str(tmp_path / "sock")
    listeners = Listeners(ListenConfig(tcp=(Address("127.0.0.1", 0),), unix=unix))
    port = listeners.sockets[0].getsockname()[1]
    assert listeners.names == [f"127.0.0.1:{port}", f"unix:{unix}"]
    listeners.close()
    assert not Path(unix).exists()
    listeners.close()


def test_one_that_cannot_be_had_closes_the_others() -> None:
    with listen_tcp(Address("127.0.0.1", 0)) as taken:
        config = ListenConfig(tcp=(Address("127.0.0.1", 0), Address(*taken.getsockname())))
        with pytest.raises(KernelError):
            Listeners(config)


def test_an_ipv6_address_that_the_machine_lacks_is_left_out_where_there_is_another() -> None:
    # From the range for documentation: no machine has it.
    missing = Address("2001:db8::1", 0)
    listeners = Listeners(ListenConfig(tcp=(Address("127.0.0.1", 0), missing)))
    assert len(listeners.sockets) == 1
    listeners.close()
    with pytest.raises(KernelError):
        Listeners(ListenConfig(tcp=(missing,)))
    with pytest.raises(KernelError):
        Listeners(ListenConfig(tcp=(Address("192.0.2.1", 0), Address("127.0.0.1", 0))))


def test_more_listeners_than_a_packet_carries_are_refused() -> None:
    with pytest.raises(KernelError, match="more than 31 addresses"):
        Listeners(ListenConfig(tcp=(Address("127.0.0.1", 0),) * 40))


def test_the_lock_is_for_one(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "lock")
    first = lock(path)
    with pytest.raises(KernelError) as raised:
        lock(path)
    assert isinstance(raised.value.__cause__, BlockingIOError)
    os.close(first)
    os.close(lock(path))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["unix:/a:1", "127.0.0.1:8000"], "127.0.0.1:8000"),
        (["0.0.0.0:80"], "127.0.0.1:80"),
        (["[::]:80"], "[::1]:80"),
        (["[::1]:80"], "[::1]:80"),
        (["unix:/a"], None),
        ([], None),
    ],
)
def test_first_tcp(names: list[str], expected: str | None) -> None:
    assert first_tcp(names) == expected
