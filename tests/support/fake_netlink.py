"""Network devices in memory, with their queues and filters, and the rules by which the kernel changes them."""

from __future__ import annotations

import errno

from seedance.errors import KernelError
from seedance.qos.netlink import CLSACT, ROOT, Device, Filter, Qdisc


class FakeNetwork:
    """`Network` without a kernel. `default` is the kind of queue that the kernel gives a device by itself.

    `queues` is the number of hardware queues by device index, `has_fq` whether the kernel has that kind, `refusing` the
    names of devices on which nothing can be changed, `unqueueing` of those that take no other queue. `ingress` has
    the devices with the forerunner of clsact, `dumps` is how often all queues have been asked for.
    """

    def __init__(self, *devices: Device, default: str = "fq_codel", has_fq: bool = True) -> None:
        self.present = {device.index: device for device in devices}
        self.default = default
        self.has_fq = has_fq
        self.queues: dict[int, int] = {}
        self.refusing: set[str] = set()
        self.unqueueing: set[str] = set()
        self.roots: dict[int, list[Qdisc]] = {}
        self.clsact: set[int] = set()
        self.attached: dict[tuple[int, int], dict[int, tuple[Filter, int]]] = {}
        self.ingress: set[int] = set()
        self.dumps = 0
        self.log: list[str] = []

    def configure(self, index: int, kind: str, handle: int = 0x80010000) -> None:
        """Do what an administrator does with `tc qdisc replace ... root`."""
        self.roots[index] = [Qdisc(kind, handle, ROOT)]

    def devices(self) -> list[Device]:
        """See `Network`."""
        return list(self.present.values())

    def qdiscs(self) -> dict[int, list[Qdisc]]:
        """See `Network`."""
        self.dumps += 1
        return {index: self.qdiscs_of(index) for index in self.present}

    def qdiscs_of(self, index: int) -> list[Qdisc]:
        """Return the queues of a device."""
        found = self.roots.get(index) or self._defaults(index)
        kinds = [kind for kind, indices in (("clsact", self.clsact), ("ingress", self.ingress)) if index in indices]
        return [*found, *(Qdisc(kind, 0xFFFF0000, CLSACT) for kind in kinds)]

    def _defaults(self, index: int) -> list[Qdisc]:
        count = self.queues.get(index, 1)
        if count == 1:
            return [Qdisc(self.default, 0, ROOT)]
        return [Qdisc("mq", 0, ROOT), *(Qdisc(self.default, 0, number) for number in range(1, count + 1))]

    def filters(self, index: int, parent: int) -> list[Filter]:
        """See `Network`."""
        return [filter for _, (filter, _) in sorted(self.attached.get((index, parent), {}).items())]

    def program(self, index: int, parent: int) -> int | None:
        """Return the program of the first filter there."""
        found = sorted(self.attached.get((index, parent), {}).items())
        return found[0][1][1] if found else None

    def replace_qdisc(self, index: int, kind: str, parent: int, handle: int, options: bytes = b"") -> None:
        """See `Network`."""
        self._check(index, f"make '{kind}'")
        if kind == "fq" and not self.has_fq:
            raise KernelError("make 'fq' (Specified qdisc kind is unknown)", errno.ENOENT)
        if parent == CLSACT:
            assert index not in self.clsact | self.ingress
            self.clsact.add(index)
        elif self.present[index].name in self.unqueueing and kind == "fq":
            raise KernelError("make 'fq'", errno.EOPNOTSUPP)
        elif parent == ROOT:
            children = [Qdisc(self.default, 0, handle | number + 1) for number in range(self.queues.get(index, 1))]
            self.roots[index] = [Qdisc(kind, handle, ROOT), *(children if kind == "mq" else [])]
        else:
            root = self.qdiscs_of(index)[0]
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

    def replace_filter(self, index: int, parent: int, filter: Filter, program: int) -> None:
        """See `Network`."""
        self._check(index, f"attach {filter.name} {program}")
        assert index in self.clsact
        there = self.attached.setdefault((index, parent), {})
        if filter.priority in there:
            assert there[filter.priority][0].handle == filter.handle
        there[filter.priority] = (filter, program)

    def delete_filter(self, index: int, parent: int, filter: Filter) -> None:
        """See `Network`."""
        self._check(index, "delete a filter")
        assert self.attached[index, parent].pop(filter.priority)[0] == filter

    def _check(self, index: int, what: str) -> None:
        if index not in self.present:
            raise KernelError(what, errno.ENODEV)
        if self.present[index].name in self.refusing:
            raise KernelError(what, errno.EOPNOTSUPP)
        self.log.append(f"{self.present[index].name}: {what}")
