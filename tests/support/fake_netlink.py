"""Network devices in memory, with their queues and filters, and the rules by which the kernel changes them."""

from __future__ import annotations

import errno

from seedance.errors import KernelError
from seedance.qos.netlink import CLSACT, ROOT, Device, Filter, Qdisc


class FakeNetwork:
    """`Network` without a kernel. `default` is the kind of queue that the kernel gives a device by itself.

    `queues` is the number of hardware queues by device index, `has_fq` whether the kernel has that kind, `refusing` the
    names of devices on which nothing can be changed.
    """

    def __init__(self, *devices: Device, default: str = "fq_codel", has_fq: bool = True) -> None:
        self.present = {device.index: device for device in devices}
        self.default = default
        self.has_fq = has_fq
        self.queues: dict[int, int] = {}
        self.refusing: set[str] = set()
        self.roots: dict[int, list[Qdisc]] = {}
        self.clsact: set[int] = set()
        self.attached: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
        self.log: list[str] = []

    def configure(self, index: int, kind: str, handle: int = 0x80010000) -> None:
        """Do what an administrator does with `tc qdisc replace ... root`."""
        self.roots[index] = [Qdisc(kind, handle, ROOT)]

    def devices(self) -> list[Device]:
        """See `Network`."""
        return list(self.present.values())

    def qdiscs(self, index: int) -> list[Qdisc]:
        """See `Network`."""
        found = self.roots.get(index) or self._defaults(index)
        return [*found, *([Qdisc("clsact", 0xFFFF0000, CLSACT)] if index in self.clsact else [])]

    def _defaults(self, index: int) -> list[Qdisc]:
        count = self.queues.get(index, 1)
        if count == 1:
            return [Qdisc(self.default, 0, ROOT)]
        return [Qdisc("mq", 0, ROOT), *(Qdisc(self.default, 0, number) for number in range(1, count + 1))]

    def filters(self, index: int, parent: int) -> list[Filter]:
        """See `Network`."""
        return [Filter(priority, 1, name) for priority, (name, _) in self.attached.get((index, parent), {}).items()]

    def program(self, index: int, parent: int) -> int | None:
        """Return the program of the one filter there."""
        found = list(self.attached.get((index, parent), {}).values())
        return found[0][1] if found else None

    def replace_qdisc(self, index: int, kind: str, parent: int, handle: int, options: bytes = b"") -> None:
        """See `Network`."""
        self._check(index, f"make '{kind}'")
        if kind == "fq" and not self.has_fq:
            raise KernelError("make 'fq' (Specified qdisc kind is unknown)", errno.ENOENT)
        if parent == CLSACT:
            assert index not in self.clsact
            self.clsact.add(index)
        elif parent == ROOT:
            children = [Qdisc(self.default, 0, handle | number + 1) for number in range(self.queues.get(index, 1))]
            self.roots[index] = [Qdisc(kind, handle, ROOT), *(children if kind == "mq" else [])]
        else:
            root = self.qdiscs(index)[0]
            if root.handle == 0 or root.handle >> 16 != parent >> 16:
                raise KernelError("find the parent", errno.ENOENT)
            rest = [qdisc for qdisc in self.roots[index] if qdisc.parent != parent]
            self.roots[index] = [*rest, Qdisc(kind, 0x80020000, parent)]

    def delete_qdisc(self, index: int, parent: int, handle: int) -> None:
        """See `Network`."""
        self._check(index, "delete a queue")
        if parent == CLSACT:
            self.clsact.remove(index)
            self.attached = {key: filters for key, filters in self.attached.items() if key[0] != index}
        else:
            assert self.roots[index][0].handle == handle
            del self.roots[index]

    def replace_filter(self, index: int, parent: int, priority: int, name: str, program: int) -> None:
        """See `Network`."""
        self._check(index, f"attach {name} {program}")
        assert index in self.clsact
        self.attached.setdefault((index, parent), {})[priority] = (name, program)

    def delete_filter(self, index: int, parent: int, priority: int) -> None:
        """See `Network`."""
        self._check(index, "delete a filter")
        del self.attached[index, parent][priority]

    def _check(self, index: int, what: str) -> None:
        if index not in self.present:
            raise KernelError(what, errno.ENODEV)
        if self.present[index].name in self.refusing:
            raise KernelError(what, errno.EOPNOTSUPP)
        self.log.append(f"{self.present[index].name}: {what}")
