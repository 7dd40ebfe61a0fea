"""The OpenAI servers of the comparisons: how each is started, asked, accounted for, and ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from bench.processes import STOP_S, BenchError, command_line, descendants, end, process_name
from bench.report import say
from bench.vllm_rust import engine_version, needs_metadata, vllm_rust, write_metadata
from seedance.daemon.keys import hash_key, new_key

MODEL: Final = "bench"
START_S: Final = 240.0
PATH: Final = "/v1/completions"

# All engines get these.
MAX_MODEL_LEN: Final = 2048
MAX_STREAMS: Final = 256
KV_BYTES: Final = 1 << 30
PYTHON: Final = (sys.executable, "-W", "ignore::DeprecationWarning")
UNIPROC: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def role(pid: int) -> str:
    """Return a process's name; of an unnamed Python, the module that it runs."""
    name = process_name(pid)
    module = re.search(r" -m (\S+)", command_line(pid))
    return module[1] if module and name.startswith("python") else name


class ServerProcess:
    """A server as a family of processes, on `cores`; what differs between servers is in the subclasses."""

    NAME: ClassVar[str]

    def __init__(self, model_dir: Path, build: Path, cores: Sequence[int]) -> None:
        self.name = self.NAME
        self._model_dir = model_dir
        self._cores = cores
        self._log = build / f"{self.NAME}.log"
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="seedance-bench-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._port}"

    def command(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return how to start the server, with what in the environment; `folder` is its own."""
        raise NotImplementedError

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """Return headers that every request of a tenant needs; a server may know no tenants."""
        return {}

    def is_engine(self, pid: int) -> bool:
        """Say whether a process computes tokens, and is thus not counted, nor are its descendants."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server and wait until it serves. Raises BenchError when it does not."""
        argv, extra = self.command(Path(self._folder.name))
        argv = ["taskset", "--cpu-list", ",".join(map(str, self._cores)), *argv]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, env={**os.environ, **extra}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline_s = time.monotonic() + START_S
        # A health check may pass while the engine is still starting: only an answer says that it serves.
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise BenchError(f"cannot go on: {self.name} does not serve; see '{self._log}'")
            time.sleep(0.5)
        say(f"{self.name} serves")

    def ask(self, body: Mapping[str, Any], tenant: int = 0) -> Any:
        """Return the server's JSON answer to a request. Raises BenchError on an error."""
        status, text = self._post(body, tenant)
        if status != http.HTTPStatus.OK:
            raise BenchError(f"cannot go on: {self.name} answered {status} {text[:500]}")
        return json.loads(text)

    def request(self, body: Mapping[str, Any]) -> bytes:
        """Return a request as it goes on the wire."""
        data = json.dumps(body).encode()
        fields = {"Host": "localhost", "Content-Type": "application/json", **self.headers()}
        fields["Content-Length"] = str(len(data))
        lines = [f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + data

    def front_pids(self) -> dict[int, str]:
        """Return the processes that are counted, with their names."""
        assert self._process is not None
        found = {}
        left_out: set[int] = set()
        for pid in descendants(self._process.pid):
            if pid in left_out:
                continue
            if self.is_engine(pid):
                left_out.update(descendants(pid))
            else:
                found[pid] = role(pid)
        return found

    def move_front(self, cores: Sequence[int]) -> None:
        """Have everything that is counted, and what it starts from now on, run on these processors."""
        for pid in self.front_pids():
            with contextlib.suppress(OSError):  # it, or a thread of it, has just ended
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), cores)

    def stop(self) -> None:
        """End the server and whatever of its family is left; idempotent."""
        if self._process is None:
            return
        family = descendants(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in family[1:]:
            end(pid)
        self._process = None
        self._folder.cleanup()

    def _serves(self) -> bool:
        try:
            return self._post({"model": MODEL, "prompt": "x", "max_tokens": 1})[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def _post(self, body: Mapping[str, Any], tenant: int = 0) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            fields = {"Content-Type": "application/json", **self.headers(tenant)}
            connection.request("POST", PATH, json.dumps(body), fields)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


class Seedanced(ServerProcess):
    """The whole daemon, with so many tenants."""

    NAME = "seedance"

    def __init__(self, model_dir: Path, build: Path, cores: Sequence[int], tenants: int = 1) -> None:
        super().__init__(model_dir, build, cores)
        self._keys = [new_key() for _ in range(tenants)]

    def command(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Write the configuration and return `seedanced` with it."""
        (folder / "tenants.d").mkdir()
        for number, key in enumerate(self._keys):
            (folder / "tenants.d" / f"bench{number}.toml").write_text(
                f'keys = ["{hash_key(key)}"]\n[tokens]\nstreams = 4096\n[requests]\nqueue = 4096\n'
            )
        config = folder / "seedanced.toml"
        config.write_text(
            f'[listen]\ntcp = ["{self.target}"]\n'
            f'[paths]\nstate = "{folder}/state"\nrun = "{folder}/run"\n'
            f'[engine]\nkind = "vllm"\nmodel = "{self._model_dir}"\nname = "{MODEL}"\nkv = "{KV_BYTES >> 20}MiB"\n'
            f"max_model_len = {MAX_MODEL_LEN}\nmax_streams = {MAX_STREAMS}\nthreads = 1\nenforce_eager = true\n"
        )
        return [sys.executable, "-m", "seedance.daemon", "--config", str(config), "--log-level", "warning"], {}

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """Return the tenant's key."""
        return {"Authorization": f"Bearer {self._keys[tenant]}"}

    def is_engine(self, pid: int) -> bool:
        """Say whether this is the fork server of the engine cores, or one of them."""
        return "seedance.engine.vllm_zygote" in command_line(pid) or process_name(pid).startswith("VLLM::")


class VllmServer(ServerProcess):
    """vLLM's own OpenAI server, its Python front end, without request logs and statistics."""

    NAME = "vllm-python"

    def command(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the server's module: the `vllm` command needs the metadata of a package that may be absent."""
        argv = [*PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model_dir)]
        argv += [*self._arguments(), "--uvicorn-log-level", "error", "--disable-uvicorn-access-log"]
        return argv, self._environment(folder)

    def is_engine(self, pid: int) -> bool:
        """Say whether this is an engine core or a worker of one: both name themselves."""
        return process_name(pid).startswith("VLLM::")

    def _arguments(self) -> list[str]:
        argv = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self._port)]
        argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_STREAMS)]
        argv += ["--kv-cache-memory-bytes", str(KV_BYTES), "--enforce-eager", "--disable-log-stats"]
        return [*argv, "--distributed-executor-backend", UNIPROC]

    def _environment(self, folder: Path) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "TMPDIR": str(folder),
        }


class VllmRustServer(VllmServer):
    """vLLM's own OpenAI server with its Rust front end: the same engine, the same settings."""

    NAME = "vllm-rust"

    def command(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return `vllm serve` with the front end's program, which only that command starts."""
        environment = self._environment(folder)
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(vllm_rust())}
        if needs_metadata():
            write_metadata(folder / "metadata", engine_version())
            paths = [str(folder / "metadata"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        argv = [*PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(self._model_dir), *self._arguments()]
        return argv, environment


PEERS: Final[tuple[type[ServerProcess], ...]] = (VllmServer, VllmRustServer)
SERVERS: Final[tuple[type[ServerProcess], ...]] = (Seedanced, *PEERS)
