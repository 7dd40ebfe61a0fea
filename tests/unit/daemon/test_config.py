"""The service's own file."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from pathlib import Path

import msgspec
import pytest

from seedance.daemon.config import (
    SCHEMA,
    Address,
    Config,
    DaemonConfig,
    HttpConfig,
    ListenConfig,
    PathsConfig,
    WorkerConfig,
    load,
    parse,
)
from seedance.daemon.network_settings import NetworkSettings
from seedance.engine.settings import EngineSettings, FailoverSettings, SyntheticSettings
from seedance.errors import ConfigError
from seedance.qos.gpu import GpuPart
from seedance.qos.quota import BUILT_IN_CLASSES
from seedance.qos.settings import KernelSettings

PATH = "/etc/seedance/seedanced.toml"

FULL = """
[listen]
tcp = ["0.0.0.0:0", "[::]:8080"]
unix = "run/seedance.sock"
congestion = "cubic"
nodelay = false
busy_poll = "50us"
notsent_lowat = "auto"
send_buffer = "256KiB"
receive_buffer = "1MiB"
keepalive = "10s"
user_timeout = "1500ms"
backlog = 128
[listen.at."[::]:8080"]
busy_poll = 0
keepalive = 0
send_buffer = "auto"
[paths]
state = "/srv/state"
run = "run"
tenants = "../tenants"
[engine]
kind = "vllm"
model = "./models/tiny"
name = "tiny-model"
kv = "1GiB"
max_model_len = 4096
max_streams = 32
queue = 512
step_target = "20ms"
trace = "1MiB"
threads = 2
enforce_eager = true
dtype = "float32"
load = "instead"
[engine.failover]
standby = true
attempts = 5
cpu = "/opt/cpu/bin/python"
cpu_kv = "4GiB"
gpu_memory = "98%"
[engine.gpu]
device = "MIG-1"
threads = "50%"
memory = "20GiB"
mps_directory = "/run/other/"
[engine.synthetic]
seed = 7
tokens_per_s = 12.5
prompt_tokens_per_s = 0
step = "10ms"
eos_probability = "2%"
kv_blocks = 100
die_after_steps = 3
[worker]
idle_timeout = "30s"
io = "epoll"
max_head = "16KiB"
max_body = "1MiB"
max_message = "2MiB"
max_backlog = "64KiB"
[http]
head_timeout = "1s"
body_timeout = 2
idle_timeout = "3s"
ping_interval = "500ms"
[daemon]
user = "seedance"
group = "adm"
drain = "20s"
[kernel]
limits = "best_effort"
name = "other"
cgroup = "/sys/fs/cgroup/other"
bpffs = "/run/bpf/"
devices = ["eth0", "lo"]
horizon = "500ms"
connections = 2.5
connections_burst = 10
cuda_library = "/usr/lib/libcuda.so.1"
observe = false
[classes.night]
weight = 5
tokens = { streams = 2 }
[classes.gold.requests]
per_minute = 10
"""


def test_full_file() -> None:
    config = parse(FULL, PATH)
    everywhere = NetworkSettings(
        congestion="cubic",
        nodelay=False,
        busy_poll_us=50,
        notsent_lowat_bytes=0,
        send_buffer_bytes=256 << 10,
        receive_buffer_bytes=1 << 20,
        keepalive_s=10,
        user_timeout_ms=1500,
        backlog=128,
    )
    there = msgspec.structs.replace(everywhere, busy_poll_us=0, keepalive_s=0, send_buffer_bytes=0)
    assert config.listen == ListenConfig(
        tcp=(Address("0.0.0.0", 0), Address("::", 8080)),
        unix="/etc/seedance/run/seedance.sock",
        at={"[::]:8080": there},
        **msgspec.structs.asdict(everywhere),
    )
    assert config.listen.settings_at("[::]:8080") == there
    assert config.listen.settings_at("0.0.0.0:8000") == config.listen
    assert config.paths == PathsConfig(state="/srv/state", run="/etc/seedance/run", tenants="/etc/tenants")
    assert config.engine == EngineSettings(
        kind="vllm",
        model="/etc/seedance/models/tiny",
        name="tiny-model",
        kv_bytes=1 << 30,
        max_model_len=4096,
        max_streams=32,
        queue=512,
        step_target_s=0.02,
        trace_bytes=1 << 20,
        threads=2,
        enforce_eager=True,
        dtype="float32",
        load="instead",
        failover=FailoverSettings(
            standby=True, attempts=5, cpu_python="/opt/cpu/bin/python", cpu_kv_bytes=4 << 30, gpu_memory=0.98
        ),
        gpu=GpuPart(device="MIG-1", threads=0.5, memory_bytes=20 << 30, mps_directory="/run/other"),
        synthetic=SyntheticSettings(
            seed=7,
            tokens_per_s=12.5,
            prompt_tokens_per_s=0.0,
            step_s=0.01,
            eos_probability=0.02,
            kv_blocks=100,
            die_after_steps=3,
        ),
    )
    assert config.worker == WorkerConfig(
        idle_timeout_s=30.0,
        io="epoll",
        max_head_bytes=16 << 10,
        max_body_bytes=1 << 20,
        max_message_bytes=2 << 20,
        max_backlog_bytes=64 << 10,
    )
    assert config.http == HttpConfig(head_timeout_s=1.0, body_timeout_s=2.0, idle_timeout_s=3.0, ping_interval_s=0.5)
    assert config.daemon == DaemonConfig(user="seedance", group="adm", drain_s=20)
    assert config.kernel == KernelSettings(
        limits="best_effort",
        name="other",
        cgroup="/sys/fs/cgroup/other",
        bpffs="/run/bpf",
        devices=("eth0", "lo"),
        horizon_s=0.5,
        connections_per_s=2.5,
        connections_burst=10,
        cuda_library="/usr/lib/libcuda.so.1",
        observe=False,
    )
    assert config.classes.keys() == {"gold", "silver", "bronze", "night"}
    assert (config.classes["night"].weight, config.classes["night"].defaults) == (5, {"tokens": {"streams": 2}})
    assert config.classes["gold"].defaults == {"tokens": {"streams": 256}, "requests": {"per_minute": 10}}


def test_every_key_is_read_and_documented() -> None:
    given = tomllib.loads(FULL)
    documents = {
        "listen": ListenConfig,
        "paths": PathsConfig,
        "daemon": DaemonConfig,
        "kernel": KernelSettings,
        "worker": WorkerConfig,
        "http": HttpConfig,
    }
    for section, keys in SCHEMA.items():
        if section == "classes":
            continue
        assert isinstance(keys, dict)
        assert given[section].keys() == keys.keys()
        document = documents.get(section, Config).__doc__
        assert document is not None
        if section == "listen":
            document += str(NetworkSettings.__doc__)
        for key in (*keys, *keys.get("synthetic", ())):
            assert re.search(rf"(^|\.)\s*{key}\b", document, re.MULTILINE), key


def test_defaults() -> None:
    assert parse('[engine]\nkind = "synthetic"', PATH) == Config(
        path=PATH,
        listen=ListenConfig(tcp=(Address("127.0.0.1", 8000), Address("::1", 8000)), unix=None),
        paths=PathsConfig(state="/var/lib/seedance", run="/run/seedance", tenants="/etc/seedance/tenants.d"),
        engine=EngineSettings(kind="synthetic", name="synthetic"),
        worker=WorkerConfig(),
        http=HttpConfig(ping_interval_s=15.0),
        classes=BUILT_IN_CLASSES,
    )


@pytest.mark.parametrize(
    ("model", "expected", "name"),
    [
        ("google/gemma-3-270m", "google/gemma-3-270m", "gemma-3-270m"),
        ("gemma", "gemma", "gemma"),
        ("/srv/m/llama/", "/srv/m/llama", "llama"),
        ("../m", "/etc/m", "m"),
        (".", "/etc/seedance", "seedance"),
    ],
)
def test_model_names_and_paths(model: str, expected: str, name: str) -> None:
    engine = parse(f'[engine]\nmodel = "{model}"', PATH).engine
    assert (engine.kind, engine.model, engine.name) == ("vllm", expected, name)


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("", "engine.model", 'write its name or path, or kind = "synthetic"'),
        ("[engin]\nkind = 'vllm'", "engin", "did you mean 'engine'?"),
        ("[engine]\nmodle = 'x'", "engine.modle", "did you mean 'model'?"),
        ("[engine]\nkind = 'cpu'", "engine.kind", "write one of vllm, synthetic"),
        ("[engine]\nmodel = '~/m'", "engine.model", "write the whole path"),
        ("[engine]\nmodel = ''", "engine.model", "not empty"),
        ("[engine]\nkv = '1G'", "engine.kv", "unknown unit 'G'"),
        ("[engine]\nkv = 0", "engine.kv", "above zero"),
        ("[engine]\nthreads = 0", "engine.threads", "from 1"),
        ("[engine]\ndtype = 'int8'", "engine.dtype", "write one of auto"),
        ("[engine.synthetic]\ntokens_per_s = -1", "engine.synthetic.tokens_per_s", "from 0 to 1000000000"),
        ("[engine.synthetic]\ntokens_per_s = nan", "engine.synthetic.tokens_per_s", "from 0"),
        ("[engine.synthetic]\neos_probability = '101%'", "engine.synthetic.eos_probability", '"100%" at most'),
        ("[kernel]\nlimits = 'on'", "kernel.limits", "one of required, best_effort, off"),
        ("[kernel]\nname = 'a/b'", "kernel.name", "as a name"),
        ("[kernel]\ncgroup = 'seedance'", "kernel.cgroup", "write a whole path"),
        ("[kernel]\ndevices = 'eth0'", "kernel.devices", 'write e.g. ["eth0", "lo"]'),
        ("[kernel]\ndevices = ['a/b']", "kernel.devices", 'write e.g. ["eth0", "lo"]'),
        ("[kernel]\nhorizon = 0", "kernel.horizon", '"60s" at most'),
        ("[kernel]\nhorizon = '1h'", "kernel.horizon", '"60s" at most'),
        ("[kernel]\nconnections = 0.00001", "kernel.connections", "from 0.001 up"),
        ("[kernel]\nconnections = 0", "kernel.connections", '"unlimited"'),
        ("[kernel]\nconnections_burst = 0", "kernel.connections_burst", "cannot"),
        ("[listen]\ntcp = '127.0.0.1:8000'", "listen.tcp", 'write e.g. ["127.0.0.1:8000"]'),
        ("[listen]\ntcp = ['localhost:8000']", "listen.tcp", 'cannot read "localhost:8000" as an address'),
        ("[listen]\ntcp = ['::1:8000']", "listen.tcp", '"[::1]:8000"'),
        ("[listen]\ntcp = ['[127.0.0.1]:8000']", "listen.tcp", "as an address"),
        ("[listen]\ntcp = ['127.0.0.1']", "listen.tcp", "as an address"),
        ("[listen]\ntcp = ['127.0.0.1:65536']", "listen.tcp", "as an address"),
        ("[listen]\ntcp = ['256.0.0.1:80']", "listen.tcp", "as an address"),
        ("[listen]\ntcp = [8000]", "listen.tcp", "cannot read 8000 as an address"),
        ("[listen]\ntcp = ['127.0.0.1:80', '127.0.0.1:80']", "listen.tcp", "twice"),
        ("[engine]\nkind = 'synthetic'\n[listen]\ntcp = []", "listen", "without a place to listen"),
        ("[listen]\ncongestion = 'BBR 2'", "listen.congestion", 'write e.g. "bbr"'),
        ("[listen]\nbusy_poll = '1s'", "listen.busy_poll", 'from "1us" to "10000us"'),
        ("[listen]\nnotsent_lowat = 100", "listen.notsent_lowat", 'write "auto", or from "1KiB"'),
        ("[listen]\nsend_buffer = 'small'", "listen.send_buffer", "as a size"),
        ("[listen]\nreceive_buffer = '2GiB'", "listen.receive_buffer", 'to "1GiB"'),
        ("[listen]\nkeepalive = '2s'", "listen.keepalive", 'write "0s" for none, or something from "3s"'),
        ("[listen]\nuser_timeout = '1ms'", "listen.user_timeout", 'from "1s"'),
        ("[listen]\nbacklog = 0", "listen.backlog", "from 1"),
        ("[listen]\nsend_bufer = 0", "listen.send_bufer", "did you mean 'send_buffer'?"),
        ("[listen.at.'localhost:80']", 'listen.at."localhost:80"', "as an address"),
        ("[listen.at.'127.0.0.1:80']\ntcp = []", 'listen.at."127.0.0.1:80".tcp', "unknown key"),
        ("[listen.at]\n'127.0.0.1:80' = 1", 'listen.at."127.0.0.1:80"', "a table belongs"),
        (f"[listen]\nunix = '/{'x' * 107}'", "listen.unix", "over 107 bytes"),
        ("[paths]\ntenants = 3", "paths.tenants", "cannot take 3"),
        ("[worker]\nidle_timeout = 0", "worker.idle_timeout", "above zero"),
        ("[worker]\nio = 'kqueue'", "worker.io", "write one of auto, io_uring, epoll"),
        ("[worker]\nmax_head = 10", "worker.max_head", 'too small to work; write e.g. "32KiB"'),
        ("[http]\nping_interval = '0s'", "http.ping_interval", "above zero"),
        ("[http]\nping = '1s'", "http.ping", "unknown key"),
        ("classes = 3", "classes", "where tables belong"),
        ("[engine]\nkind='synthetic'\n[classes]\nnight = 3", "classes.night", "where a table belongs"),
        ("[engine]\nkind='synthetic'\n[engine.gpu]\nthreads = '0%'", "engine.gpu.threads", 'something above "0%"'),
        ("[engine]\nkind='synthetic'\n[engine.gpu]\nmemory = 1", "engine.gpu.memory", "too small"),
        ("[engine]\nkind='synthetic'\n[engine.gpu]\nmps_directory = 'mps'", "engine.gpu.mps_directory", "from '/'"),
        ("[engine]\nkind='synthetic'\n[classes.x]\nwieght = 3", "classes.x.wieght", "did you mean 'weight'?"),
        ("[engine", "", "cannot read it as TOML"),
    ],
)
def test_wrong_files_say_what_would_be_right(text: str, where: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, PATH)
    assert (raised.value.path, raised.value.key) == (PATH, where)
    assert reason in raised.value.reason
    assert raised.value.reason.startswith("cannot ")


def test_two_free_ports_are_two_addresses() -> None:
    text = "[engine]\nkind = 'synthetic'\n[listen]\ntcp = ['127.0.0.1:0', '127.0.0.1:0']"
    assert len(parse(text, PATH).listen.tcp) == 2


def test_a_socket_alone_is_a_place_to_listen() -> None:
    config = parse("[engine]\nkind = 'synthetic'\n[listen]\ntcp = []\nunix = '/run/s'", PATH)
    assert (config.listen.tcp, config.listen.unix) == ((), "/run/s")


def test_addresses_as_text() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"
    assert str(Address("127.0.0.1", 80)) == "127.0.0.1:80"


class TestLoad:
    def test_relative_paths_start_at_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf/s.toml").write_text("[engine]\nkind = 'synthetic'\n[paths]\nstate = 'state'")
        monkeypatch.chdir(tmp_path)
        config = load("conf/s.toml")
        assert config.path == str(tmp_path / "conf/s.toml")
        assert config.paths.state == str(tmp_path / "conf/state")
        assert config.paths.tenants == str(tmp_path / "conf/tenants.d")

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot find it; create it"):
            load(str(tmp_path / "none.toml"))

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read a folder"):
            load(str(tmp_path))

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="cannot read it: Not a directory"):
            load(str(tmp_path / "file/s.toml"))

    def test_socket(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            with pytest.raises(ConfigError, match="cannot read it: "):
                load(str(tmp_path / "s"))

    def test_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "s.toml").write_bytes(b"# caf\xe9\n")
        with pytest.raises(ConfigError, match="cannot read byte 5 as UTF-8"):
            load(str(tmp_path / "s.toml"))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
    def test_forbidden(self, tmp_path: Path) -> None:
        (tmp_path / "s.toml").touch(mode=0o000)
        with pytest.raises(ConfigError, match="permission denied; let this user read it"):
            load(str(tmp_path / "s.toml"))
