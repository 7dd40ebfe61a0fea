"""Our programs on network devices: which of them, in front of which queue, on devices that come and go.

A device gets clsact with our egress filter, and fq as its queue where that can be: fq keeps a packet until the
departure time that the program gave it. Where it cannot be, the filter is the program that polices.

* Only a queue that the kernel chose by itself is replaced: it has handle 0, while one that somebody configured has
  another. Ours has handle 5eed:, by which it is known after a restart; when it is deleted, the kernel makes its own
  choice again. So nothing must be remembered to restore what was there.
* A device with several hardware queues has an fq on each, below an mq of ours: the kernel's own mq takes no others.
* A filter is replaced at once: no packet passes by neither the old nor the new one (cls_bpf, same priority and handle).
* Our filter is there before our queue, and leaves after it: so where it is not, the queue is not ours to touch.
"""

from __future__ import annotations

import enum
import errno
import struct
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from seedance.errors import KernelError
from seedance.qos.netlink import CLSACT, CLSACT_HANDLE, EGRESS, INGRESS, ROOT, Device, Network, Qdisc

PRIORITY: Final = 0x5EED
HANDLE: Final = 0x5EED0000

# Attributes of fq (linux/pkt_sched.h, TCA_FQ_*). A packet is kept up to the horizon of the limits, and the sockets' own
# send buffers bound how many there are, so the queue's bounds are far out of the way. An fq that is full drops.
_FQ_PACKETS, _FQ_FLOW_PACKETS, _FQ_HORIZON = 1, 2, 14
_PACKETS: Final = 100_000
_FLOW_PACKETS: Final = 10_000
_LEAST_HORIZON_S: Final = 10.0  # fq's own default


class Choice(enum.Enum):
    """What is to be done about a device's queue."""

    PACES = "it paces as it is"
    TAKES_FQ = "an fq takes the place of the kernel's choice"
    TAKES_MQ = "an mq of ours takes the place of the kernel's, with an fq for each hardware queue"
    FILL_MQ = "our mq has hardware queues without an fq"
    FOREIGN = "somebody configured it"


def choose(qdiscs: Sequence[Qdisc]) -> tuple[Choice, str]:
    """Return what to do about a device with these queues, and the kind of the one at its root."""
    root = next((qdisc for qdisc in qdiscs if qdisc.parent == ROOT), None)
    if root is None:
        return Choice.TAKES_FQ, "noqueue"
    below = [
        qdisc for qdisc in qdiscs if qdisc.parent not in (ROOT, CLSACT) and qdisc.parent >> 16 == root.handle >> 16
    ]
    paces = root.kind == "fq" or (root.kind == "mq" and bool(below) and all(one.kind == "fq" for one in below))
    if paces:
        choice = Choice.PACES
    elif root.kind == "mq" and root.handle in (0, HANDLE):
        choice = Choice.TAKES_MQ if root.handle == 0 else Choice.FILL_MQ
    else:
        choice = Choice.TAKES_FQ if root.handle == 0 else Choice.FOREIGN
    return choice, root.kind


def fq_options(horizon_s: float) -> bytes:
    """Return the attributes of an fq for packets that are kept for up to so long, encoded."""
    horizon_us = round(max(_LEAST_HORIZON_S, 2 * horizon_s) * 1e6)
    attributes = ((_FQ_PACKETS, _PACKETS), (_FQ_FLOW_PACKETS, _FLOW_PACKETS), (_FQ_HORIZON, horizon_us))
    return b"".join(struct.pack("=HHI", 8, kind, value) for kind, value in attributes)


class DevicePrograms(msgspec.Struct, frozen=True):
    """Descriptors of the programs to attach; None for those that are not wanted."""

    pace: int | None = None
    police: int | None = None
    connections: int | None = None


NO_PROGRAMS: Final = DevicePrograms()


class DeviceLimits:
    """Our filters and queues on the devices of this network namespace.

    name     makes up the filters' names; another daemon's filters are left alone.
    wanted   names of devices; all of them, also those that come later, without any.

    `notes` say, by device or for "egress" as a whole, what is not as it should be.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        wanted: Collection[str] = (),
        horizon_s: float = 2.0,
        programs: DevicePrograms = NO_PROGRAMS,
    ) -> None:
        self.notes: dict[str, str] = {}
        self._network = network
        self._egress_name, self._connections_name = f"{name}_egress", f"{name}_connections"
        self._wanted = frozenset(wanted)
        self._options = fq_options(horizon_s)
        self._programs = programs
        self._attached: dict[tuple[int, int], int] = {}  # by device and direction, the program that we put there
        self._tuned: set[int] = set()  # devices on which an fq of ours has these options
        self._lines: dict[int, str] = {}

    def update(self) -> None:
        """Look at all devices, and put right what is not. Raises KernelError when there is no looking at them."""
        self.notes.clear()
        devices = self._network.devices()
        present = {device.index for device in devices}
        self._attached = {key: program for key, program in self._attached.items() if key[0] in present}
        self._tuned &= present
        self._lines = {}
        for device in devices:
            # What is down sends nothing, and its queue is chosen when it comes up.
            if device.is_up and (not self._wanted or device.name in self._wanted):
                self._update(device)
        for missing in sorted(self._wanted - {device.name for device in devices}):
            self.notes[missing] = "there is no such network device yet"

    def _update(self, device: Device) -> None:
        try:
            self._attach(device)
        except KernelError as exc:
            # A device may go at any time.
            if exc.errno != errno.ENODEV:
                self.notes[device.name] = f"{exc}, so its traffic is not limited"

    def _attach(self, device: Device) -> None:
        index, programs = device.index, self._programs
        if not any(qdisc.parent == CLSACT for qdisc in self._network.qdiscs(index)):
            self._network.replace_qdisc(index, "clsact", CLSACT, CLSACT_HANDLE)
        line: list[str] = []
        if programs.pace is not None and programs.police is not None:
            if not self._is_ours(index, EGRESS, self._egress_name):
                self._put(index, EGRESS, self._egress_name, programs.police)
            paces, queue = self._queue(device)
            self._put(index, EGRESS, self._egress_name, programs.pace if paces else programs.police)
            line.append(f"egress {'paced' if paces else 'policed'} by '{self._egress_name}' before {queue}")
        if programs.connections is not None and not device.is_loopback:
            self._is_ours(index, INGRESS, self._connections_name)
            self._put(index, INGRESS, self._connections_name, programs.connections)
            line.append(f"new connections policed by '{self._connections_name}'")
        self._lines[index] = f"{device.name}: {'; '.join(line)}"

    def _is_ours(self, index: int, direction: int, name: str) -> bool:
        """Say whether our filter is there; forget it when it is not. Raises KernelError on another daemon's."""
        for found in self._network.filters(index, direction):
            if found.priority == PRIORITY:
                if found.name != name:
                    what = f"attach '{name}': the filter '{found.name}' of another seedanced is there"
                    raise KernelError(f"{what}; one network namespace has room for one", errno.EBUSY)
                return True
        self._attached.pop((index, direction), None)
        return False

    def _put(self, index: int, direction: int, name: str, program: int) -> None:
        if self._attached.get((index, direction)) != program:
            self._network.replace_filter(index, direction, PRIORITY, name, program)
            self._attached[index, direction] = program

    def _queue(self, device: Device) -> tuple[bool, str]:
        """Have a queue that paces, if that can be; returns whether it does, and what it is, for people."""
        qdiscs = self._network.qdiscs(device.index)
        choice, kind = choose(qdiscs)
        if choice is Choice.FOREIGN:
            self.notes[device.name] = (
                f"egress is policed, not paced: its queue '{kind}' was configured by somebody, and is left alone;"
                f" `tc qdisc replace dev {device.name} root fq` would pace"
            )
            return False, kind
        is_ours = any(qdisc.parent == ROOT and qdisc.handle == HANDLE for qdisc in qdiscs)
        if choice is Choice.PACES and (not is_ours or kind == "mq" or device.index in self._tuned):
            return True, f"{kind} of ours" if is_ours else kind
        try:
            made = self._make_queue(device.index, choice)
        except KernelError as exc:
            if exc.errno == errno.ENODEV:
                raise
            if exc.errno == errno.ENOENT:
                self.notes["egress"] = "policed, not paced: this kernel has no sch_fq"
            else:
                self.notes[device.name] = f"egress is policed, not paced: {exc}"
            return False, kind
        self._tuned.add(device.index)
        return True, f"{made} of ours"

    def _make_queue(self, index: int, choice: Choice) -> str:
        """Put in an fq, or one for each hardware queue; undone when that fails. Raises KernelError."""
        if choice in (Choice.TAKES_FQ, Choice.PACES):
            self._network.replace_qdisc(index, "fq", ROOT, HANDLE, self._options)
            return "fq"
        if choice is Choice.TAKES_MQ:
            self._network.replace_qdisc(index, "mq", ROOT, HANDLE)
        try:
            for qdisc in self._network.qdiscs(index):
                if qdisc.parent != ROOT and qdisc.parent >> 16 == HANDLE >> 16 and qdisc.kind != "fq":
                    self._network.replace_qdisc(index, "fq", qdisc.parent, 0, self._options)
        except KernelError:
            self._network.delete_qdisc(index, ROOT, HANDLE)
            raise
        return "mq with fq"

    def attachments(self) -> list[str]:
        """Return a line for each device on which something of ours is."""
        return [self._lines[index] for index in sorted(self._lines)]

    def remove(self) -> list[str]:
        """Take everything of ours from all devices; returns what was removed. Raises KernelError."""
        removed: list[str] = []
        for device in self._network.devices():
            try:
                removed += self._remove(device)
            except KernelError as exc:
                if exc.errno != errno.ENODEV:
                    raise
        self._attached.clear()
        self._tuned.clear()
        self._lines.clear()
        return removed

    def _remove(self, device: Device) -> list[str]:
        index, removed = device.index, []
        ours = {EGRESS: self._egress_name, INGRESS: self._connections_name}
        found = {direction: self._network.filters(index, direction) for direction in ours}
        has_ours = {
            direction: any(one.priority == PRIORITY and one.name == name for one in found[direction])
            for direction, name in ours.items()
        }
        if has_ours[EGRESS] and any(one.parent == ROOT and one.handle == HANDLE for one in self._network.qdiscs(index)):
            self._network.delete_qdisc(index, ROOT, HANDLE)
            removed.append(f"queue of {device.name}")
        for direction, name in ours.items():
            if has_ours[direction]:
                self._network.delete_filter(index, direction, PRIORITY)
                removed.append(f"filter '{name}' of {device.name}")
        if any(has_ours.values()) and not any(self._network.filters(index, direction) for direction in ours):
            self._network.delete_qdisc(index, CLSACT, CLSACT_HANDLE)
        return removed
