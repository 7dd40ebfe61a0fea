"""Network settings on real listeners, as their connections have them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from seedance.daemon import network
from seedance.daemon.config import Address
from seedance.daemon.network import apply, in_force
from seedance.daemon.network_settings import NetworkSettings
from seedance.daemon.sockets import listen_tcp

# What every kernel has, so that the tests do not depend on modules.
PLAIN = NetworkSettings(congestion="reno")
WORDS = {
    "congestion": "reno",
    "nodelay": "true",
    "busy_poll": "0us",
    "notsent_lowat": "16KiB",
    "send_buffer": "64KiB",
    "receive_buffer": "auto",
    "keepalive": "30s",
    "user_timeout": "60s",
    "backlog": "4096",
}


@contextlib.contextmanager
def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """A connection of a listener's, the server's end."""
    listener.setblocking(True)
    with socket.create_connection(listener.getsockname()[:2]):
        sock, _ = listener.accept()
        with sock:
            yield sock


def test_a_listener_tells_the_settings_in_the_words_of_the_file() -> None:
    backlog = min(PLAIN.backlog, network.most_backlog())
    with listen_tcp(Address("127.0.0.1", 0), PLAIN) as listener:
        assert in_force(listener) == WORDS | {"backlog": str(backlog)}


def test_a_connection_inherits_them() -> None:
    with listen_tcp(Address("127.0.0.1", 0), PLAIN) as listener, accepted(listener) as sock:
        tcp = socket.IPPROTO_TCP
        assert sock.getsockopt(tcp, socket.TCP_CONGESTION, 16).startswith(b"reno\0")
        assert sock.getsockopt(tcp, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(tcp, socket.TCP_NOTSENT_LOWAT) == 16 << 10
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * (64 << 10)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT
        assert [sock.getsockopt(tcp, option) for option in options] == [30, 10, 3, 60_000]


def test_a_stalled_client_holds_little_in_the_kernel() -> None:
    def taken(settings: NetworkSettings) -> int:
        with listen_tcp(Address("127.0.0.1", 0), settings) as listener, accepted(listener) as sock:
            sock.setblocking(False)
            total = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    total += sock.send(bytes(1000))
            return total

    auto = msgspec.structs.replace(PLAIN, notsent_lowat_bytes=0, send_buffer_bytes=0)
    assert taken(PLAIN) < taken(auto) / 4


def test_what_is_left_to_the_kernel_is_not_touched() -> None:
    settings = NetworkSettings(
        congestion="auto",
        nodelay=False,
        notsent_lowat_bytes=0,
        send_buffer_bytes=0,
        receive_buffer_bytes=0,
        keepalive_s=0,
        user_timeout_ms=0,
        backlog=7,
    )
    with socket.create_server(("127.0.0.1", 0)) as untouched:
        usual = in_force(untouched)
    with listen_tcp(Address("127.0.0.1", 0), settings) as listener:
        found = in_force(listener)
        assert found == usual | {"backlog": "7"}
        assert (found["send_buffer"], found["receive_buffer"], found["notsent_lowat"]) == ("auto", "auto", "auto")
        assert (found["nodelay"], found["keepalive"], found["user_timeout"]) == ("false", "0s", "0s")


def test_other_values_are_told_too() -> None:
    settings = NetworkSettings(
        congestion="reno", send_buffer_bytes=5000, receive_buffer_bytes=100 << 10, keepalive_s=9, user_timeout_ms=1500
    )
    with listen_tcp(Address("127.0.0.1", 0), settings) as listener:
        found = in_force(listener)
        assert (found["send_buffer"], found["receive_buffer"]) == ("5000B", "100KiB")
        assert (found["keepalive"], found["user_timeout"]) == ("9s", "1.5s")


def test_what_the_kernel_lacks_is_told_and_the_rest_is_set() -> None:
    settings = msgspec.structs.replace(PLAIN, congestion="no_such", send_buffer_bytes=1 << 30)
    with socket.socket() as sock:
        off = apply(sock, settings)
        assert off.keys() == {"congestion", "send_buffer"}
        assert (
            off["congestion"] == "this kernel has no 'no_such'; where it is a module, `modprobe tcp_no_such` loads it"
        )
        assert off["send_buffer"].startswith("net.core.wmem_max allows ")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_busy_polling_is_set_where_the_kernel_has_it() -> None:
    with listen_tcp(Address("127.0.0.1", 0), msgspec.structs.replace(PLAIN, busy_poll_us=50)) as listener:
        off = apply(listener, msgspec.structs.replace(PLAIN, busy_poll_us=50))
        assert in_force(listener)["busy_poll"] == ("0us" if off else "50us")
        assert not off or off.keys() == {"busy_poll"}


def test_a_unix_socket_has_none_of_them(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        assert in_force(sock) == {}


@pytest.mark.parametrize(("key", "value"), [("nodelay", False), ("keepalive_s", 0)])
def test_what_is_off_is_switched_off(key: str, value: object) -> None:
    """A socket of the service manager's may come with it."""
    with listen_tcp(Address("127.0.0.1", 0), PLAIN) as listener:
        assert apply(listener, msgspec.structs.replace(PLAIN, **{key: value})) == {}
        assert in_force(listener)[key.removesuffix("_s")] in ("false", "0s")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_congestion_control_that_is_not_for_everybody_says_what_it_needs() -> None:
    path = Path("/proc/sys/net/ipv4")
    available, allowed = (
        (path / f"tcp_{which}_congestion_control").read_text().split() for which in ("available", "allowed")
    )
    name = next(iter(set(available) - set(allowed)), None)
    if name is None:
        pytest.skip("all that there are are for everybody")
    code = f"""
import socket
from seedance.daemon.network import apply
from seedance.daemon.network_settings import NetworkSettings
from seedance.daemon.privileges import become, find_account
become(find_account("nobody", ""))
print(apply(socket.socket(), NetworkSettings(congestion="{name}"))["congestion"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"'{name}' needs CAP_NET_ADMIN, or a place in net.ipv4.tcp_allowed_congestion_control\n"
