"""The service's own file, `seedanced.toml`, as typed settings in base units.

`parse` is pure; `load` reads a file. Whatever is wrong becomes a ConfigError that names the file, the
key and what would be right. Relative paths are relative to the folder of the file.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from seedance.daemon import network_settings
from seedance.daemon.config_values import (
    at_least,
    read_connections,
    read_devices,
    read_duration,
    read_folder,
    read_horizon,
    read_part,
    read_probability,
    read_rate,
    read_tables,
)
from seedance.daemon.network_settings import NetworkSettings
from seedance.engine.settings import EngineSettings
from seedance.errors import ConfigError
from seedance.qos import quota, units
from seedance.qos.quota import BUILT_IN_CLASSES, SchedulingClass
from seedance.qos.settings import KernelSettings
from seedance.qos.toml import (
    Field,
    Schema,
    above_zero,
    flag,
    loads,
    one_of,
    or_unlimited,
    read_table,
    read_value,
    text,
    whole,
)

DEFAULT_PATH: Final = "/etc/seedance/seedanced.toml"

# sockaddr_un holds 108 bytes with the closing zero.
_UNIX_PATH_BYTES: Final = 107
_MAX_PORT: Final = 65_535
_ENDPOINT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):(\d{1,5})", re.ASCII)


class Address(msgspec.Struct, frozen=True):
    """A TCP address: a numeric IPv4 or IPv6 host without brackets, and a port; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ListenConfig(NetworkSettings, frozen=True, kw_only=True):
    """`[listen]`: where clients connect, and the network settings there, which `NetworkSettings` describes.

    tcp   list of "host:port" with numeric hosts, IPv6 in brackets; port 0 is any free one. [] for none.
    unix  path of a Unix stream socket; none without it.
    at    `[listen.at."ADDRESS"]` holds network settings that are others at that address.

    Sockets that the service manager has opened (systemd's socket activation) stand in the place of `tcp` and `unix`.
    """

    tcp: tuple[Address, ...] = (Address("127.0.0.1", 8000), Address("::1", 8000))
    unix: str | None = None
    at: Mapping[str, NetworkSettings] = {}

    def settings_at(self, address: str) -> NetworkSettings:
        """Return the network settings at an address of the form "host:port"."""
        return self.at.get(address, self)


class PathsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[paths]`: where files are.

    state    kept across reboots: session logs, usage, converted models.
    run      sockets and other files of the running service.
    tenants  folder of the tenant files; `tenants.d` beside the configuration file without it.
    """

    state: str = "/var/lib/seedance"
    run: str = "/run/seedance"
    tenants: str = ""


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[daemon]`: who the processes are.

    user   whom every process but the supervisor becomes, where the supervisor is root; they stay what they are without
           it.
    group  whose members may use the control socket; root alone without it.
    drain  at a stop, so long streams may go on to their end, before they are ended, or wait for the next start.
    """

    user: str = ""
    group: str = ""
    drain_s: float = 1.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[worker]`: the processes that serve one tenant each.

    idle_timeout  a worker without connections ends after this.
    io            "io_uring", "epoll", or "auto": io_uring where it works.
    max_head      bytes of an HTTP request's line and headers.
    max_body      bytes of an HTTP request's body.
    max_message   bytes of a WebSocket message, all fragments together.
    max_backlog   bytes kept for a client that reads too slowly, before it is cut off.
    """

    idle_timeout_s: float = 300.0
    io: str = "auto"
    max_head_bytes: int = 32 << 10
    max_body_bytes: int = 8 << 20
    max_message_bytes: int = 8 << 20
    max_backlog_bytes: int = 1 << 20


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[http]`: patience with clients.

    head_timeout   from a request's first byte to the end of its headers.
    body_timeout   from there to the end of its body.
    idle_timeout   between two requests of a connection.
    ping_interval  an SSE or WebSocket connection is never silent for longer.
    """

    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    ping_interval_s: float = 15.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file; `path` is where it came from. `[kernel]` is described at `KernelSettings`.

    `[engine]`: what computes the tokens. `engine.run_dir` is left to who starts it.

    kind           "vllm" (GPU or CPU build, whichever is installed) or "synthetic".
    model          hub name, or path when it begins with "/", "./" or "../"; needed with "vllm".
    name           name under which clients ask for the model; the last part of `model` without it.
    kv             memory for the KV cache, reserved at start; without it 1 GiB on a CPU, and what the model leaves
                   of a GPU's memory.
    max_model_len  most prompt and output tokens of one stream; the model's own without it.
    max_streams    streams computed at once (vLLM's max_num_seqs).
    queue          requests of all tenants that may wait for their first token; no bound without it. Of a full queue
                   each tenant that waits may have an equal part.
    step_target    how long a step that reads prompts may take while several tenants are there; 30ms without it. A
                   request waits for the step that runs when it comes; prompts are read slower in shorter steps.
    trace          records who asked when for how much, but not what, in `engine/trace.jsonl` below `paths.state`, for
                   `seedancectl simulate`; this many bytes at most. Not without it.
    threads        CPU threads for computing; all processors but one without it. A GPU does not use them.
    enforce_eager  true skips CUDA graphs and compilation: a quicker start, slower steps. The default on a CPU.
    dtype          "auto", "bfloat16", "float16" or "float32".
    load           where the model of `seedancectl model load` comes up: in an engine "beside" the one that runs, or
                   "instead" of its model, while requests wait: in the same engine if only weights differ. "auto" is
                   beside it where there is memory for both.

    `[engine.failover]`: what becomes of streams when the engine dies. They wait while it is started again, and so do
    new requests; no token is lost, and none comes twice.

    standby   true keeps a second engine up, warm and idle: streams go on at once, and the memory is needed twice.
    attempts  starts in a row that may fail before what waits is ended; 3 without it.
    cpu       an interpreter in whose environment vLLM's CPU build is: when so many starts have failed, an engine on the
              processor goes on, slowly, until the other one can be started.
    cpu_kv    memory for its KV cache; 1 GiB without it.
    gpu_memory
              part of the GPU's memory in use, by whomever, from which on new requests wait; after 5 s the engine gives
              back what it does not use, after 15 s its streams move to the next engine. More than the engine reserves.
              Nothing is done without it.

    `[engine.gpu]`: the part of a GPU that the engine may have, where others share it.

    device   index, UUID of a GPU, or UUID of a MIG instance; the first GPU without it.
    threads  part of its execution resources, as a percentage. Kept by MPS.
    memory   of its memory; write `kv` too, so that model and cache fit into it. Kept by MPS.
    mps_directory
             where MPS's control daemon listens (its CUDA_MPS_PIPE_DIRECTORY); "/run/nvidia-mps" without it. With
             `threads` or `memory` the engine does not start while none does. The service has a /tmp of its own, so
             MPS's own default is of no use there.

    `[engine.synthetic]`: the engine that has no model; see `SyntheticSettings`.

    seed                 of the tokens; the same seed and prompt give the same ones.
    tokens_per_s         output of each stream; 0 for as fast as it goes.
    prompt_tokens_per_s  prompt tokens read by the whole engine; 0 for at once.
    step                 longest common step of the streams, whose tokens then come several at a time.
    eos_probability      chance of an end at each token, as a percentage.
    kv_blocks            blocks of 16 tokens.
    die_after_steps      rehearses an engine's death; 0 for never.
    tokenizer            a model's directory: prompts are read by its tokenizer, and tokens say what they do there.

    `[classes.NAME]`: scheduling classes that tenant files name; `classes` holds the built-in ones too.

    weight  against the other classes: of a contended step, twice the weight gets twice the time.
    priority
            0 to 3; where all of `engine.max_streams` run, a request takes the place of one of lower priority, which
            goes on later. 0 without it.
    cpu, memory, network, gpu, tokens, requests, session
            tables as in a tenant file, for what such a file leaves out.
    """

    path: str
    listen: ListenConfig = ListenConfig()
    paths: PathsConfig
    engine: EngineSettings
    daemon: DaemonConfig = DaemonConfig()
    kernel: KernelSettings = KernelSettings()
    worker: WorkerConfig = WorkerConfig()
    http: HttpConfig = HttpConfig()
    classes: Mapping[str, SchedulingClass]


def read_address(value: object) -> Address:
    """Read "host:port" with a numeric host; raises ValueError."""
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    host = (match[1] or match[2]) if match else ""
    port = int(match[3]) if match else 0
    if match is None or port > _MAX_PORT or not _is_host(host, 6 if match[1] else 4):
        raise ValueError(
            f'cannot read {units.shown(value)} as an address; write e.g. "127.0.0.1:8000", "[::1]:8000" or'
            ' "0.0.0.0:8000" for every IPv4 address'
        )
    return Address(host, port)


def _is_host(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _read_addresses(value: object) -> tuple[Address, ...]:
    if not isinstance(value, list):
        raise ValueError('cannot take anything but a list of addresses; write e.g. ["127.0.0.1:8000"]')
    addresses = tuple(read_address(entry) for entry in value)
    fixed = [address for address in addresses if address.port]
    if len(set(fixed)) < len(fixed):
        raise ValueError("cannot listen twice on one address; remove one of them")
    return addresses


SCHEMA: Final[Schema] = {
    "listen": {
        "tcp": Field("tcp", _read_addresses),
        "unix": Field("unix", text),
        **network_settings.SCHEMA,
        "at": Field("at", read_tables),
    },
    "paths": {"state": Field("state", text), "run": Field("run", text), "tenants": Field("tenants", text)},
    "engine": {
        "kind": Field("kind", one_of(["vllm", "synthetic"])),
        "model": Field("model", text),
        "name": Field("name", text),
        "kv": Field("kv_bytes", above_zero(units.parse_size)),
        "max_model_len": Field("max_model_len", whole(2, 1 << 30)),
        "max_streams": Field("max_streams", whole(1, 65_536)),
        "queue": Field("queue", whole(1, 65_536)),
        "step_target": Field("step_target_s", read_duration),
        "trace": Field("trace_bytes", at_least(64 << 10, units.parse_size, "64MiB")),
        "threads": Field("threads", whole(1, 4096)),
        "enforce_eager": Field("enforce_eager", flag),
        "dtype": Field("dtype", one_of(["auto", "bfloat16", "float16", "float32"])),
        "load": Field("load", one_of(["auto", "beside", "instead"])),
        "failover": {
            "standby": Field("standby", flag),
            "attempts": Field("attempts", whole(1, 1_000)),
            "cpu": Field("cpu_python", read_folder),
            "cpu_kv": Field("cpu_kv_bytes", above_zero(units.parse_size)),
            "gpu_memory": Field("gpu_memory", read_part),
        },
        "gpu": {
            "device": Field("device", text),
            "threads": Field("threads", read_part),
            "memory": Field("memory_bytes", at_least(1 << 20, units.parse_size, "20GiB")),
            "mps_directory": Field("mps_directory", read_folder),
        },
        "synthetic": {
            "seed": Field("seed", whole(0, (1 << 63) - 1)),
            "tokens_per_s": Field("tokens_per_s", read_rate),
            "prompt_tokens_per_s": Field("prompt_tokens_per_s", read_rate),
            "step": Field("step_s", units.parse_duration),
            "eos_probability": Field("eos_probability", read_probability),
            "kv_blocks": Field("kv_blocks", whole(1, 1 << 31)),
            "die_after_steps": Field("die_after_steps", whole(0, 1 << 31)),
            "tokenizer": Field("tokenizer_dir", read_folder),
        },
    },
    "daemon": {
        "user": Field("user", text),
        "group": Field("group", text),
        "drain": Field("drain_s", units.parse_duration),
    },
    "kernel": {
        "limits": Field("limits", one_of(["required", "best_effort", "off"])),
        "name": Field("name", quota.read_name),
        "cgroup": Field("cgroup", read_folder),
        "bpffs": Field("bpffs", read_folder),
        "devices": Field("devices", read_devices),
        "horizon": Field("horizon_s", read_horizon),
        "connections": Field("connections_per_s", or_unlimited(read_connections)),
        "connections_burst": Field("connections_burst", whole(1, 1_000_000)),
        "cuda_library": Field("cuda_library", read_folder),
        "observe": Field("observe", flag),
    },
    "worker": {
        "idle_timeout": Field("idle_timeout_s", read_duration),
        "io": Field("io", one_of(["auto", "io_uring", "epoll"])),
        "max_head": Field("max_head_bytes", at_least(1024, units.parse_size, "32KiB")),
        "max_body": Field("max_body_bytes", at_least(1024, units.parse_size, "8MiB")),
        "max_message": Field("max_message_bytes", at_least(1024, units.parse_size, "8MiB")),
        "max_backlog": Field("max_backlog_bytes", at_least(1024, units.parse_size, "1MiB")),
    },
    "http": {
        "head_timeout": Field("head_timeout_s", read_duration),
        "body_timeout": Field("body_timeout_s", read_duration),
        "idle_timeout": Field("idle_timeout_s", read_duration),
        "ping_interval": Field("ping_interval_s", read_duration),
    },
    "classes": Field("classes", read_tables),
}


def parse(source: str, path: str) -> Config:
    """Return the settings in a configuration file's text; `path` is absolute. Raises ConfigError."""
    raw = read_table(loads(source, path), SCHEMA, path)
    folder = os.path.dirname(path)
    raw["path"] = path
    raw["paths"] = _paths(raw.get("paths", {}), folder)
    raw["listen"] = _listen(raw.get("listen", {}), folder, path)
    raw["engine"] = _engine(raw.get("engine", {}), folder, path)
    raw["classes"] = _classes(raw.get("classes", {}), path)
    config = msgspec.convert(raw, Config)
    if not config.listen.tcp and config.listen.unix is None:
        raise ConfigError(path, "listen", 'cannot serve without a place to listen; write e.g. tcp = ["127.0.0.1:8000"]')
    return config


def _paths(raw: dict[str, str], folder: str) -> dict[str, str]:
    raw = {"tenants": "tenants.d"} | raw
    return {name: os.path.normpath(os.path.join(folder, where)) for name, where in raw.items()}


def _listen(raw: dict[str, Any], folder: str, path: str) -> dict[str, Any]:
    if "unix" in raw:
        raw["unix"] = _unix_path(raw["unix"], folder, path)
    everywhere = {name: value for name, value in raw.items() if name in NetworkSettings.__struct_fields__}
    at = {}
    for address, table in raw.get("at", {}).items():
        key = f'listen.at."{address}"'
        own = read_table(table, network_settings.SCHEMA, path, key)
        at[str(read_value(address, read_address, path, key))] = everywhere | own
    return raw | {"at": at}


def _unix_path(where: str, folder: str, path: str) -> str:
    where = os.path.normpath(os.path.join(folder, where))
    if len(os.fsencode(where)) > _UNIX_PATH_BYTES:
        raise ConfigError(
            path, "listen.unix", f"cannot bind a path over {_UNIX_PATH_BYTES} bytes; choose a shorter one"
        )
    return where


def _engine(raw: dict[str, Any], folder: str, path: str) -> dict[str, Any]:
    kind = raw.get("kind", "vllm")
    model = raw.get("model", "")
    if not model and kind == "vllm":
        raise ConfigError(
            path, "engine.model", 'cannot start vllm without a model; write its name or path, or kind = "synthetic"'
        )
    if model.startswith("~"):
        raise ConfigError(path, "engine.model", "cannot tell whose home '~' is in a service; write the whole path")
    if model.startswith(("/", "./", "../")) or model in (".", ".."):
        model = os.path.normpath(os.path.join(folder, model))
    name = raw.get("name") or os.path.basename(model) or kind
    return raw | {"kind": kind, "model": model, "name": name}


def _classes(tables: dict[str, object], path: str) -> dict[str, SchedulingClass]:
    return dict(BUILT_IN_CLASSES) | {name: quota.load_class(table, name, path) for name, table in tables.items()}


def read_text(path: str) -> str:
    """Return a configuration file's text. Raises ConfigError when it is not there, not ours to read or not UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(path, "", f"cannot read byte {exc.start} as UTF-8; save the file as UTF-8") from exc
    except FileNotFoundError as exc:
        raise ConfigError(path, "", "cannot find it; create it, or name another file") from exc
    except IsADirectoryError as exc:
        raise ConfigError(path, "", "cannot read a folder; name the file in it") from exc
    except PermissionError as exc:
        raise ConfigError(path, "", "cannot read it: permission denied; let this user read it") from exc
    except OSError as exc:
        raise ConfigError(path, "", f"cannot read it: {exc.strerror}") from exc


def load(path: str) -> Config:
    """Return the settings in a configuration file. Raises ConfigError."""
    path = os.path.abspath(path)
    return parse(read_text(path), path)
