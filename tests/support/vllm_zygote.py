"""The fork server and its adapters without vLLM: what a forked process does is to sleep.

`python -m support.vllm_zygote first ADDRESS IDENTITY` starts a fork server that the next adapter finds at the address,
and obeys its standard input: a line "stop" is passed on as Stop, "kill 1" as Kill, "launch 1" as Launch, and what the
fork server says then is printed as JSON. "serving 1" is passed on as Serving, "reloading 1" as Reloading, and nobody
answers those. With `next` in the place of `first` it takes over the fork server that is there, and prints what that
says of itself first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec

from seedance.engine import vllm_control as control
from seedance.engine.request import ModelInfo
from seedance.engine.vllm_sampling import ModelFacts
from seedance.engine.vllm_zygote import Zygote

SETTINGS = control.VllmSettings(model="m", name="m", run_dir="/")
MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=9, vocab_size=9, eos_token_ids=(), created=0, engine="vllm", tokens="t"
)
FACTS = ModelFacts(
    max_model_len=9, vocab_size=9, max_logprobs=1, eos_token_id=None, generation_eos_ids=(), structured_backend=None
)
ORPHAN_S = 5.0


def sleep(_: socket.socket, __: control.Launch) -> int:
    """Be an EngineCore that no test waits for."""
    time.sleep(600)
    return 0


def be_zygote(identity: str, control_fd: int, listen_fd: int, adapter_pid: int, keeper_pid: int) -> None:
    """Serve as `vllm_zygote` does, less the import; what is forked ignores SIGTERM from its first moment."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.socket(fileno=listen_fd)
    listener.listen()
    ours = socket.socket(fileno=control_fd)
    Zygote(
        ours,
        adapter_pid,
        sleep,
        listener=listener,
        identity=identity,
        keeper_pid=keeper_pid,
        stop_grace_s=0.1,
        orphan_s=ORPHAN_S,
    ).serve()


def say(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def begin(address: str, identity: str) -> tuple[socket.socket, int]:
    """Start a fork server; returns the link to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, listener:
        listener.bind(address)
        fds = [theirs.fileno(), listener.fileno()]
        words = [identity, *map(str, fds), str(os.getpid()), str(os.getppid())]
        command = [sys.executable, "-m", "support.vllm_zygote", "zygote", *words]
        zygote = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.DEVNULL)
    return ours, zygote.pid


def take_over(address: str, _: str) -> tuple[socket.socket, int]:
    """Connect to the fork server that is there; returns the link to it, and prints what it says."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, control.CREDENTIALS.size)
    data = connection.recv(control.MAX_CONTROL_BYTES)
    if not data:
        say(left=None)
        sys.exit(1)
    say(left=json.loads(data))
    return connection, control.CREDENTIALS.unpack(credentials)[0]


def be_adapter(ours: socket.socket, zygote: int) -> None:
    """Drive a fork server by lines of standard input, and report what it says."""
    decode = msgspec.json.Decoder(control.ToAdapter).decode
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        message: control.ToZygote = control.Stop()
        if word == "launch":
            message = control.Launch(int(number), SETTINGS, "ipc://in", "ipc://out")
        elif word == "kill":
            message = control.Kill(int(number))
        elif word == "serving":
            message = control.Serving(int(number), MODEL, FACTS, "figures", SETTINGS)
        elif word == "reloading":
            message = control.Reloading(int(number))
        ours.send(msgspec.json.encode(message))
        if word in ("serving", "reloading"):
            say(zygote=zygote)
            continue
        news = decode(ours.recv(control.MAX_CONTROL_BYTES))
        pid, status = getattr(news, "pid", None), getattr(news, "status", None)
        say(zygote=zygote, status=status, **{type(news).__name__: pid})


if __name__ == "__main__":
    if sys.argv[1] == "zygote":
        be_zygote(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        be_adapter(*(begin if sys.argv[1] == "first" else take_over)(*sys.argv[2:]))
