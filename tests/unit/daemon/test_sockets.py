"""Listening sockets: their options, their files, and what is said when they cannot be had."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

import pytest

from seedance.daemon.config import Address, ListenConfig
from seedance.daemon.network_settings import NetworkSettings
from seedance.daemon.sockets import (
    Listeners,
    first_tcp,
    listen_hint,
    listen_tcp,
    listen_unix,
    lock,
    name_of,
)
from seedance.errors import KernelError


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


def test_settings_are_those_of_the_address(tmp_path: Path) -> None:
    address = "127.0.0.1:0"
    config = ListenConfig(
        tcp=(Address("127.0.0.1", 0), Address("127.0.0.2", 0)),
        unix=str(tmp_path / "sock"),
        congestion="reno",
        backlog=5,
        at={address: NetworkSettings(congestion="reno", keepalive_s=0, backlog=6)},
    )
    listeners = Listeners(config)
    with contextlib.closing(listeners):
        found = listeners.settings()
        assert [status.name for status in found] == listeners.names
        assert [status.settings.get("keepalive") for status in found] == ["0s", "30s", None]
        assert [status.settings["backlog"] for status in found] == ["6", "5", "5"]
        assert [status.off for status in found] == [{}, {}, {}]


def test_what_the_kernel_lacks_is_one_line_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    addresses = Address("127.0.0.1", 0), Address("127.0.0.2", 0)
    nowhere = NetworkSettings()
    listeners = Listeners(ListenConfig(tcp=addresses, congestion="no_such", at={"10.0.0.1:80": nowhere}))
    with contextlib.closing(listeners):
        first, second = listeners.names
        reason = "this kernel has no 'no_such'; where it is a module, `modprobe tcp_no_such` loads it"
        assert caplog.messages == [
            f"cannot set 'congestion' on {first}, {second}: {reason}, ignoring",
            'cannot use [listen.at."10.0.0.1:80"]: nothing listens there, ignoring',
        ]
        assert listeners.settings()[0].off == {"congestion": reason}


def test_names_of_sockets(tmp_path: Path) -> None:
    with listen_tcp(Address("127.0.0.1", 0)) as tcp, listen_unix(str(tmp_path / "s"), 0o600) as unix:
        assert name_of(tcp) == f"127.0.0.1:{tcp.getsockname()[1]}"
        assert name_of(unix) == f"unix:{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0seedance-test-{os.getpid()}")
        assert name_of(abstract) == f"unix:@seedance-test-{os.getpid()}"


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
