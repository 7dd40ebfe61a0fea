"""Sockets of the service manager's, as a process finds them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seedance.daemon import shared_log
from seedance.daemon.activation import take
from seedance.daemon.config import Address, ListenConfig
from seedance.daemon.network_settings import NetworkSettings
from seedance.daemon.sockets import Listeners
from seedance.errors import ConfigError

FIRST = 300
"""Well above what is open: the tests put descriptors where a manager puts them from 3 on."""


def environment(count: int, names: str = "", pid: int | None = None) -> dict[str, str]:
    pid = os.getpid() if pid is None else pid
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names, "HOME": "/"}


def listener() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.settimeout(5)
    return sock


def datagram() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


@contextlib.contextmanager
def handed(*sockets: socket.socket | int) -> Iterator[None]:
    """Put copies where a manager would; afterwards none is open any more."""
    for position, sock in enumerate(sockets):
        fd = sock if isinstance(sock, int) else sock.detach()
        os.dup2(fd, FIRST + position, inheritable=True)
        os.close(fd)
    yield
    for position in range(len(sockets)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(FIRST + position)


def test_listening_sockets_are_taken_once_and_for_this_process_alone() -> None:
    environ = environment(2, "http:http")
    with handed(listener(), listener()):
        sockets, logs = take(environ, FIRST)
        assert logs == {}
        assert environ == {"HOME": "/"}
        assert [sock.fileno() for sock in sockets] == [FIRST, FIRST + 1]
        assert not any(os.get_inheritable(sock.fileno()) or sock.getblocking() for sock in sockets)
        assert take(environ, FIRST) == ([], {})
        with socket.create_connection(sockets[1].getsockname()):
            sockets[1].setblocking(True)
            sockets[1].accept()[0].close()
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize(
    "environ",
    [{}, environment(1, pid=1), environment(0), environment(1) | {"LISTEN_FDS": "x"}, environment(1, pid=0)],
)
def test_what_is_for_another_process_is_left_alone(environ: dict[str, str]) -> None:
    assert take(environ, FIRST) == ([], {})
    assert "LISTEN_FDS" not in environ


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (datagram, "it is no stream socket"),
        (socket.socket, "it does not listen"),
        (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), "it is no stream socket"),
    ],
)
def test_one_that_cannot_serve_is_the_units_fault(make: Callable[[], socket.socket], why: str) -> None:
    with handed(listener(), make()):
        with pytest.raises(ConfigError) as raised:
            take(environment(2, "http:quic.socket"), FIRST)
        assert str(raised.value) == (
            f"cannot use 'quic.socket': cannot serve on descriptor {FIRST + 1}: {why}; use ListenStream= with Accept=no"
        )


def test_no_socket_at_all() -> None:
    fd = os.open("/", os.O_RDONLY)
    os.dup2(fd, FIRST)
    os.close(fd)
    with pytest.raises(ConfigError, match="'seedanced.socket': .* it is no socket"):
        take(environment(1), FIRST)
    with pytest.raises(ConfigError, match="was announced: Bad file descriptor"):
        take(environment(1), FIRST)


def test_what_was_stored_comes_back_by_its_name() -> None:
    with handed(listener(), shared_log.create("test")):
        sockets, logs = take(environment(2, "http:sessions-acme.co"), FIRST)
        assert [sock.fileno() for sock in sockets] == [FIRST]
        assert logs == {"acme.co": FIRST + 1}
        assert not os.get_inheritable(FIRST + 1)
        assert os.fstat(FIRST + 1).st_size == shared_log.LOG_BYTES
        sockets[0].close()
        os.close(FIRST + 1)


def test_a_socket_that_cannot_serve_takes_what_was_stored_with_it() -> None:
    with handed(shared_log.create("test"), datagram()), pytest.raises(ConfigError, match="no stream socket"):
        take(environment(2, "sessions-acme:http"), FIRST)


def test_they_stand_in_the_place_of_the_configured_ones(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    unix.listen()
    tcp = listener()
    name = str(Address(*tcp.getsockname()))
    config = ListenConfig(
        tcp=(Address("127.0.0.1", 1),),
        unix=str(tmp_path / "other"),
        congestion="reno",
        at={name: NetworkSettings(congestion="reno", send_buffer_bytes=128 << 10, backlog=9)},
    )
    with handed(tcp, unix):
        listeners = Listeners(config, take(environment(2), FIRST).sockets)
        assert listeners.names == [name, f"unix:{path}"]
        first, second = listeners.settings()
        assert (first.settings["send_buffer"], first.settings["keepalive"]) == ("128KiB", "30s")
        assert (first.settings["backlog"], first.off) == ("9", {})
        assert second.settings.keys() == {"backlog"}
        listeners.close()
    assert path.exists()  # the manager goes on listening there


def test_the_place_is_the_third_descriptor_of_a_fresh_process() -> None:
    code = "from seedance.daemon.activation import take; print([s.getsockname()[1] for s in take().sockets])"
    with listener() as sock:
        port = sock.getsockname()[1]
        # The shell's pid is the one of what it becomes, as it is between systemd's fork and its exec.
        command = 'exec 3<&"$1"; LISTEN_PID=$$ LISTEN_FDS=1 exec "$2" -c "$3"'
        done = subprocess.run(
            ["bash", "-c", command, "-", str(sock.fileno()), sys.executable, code],
            pass_fds=[sock.fileno()],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    assert done.stdout.strip() == f"[{port}]"
