"""A child process that talks to itself over TCP, with sockets of tenants, and tells what the kernel says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from support import observed

from seedance.bpf.abi import MARK_BASE

_EXCHANGE: Final = """
import json, socket, struct, sys, time

rounds, bulk_bytes, loss, rate = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]

def info(connection):
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    # struct tcp_info (linux/tcp.h): tcpi_rtt, tcpi_total_retrans, tcpi_min_rtt, tcpi_segs_in
    return {"rtt_us": struct.unpack_from("I", raw, 68)[0], "retransmits": struct.unpack_from("I", raw, 100)[0],
            "min_rtt_us": struct.unpack_from("I", raw, 148)[0], "segments": struct.unpack_from("I", raw, 140)[0]}

def receive(connection, size):
    while size:
        size -= len(connection.recv(min(size, 1 << 16)) or exit("the connection broke off"))

def lose(connection, share):
    # Classic BPF: load a random number, drop the segment if it is below the share.
    import ctypes
    limit = int(share * 0xFFFFFFFF)
    code = [(0x20, 0, 0, 0xFFFFF000 + 56), (0x35, 0, 1, limit), (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(text))
    connection.setsockopt(socket.SOL_SOCKET, 26, program)

def shape(rate):
    # A network namespace of our own, whose loopback device has a token bucket that lets whole packets of 64 KiB pass.
    import ctypes, subprocess
    CLONE_NEWNET = 0x40000000
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "1s"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *bucket], check=True)

if rate:
    shape(rate)
answers = []
began = time.monotonic()
with socket.create_server(("127.0.0.1", 0)) as listener:
    for mark in map(int, sys.argv[5:]):
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
            if mark:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            if loss:
                lose(client, loss)
            for _ in range(rounds):
                server.sendall(b"token")
                receive(client, 5)
                client.sendall(b"!")
                receive(server, 1)
            server.setblocking(False)
            left = bulk_bytes
            while left:
                try:
                    sent = server.send(bytes(min(left, 1 << 15)))
                except BlockingIOError:
                    sent = 0
                receive(client, sent)
                left -= sent
            answers.append(info(server))
print(json.dumps({"connections": answers, "wall_us": (time.monotonic() - began) * 1e6}))
"""


def mark_of(index: int) -> str:
    """Return a tenant's mark as `exchange` takes it."""
    return str(MARK_BASE | index)


def exchange(
    cgroup: Path, *marks: str, rounds: int = 0, bulk_bytes: int = 0, loss: float = 0.0, rate: str = ""
) -> dict[str, Any]:
    """Let a process in a cgroup have a connection for each mark (0: none), one after the other.

    On each, the server sends so many tokens, each answered before the next, then so many bytes at once, of whose
    segments so large a share is lost. With a `rate`, as tc writes it, all that happens on a loopback device of its own
    that has this rate. Returns `connections`, what TCP_INFO says of the server's ends, and `wall_us`.
    """
    arguments = (str(rounds), str(bulk_bytes), str(loss), rate, *marks)
    answer: dict[str, Any] = observed.run_child(cgroup, _EXCHANGE, *arguments)
    return answer
