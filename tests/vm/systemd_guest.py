"""A running guest: QEMU on one side, commands for the agent in it on the other.

Under emulation a boot takes a minute and more, so it happens once for an image: the booted machine, memory and disk,
is kept beside the image, and a start takes it up from there. `cold` boots all the same.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, TextIO

from vm.agent import ERROR, GREETING, HEAD, INPUT, OUTPUT, REQUEST, STATUS, WORD_BYTES
from vm.run import Unavailable, find_qemu
from vm.systemd_image import locked, say

KERNEL_LINE: Final = (
    "console=ttyS0 loglevel=4 panic=-1 reboot=t mitigations=off random.trust_cpu=on audit=0 apparmor=0 selinux=0 "
    "no5lvl no_timer_check norandmaps systemd.show_status=no systemd.gpt_auto=no"
)
"""`norandmaps`: the emulator translates code anew wherever else it is mapped, so a program is to be at one place."""


class Clock(enum.Enum):
    """What a guest's time is: the host's, or its own instructions counted, one a nanosecond.

    Emulation is slow, and by the host's clock all that a guest does takes that much longer, and more while the host is
    busy: latencies say little. By a clock that counts, the guest is a machine whose processor makes 10⁹ instructions a
    second, however long that takes here; while it is idle, time jumps to the next timer. It has one processor only.
    The emulator would run two by turns, and time passes for the one that is not run, too, even when it was just
    interrupted: a task that it should wake at once waits for as long as the other one's turn (20 ms were seen).
    """

    HOST = ("-smp", "2,sockets=1,cores=2", "-accel", "tcg,thread=multi")
    COUNTED = ("-smp", "1", "-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off")


HARDWARE: Final = (
    *("-cpu", "max,-avx,-avx2,-erms,-fsrm", "-m", "1536", "-nodefaults", "-no-user-config"),
    *("-display", "none", "-nic", "none", "-no-reboot", "-device", "virtio-blk-pci,drive=root"),
    *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,nr=1,name=agent"),
    *("-serial", "chardev:console", "-mon", "monitor,mode=control"),
)
"""Besides the processors: the drive `root`, and the character devices `agent`, `console` and `monitor`, which are
each machine's own. Of a processor's extensions it lacks those that libraries and kernel would use because they are
quick, and which are the slowest to emulate."""

BOOT_S: Final = 600.0
"""How long a boot may take; on a busy machine it is several times what it takes on an idle one."""

_CHUNK: Final = 1 << 16
_LOOK_S: Final = 1.0
_STOP_S: Final = 30.0


class Ended(Exception):
    """The machine went away, or never came up."""


class Agent:
    """A connection to the agent in a guest; commands run one at a time."""

    def __init__(self, path: Path, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> None:
        """Connect and wait until the agent answers; raise Ended when it does not in time, or no longer can."""
        deadline = time.monotonic() + timeout_s
        self._received = bytearray()
        try:
            self._socket = connect(path)
        except OSError as exc:
            raise Ended(f"there is no machine: {exc}") from exc
        word = secrets.token_bytes(WORD_BYTES)
        self._socket.sendall(GREETING + word)
        self._socket.settimeout(_LOOK_S)
        while not self._received.endswith(word):
            with contextlib.suppress(TimeoutError):
                self._receive_some()
            if not alive() or time.monotonic() > deadline:
                self._socket.close()
                raise Ended("its agent did not answer in time" if alive() else "the machine ended")
        self._received.clear()
        self._socket.settimeout(None)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdout: BinaryIO,
        stderr: BinaryIO | None = None,
        stdin: BinaryIO | None = None,
        cwd: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Run a command in the guest, its output going where it is told to; return its exit status.

        Raise Ended when the machine ends first.
        """
        request = {"argv": list(argv), "cwd": cwd, "environment": environment or {}, "input": stdin is not None}
        self._send(REQUEST, json.dumps(request).encode())
        if stdin is not None:
            while data := stdin.read(_CHUNK):
                self._send(INPUT, data)
            self._send(INPUT, b"")
        outputs = {OUTPUT: stdout, ERROR: stderr or stdout}
        while True:
            kind, data = self._receive()
            if kind == STATUS:
                return int(data)
            outputs[kind].write(data)
            outputs[kind].flush()

    def check(self, argv: Sequence[str]) -> str:
        """Run a command that must succeed; return its output."""
        output = io.BytesIO()
        if status := self.run(argv, stdout=output):
            raise Ended(f"{' '.join(argv)} failed with status {status}: {output.getvalue().decode(errors='replace')}")
        return output.getvalue().decode()

    def _send(self, kind: bytes, data: bytes) -> None:
        try:
            self._socket.sendall(HEAD.pack(kind, len(data)) + data)
        except OSError as exc:
            raise Ended("the machine ended while it was given a command") from exc

    def _receive(self) -> tuple[bytes, bytes]:
        kind, length = HEAD.unpack(self._read(HEAD.size))
        return kind, self._read(length)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            self._receive_some()
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _receive_some(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionError:
            data = b""
        if not data:
            raise Ended("the machine ended")
        self._received += data


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


class Machine:
    """QEMU with a guest in it; its files are in `folder`: console.log, agent.sock, monitor.sock, pid."""

    def __init__(self, folder: Path, clock: Clock = Clock.HOST) -> None:
        self.folder = folder
        self.clock = clock
        self.socket = folder / "agent.sock"
        self.monitor = folder / "monitor.sock"
        self.console = folder / "console.log"

    @property
    def pid(self) -> int:
        """Return the process id of the running machine, 0 where none runs."""
        try:
            pid = int((self.folder / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return 0
        return pid if str(self.socket).encode() in command else 0

    def start(self, image: Path, *, cold: bool = False) -> None:
        """Start the machine in the background; what it writes to its disk is forgotten when it ends."""
        if self.pid:
            raise Unavailable(f"a machine already runs in {self.folder} (--stop ends it)")
        # A counted clock runs away while the guest that was taken up has nothing to do, and its agent may never answer.
        cold = cold or self.clock is Clock.COUNTED
        booted = image if cold else find_booted(image)
        disk, memory = ("root.img", "") if cold else ("disk.img", f"exec:cat {booted / 'memory'}")
        self.launch(image, booted / disk, forget=True, incoming=memory)
        if not cold:
            with self.control() as channel:
                command(channel, "cont")  # it was saved standing still
            with self.agent(BOOT_S) as agent:
                agent.check(["date", "--set", f"@{time.time():.3f}"])

    def launch(self, image: Path, disk: Path, *, forget: bool, incoming: str = "") -> None:
        """Start QEMU; `incoming` is a migration address to take the machine's state from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in (self.socket, self.monitor, self.console, self.folder / "pid"):
            stale.unlink(missing_ok=True)
        snapshot = "on" if forget else "off"
        command = [
            *(find_qemu(), "-daemonize", "-pidfile", str(self.folder / "pid")),
            *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"), "-append", KERNEL_LINE),
            *("-drive", f"file={disk},format=raw,if=none,id=root,cache=unsafe,snapshot={snapshot}"),
            *("-chardev", f"file,id=console,path={self.console}"),
            *("-chardev", f"socket,id=agent,path={self.socket},server=on,wait=off"),
            *("-chardev", f"socket,id=monitor,path={self.monitor},server=on,wait=off"),
            *self.clock.value,
            *HARDWARE,
            *(("-incoming", incoming) if incoming else ()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise Unavailable(f"QEMU does not start: {done.stderr.strip()[-400:]}")

    @contextlib.contextmanager
    def control(self) -> Iterator[TextIO]:
        """Speak with QEMU's monitor, by its machine protocol."""
        with connect(self.monitor) as sock, sock.makefile("rw") as channel:
            channel.readline()  # QEMU's greeting
            command(channel, "qmp_capabilities")
            yield channel

    def freeze(self, memory: Path) -> None:
        """Stop the machine for good, its state written to `memory`; its disk must not change after."""
        with self.control() as channel:
            command(channel, "stop")
            command(channel, "migrate", uri=f"exec:cat >{memory}")
            while (status := command(channel, "query-migrate")["status"]) != "completed":
                if status == "failed":
                    raise Ended("QEMU could not write the machine's state")
                time.sleep(0.1)
            command(channel, "quit")
        self.stop()

    def agent(self, timeout_s: float) -> Agent:
        """Return a connection to the agent, once the machine is up that far."""
        return Agent(self.socket, timeout_s, lambda: bool(self.pid))

    def stop(self) -> None:
        """End the machine as if its power went: nothing that it wrote is kept."""
        if pid := self.pid:
            deadline = time.monotonic() + _STOP_S
            os.kill(pid, signal.SIGTERM)
            while self.pid and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                if self.pid:
                    os.kill(pid, signal.SIGKILL)
        for stale in (self.socket, self.monitor, self.folder / "pid"):
            stale.unlink(missing_ok=True)


# --- the booted machine ---------------------------------------------------------------------------------------------


def find_booted(image: Path) -> Path:
    """Return the folder with `memory` and `disk.img` of a booted machine, made if need be."""
    folder = image / f"booted-{machine_key()}"
    with locked(image / "lock"):
        if not folder.exists():
            say("booting the image, once")
            for stale in image.glob("booted-*"):
                shutil.rmtree(stale)
            boot_image(image, folder)
    return folder


def boot_image(image: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=image, prefix="booting-") as name:
        staging = Path(name)
        result = staging / "result"
        result.mkdir()
        subprocess.run(["cp", "--sparse=always", image / "root.img", result / "disk.img"], check=True)
        machine = Machine(staging)
        machine.launch(image, result / "disk.img", forget=False)
        try:
            with machine.agent(BOOT_S) as agent:
                agent.check(["sync"])
            machine.freeze(result / "memory")
        except Ended as exc:
            console = machine.console.read_text(errors="replace")[-2000:]
            raise Unavailable(f"the image does not boot: {exc}; the console's end:\n{console}") from exc
        finally:
            machine.stop()
        result.rename(target)


def machine_key() -> str:
    """Return a digest of what a saved state depends on: QEMU, the machine, and the processor whose cycles it counts."""
    version = subprocess.run([find_qemu(), "--version"], capture_output=True, text=True, check=True).stdout
    model = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    parts = (version, model, KERNEL_LINE, *Clock.HOST.value, *HARDWARE)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def command(channel: TextIO, name: str, **arguments: object) -> dict[str, Any]:
    """Give QEMU's monitor a command; return what it answers, events left out."""
    channel.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
    channel.flush()
    while line := channel.readline():
        answer = json.loads(line)
        if "error" in answer:
            raise Ended(f"QEMU refuses {name}: {answer['error']['desc']}")
        if "return" in answer:
            found: dict[str, Any] = answer["return"]
            return found
    raise Ended(f"QEMU ended at {name}")
