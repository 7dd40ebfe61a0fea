"""The fork server and its adapter without vLLM: what a forked process does is to sleep.

`python -m support.vllm_zygote adapter` starts a fork server and obeys its standard input: a line "stop" is passed on as
Stop, "kill 1" as Kill, "launch 1" as Launch, and what the fork server says then is printed as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from seedance.engine import vllm_control as control
from seedance.engine.vllm_zygote import Zygote

SETTINGS = control.VllmSettings(model="m", name="m", run_dir="/")


def sleep(_: socket.socket, __: control.Launch) -> int:
    """Be an EngineCore that no test waits for."""
    time.sleep(600)
    return 0


def be_zygote(control_fd: int, adapter_pid: int) -> None:
    """Serve as `vllm_zygote` does, less the import; what is forked ignores SIGTERM from its first moment."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Zygote(socket.socket(fileno=control_fd), adapter_pid, sleep, stop_grace_s=0.1).serve()


def be_adapter() -> None:
    """Drive one fork server by lines of standard input, and report what it says."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "support.vllm_zygote", "zygote", str(theirs.fileno()), str(os.getpid())]
    with theirs:
        zygote = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    decode = msgspec.json.Decoder(control.ToAdapter).decode
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        message: control.ToZygote = control.Stop()
        if word == "launch":
            message = control.Launch(int(number), SETTINGS, "ipc://in", "ipc://out")
        elif word == "kill":
            message = control.Kill(int(number))
        ours.send(msgspec.json.encode(message))
        news = decode(ours.recv(control.MAX_CONTROL_BYTES))
        said = {"zygote": zygote.pid, type(news).__name__: getattr(news, "pid", None)}
        sys.stdout.write(json.dumps(said | {"status": getattr(news, "status", None)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "zygote":
        be_zygote(int(sys.argv[2]), int(sys.argv[3]))
    else:
        be_adapter()
