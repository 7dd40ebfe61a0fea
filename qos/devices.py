"""Our programs on network devices: which of them, in front of which queue, on devices that come and go.

A device gets clsact with our egress filter, and fq as its queue where that can be: fq keeps a packet until the
departure time that the program gave it. Where it cannot be, the filter is the program that polices.

* Only a queue that the kernel chose by itself is replaced: it has handle 0, while one that somebody configured has
  another. Ours has handle 5eed:, by which it is known after a restart; when it is deleted, the kernel makes its own
  choice again. So nothing must be remembered to restore what was there.
* A device with several hardware queues has an fq on each, below an mq of ours: the kernel's own mq takes no others.
* A filter of ours is known by its name and handle, and replaced at once: no packet passes by neither the old nor the
  new one. It goes before those of others, which may end the classification of a packet; ours never do.
* Our filter is there before our queue, and leaves after it: so where it is not, the queue is not ours to touch.
* What goes out through a bridge or bond is paced there, so its ports keep the queues that they have. They get the
  filter all the same, for what is sent through a port itself.
"""

from __future__ import annotations

import enum
import errno
import functools
import itertools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from seedance.errors import KernelError
from seedance.qos.netlink import CLSACT, CLSACT_HANDLE, EGRESS, INGRESS, ROOT, Device, Filter, Network, Qdisc
from seedance.qos.teardown import run_all

HANDLE: Final = 0x5EED0000
FILTER_HANDLE: Final = 0x5EED
_PACING_MASTERS: Final = ("bridge", "bond", "team")

# Attributes of fq (linux/pkt_sched.h, TCA_FQ_*). A packet is kept up to the horizon of the limits, and the sockets' own
# send buffers bound how many there are, so the queue's bounds are far out of the way. An fq that is full drops.
_FQ_PACKETS, _FQ_FLOW_PACKETS, _FQ_HORIZON = 1, 2, 14
_PACKETS: Final = 100_000
_FLOW_PACKETS: Final = 1_000
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

    `notes` say, by device or for "egress" as a whole, what is not as it should be; `off`, by limit, which of the
    devices that are up go without it, and why.
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
        self.off: dict[str, str] = {}
        self._network = network
        self._egress_name, self._connections_name = f"{name}_egress", f"{name}_connections"
        self._wanted = frozenset(wanted)
        self._options = fq_options(horizon_s)
        self._programs = programs
        self._has_looked = False
        self._has_fq = True
        self._attached: dict[tuple[int, int], int] = {}  # by device and direction, the program that we put there
        self._tuned: set[int] = set()  # devices on which an fq of ours has these options
        self._unpaced: dict[int, str] = {}  # devices that took no fq, and why; asking again would change nothing
        self._lines: dict[int, str] = {}

    def update(self) -> None:
        """Look at all devices, and put right what is not. Raises KernelError when there is no looking at them."""
        devices, queues = self._network.devices(), self._network.qdiscs()
        self.notes, self.off, self._lines = {}, {}, {}
        present = {device.index for device in devices}
        self._attached = {key: program for key, program in self._attached.items() if key[0] in present}
        self._unpaced = {index: reason for index, reason in self._unpaced.items() if index in present}
        self._tuned &= present
        # What is down sends nothing, and its queue is chosen when it comes up.
        limited = [device for device in devices if device.is_up and self._is_wanted(device)]
        masters = {device.index for device in limited if device.kind in _PACING_MASTERS}
        for device in limited:
            self._update(device, queues.get(device.index, []), is_paced_above=device.master in masters)
        if not self._has_looked:
            # A former run may have wanted more.
            self._has_looked = True
            for device in devices:
                self._remove_unwanted(device, queues.get(device.index, []))
        for missing in sorted(self._wanted - {device.name for device in devices}):
            self.notes[missing] = "there is no such network device yet"

    def _is_wanted(self, device: Device) -> bool:
        return not self._wanted or device.name in self._wanted

    def _update(self, device: Device, qdiscs: list[Qdisc], *, is_paced_above: bool) -> None:
        steps: dict[str, Callable[[], str]] = {
            "egress": functools.partial(self._attach_egress, device, qdiscs, is_paced_above=is_paced_above),
            "new_connections": functools.partial(self._attach_connections, device, qdiscs),
        }
        line: list[str] = []
        for limit, step in steps.items():
            try:
                line.append(step())
            except KernelError as exc:
                # A device may go at any time.
                if exc.errno != errno.ENODEV:
                    self._note(device, f"{exc}, so its traffic is not limited")
                    self.off[limit] = _joined(self.off.get(limit, ""), f"device '{device.name}': {exc}")
        if any(line):
            self._lines[device.index] = f"{device.name}: {'; '.join(filter(None, line))}"

    def _note(self, device: Device, text: str) -> None:
        known = self.notes.get(device.name, "")
        if text not in known:
            self.notes[device.name] = _joined(known, text)

    def _attach_egress(self, device: Device, qdiscs: list[Qdisc], *, is_paced_above: bool) -> str:
        pace, police = self._programs.pace, self._programs.police
        if pace is None or police is None:
            return ""
        ours = self._have_filter(device, qdiscs, EGRESS, self._egress_name, police)
        if is_paced_above:
            choice, queue = choose(qdiscs)
            paces = choice is Choice.PACES
        else:
            paces, queue = self._queue(device, qdiscs)
        self._put(device, EGRESS, ours, pace if paces else police)
        return f"egress {'paced' if paces else 'policed'} by '{self._egress_name}' before {queue}"

    def _attach_connections(self, device: Device, qdiscs: list[Qdisc]) -> str:
        program = self._programs.connections
        if program is None or device.is_loopback:
            return ""
        ours = self._have_filter(device, qdiscs, INGRESS, self._connections_name, program)
        self._put(device, INGRESS, ours, program)
        return f"new connections policed by '{self._connections_name}'"

    def _have_filter(self, device: Device, qdiscs: list[Qdisc], direction: int, name: str, program: int) -> Filter:
        """Return our filter as it is, or put one in. Raises KernelError where there is no room for it."""
        self._have_clsact(device, qdiscs)
        found = self._network.filters(device.index, direction)
        ours = next((one for one in found if _is_named(one, name)), None)
        if ours is None:
            if other := next((one for one in found if one.handle == FILTER_HANDLE and one.kind == "bpf"), None):
                what = f"attach '{name}': the filter '{other.name}' of another seedanced is there"
                raise KernelError(f"{what}; one network namespace has room for one", errno.EBUSY)
            taken = {one.priority for one in found}
            ours = Filter(next(free for free in itertools.count(1) if free not in taken), FILTER_HANDLE, name)
            self._attached.pop((device.index, direction), None)
            self._put(device, direction, ours, program)
        first = next((one for one in found if one.priority < ours.priority), None)
        if first is not None:
            self._note(device, f"its traffic may not be limited: the filter '{first.name or first.kind}' comes first")
        return ours

    def _have_clsact(self, device: Device, qdiscs: list[Qdisc]) -> None:
        there = next((qdisc.kind for qdisc in qdiscs if qdisc.parent == CLSACT), None)
        if there is None:
            self._network.replace_qdisc(device.index, "clsact", CLSACT, CLSACT_HANDLE)
            qdiscs.append(Qdisc("clsact", CLSACT_HANDLE, CLSACT))
        elif there != "clsact":
            # It would take a filter for the way out, and run it on what comes in.
            what = (
                f"make 'clsact' where somebody has put '{there}'; `tc qdisc del dev {device.name} {there}` makes room"
            )
            raise KernelError(what, errno.EEXIST)

    def _put(self, device: Device, direction: int, filter: Filter, program: int) -> None:
        if self._attached.get((device.index, direction)) != program:
            self._network.replace_filter(device.index, direction, filter, program)
            self._attached[device.index, direction] = program

    def _queue(self, device: Device, qdiscs: Sequence[Qdisc]) -> tuple[bool, str]:
        """Have a queue that paces, if that can be; returns whether it does, and what it is, for people."""
        choice, kind = choose(qdiscs)
        if choice is Choice.FOREIGN:
            text = f"egress is policed, not paced: its queue '{kind}' was configured by somebody, and is left alone;"
            self._note(device, f"{text} `tc qdisc replace dev {device.name} root fq` would pace")
            return False, kind
        is_ours = any(qdisc.parent == ROOT and qdisc.handle == HANDLE for qdisc in qdiscs)
        if choice is Choice.PACES and (not is_ours or kind == "mq" or device.index in self._tuned):
            return True, f"{kind} of ours" if is_ours else kind
        if self._has_fq and device.index not in self._unpaced:
            try:
                made = self._make_queue(device.index, choice)
            except KernelError as exc:
                if exc.errno == errno.ENODEV:
                    raise
                self._has_fq = exc.errno != errno.ENOENT
                self._unpaced[device.index] = str(exc)
            else:
                self._tuned.add(device.index)
                return True, f"{made} of ours"
        if not self._has_fq:
            self.notes["egress"] = "policed, not paced: this kernel has no sch_fq"
        else:
            self._note(device, f"egress is policed, not paced: {self._unpaced[device.index]}")
        return False, kind

    def _make_queue(self, index: int, choice: Choice) -> str:
        """Put in an fq, or one for each hardware queue; undone when that fails. Raises KernelError."""
        if choice in (Choice.TAKES_FQ, Choice.PACES):
            self._network.replace_qdisc(index, "fq", ROOT, HANDLE, self._options)
            return "fq"
        if choice is Choice.TAKES_MQ:
            self._network.replace_qdisc(index, "mq", ROOT, HANDLE)
        try:
            for qdisc in self._network.qdiscs().get(index, []):
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
        """Take everything of ours from all devices; returns what was removed.

        Goes on where that fails on a device; raises KernelError after the last one.
        """
        devices, queues = self._network.devices(), self._network.qdiscs()
        self._attached.clear()
        self._tuned.clear()
        self._lines.clear()
        names = {EGRESS: self._egress_name, INGRESS: self._connections_name}
        steps = [functools.partial(self._remove, device, queues.get(device.index, []), names) for device in devices]
        return [line for lines in run_all(steps) for line in lines]

    def _remove_unwanted(self, device: Device, qdiscs: Sequence[Qdisc]) -> None:
        names = {EGRESS: self._egress_name, INGRESS: self._connections_name}
        if self._is_wanted(device):
            del names[EGRESS]
            if self._programs.connections is not None and not device.is_loopback:
                return
        try:
            self._remove(device, qdiscs, names)
        except KernelError as exc:
            self._note(device, str(exc))

    def _remove(self, device: Device, qdiscs: Sequence[Qdisc], names: Mapping[int, str]) -> list[str]:
        """Remove our filters of these names, by direction, and the queue with the one for egress."""
        if not any(qdisc.kind == "clsact" for qdisc in qdiscs):
            return []
        removed: list[str] = []
        try:
            for direction, name in names.items():
                for ours in (one for one in self._network.filters(device.index, direction) if _is_named(one, name)):
                    if direction == EGRESS and any(one.parent == ROOT and one.handle == HANDLE for one in qdiscs):
                        self._network.delete_qdisc(device.index, ROOT, HANDLE)
                        removed.append(f"queue of {device.name}")
                    self._network.delete_filter(device.index, direction, ours)
                    removed.append(f"filter '{name}' of {device.name}")
            if removed and not any(self._network.filters(device.index, direction) for direction in (EGRESS, INGRESS)):
                self._network.delete_qdisc(device.index, CLSACT, CLSACT_HANDLE)
        except KernelError as exc:
            if exc.errno != errno.ENODEV:
                raise
        return removed


def _is_named(filter: Filter, name: str) -> bool:
    return filter.handle == FILTER_HANDLE and filter.name == name


def _joined(known: str, text: str) -> str:
    return f"{known}; {text}" if known else text
