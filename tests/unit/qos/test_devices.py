"""Our filters and queues on devices: what is chosen, what is replaced, and that all of it goes again."""

from __future__ import annotations

import errno

import msgspec
import pytest
from support.fake_netlink import FakeNetwork

from seedance.errors import KernelError
from seedance.qos.devices import FILTER_HANDLE, HANDLE, Choice, DeviceLimits, DevicePrograms, choose, fq_options
from seedance.qos.netlink import CLSACT, EGRESS, INGRESS, ROOT, Device, Filter, Qdisc

LO = Device(1, "lo", is_loopback=True)
ETH = Device(2, "eth0")
PACE, POLICE, CONNECTIONS = 101, 102, 103
EGRESS_PROGRAMS = DevicePrograms(pace=PACE, police=POLICE)
ALL_PROGRAMS = DevicePrograms(pace=PACE, police=POLICE, connections=CONNECTIONS)


def limits(
    network: FakeNetwork, *wanted: str, name: str = "seedance", programs: DevicePrograms = EGRESS_PROGRAMS
) -> DeviceLimits:
    return DeviceLimits(network, name, wanted, 2.0, programs)


def kinds(network: FakeNetwork, index: int) -> list[str]:
    return [qdisc.kind for qdisc in network.qdiscs_of(index)]


@pytest.mark.parametrize(
    ("qdiscs", "choice"),
    [
        ([], Choice.TAKES_FQ),
        ([Qdisc("noqueue", 0, ROOT)], Choice.TAKES_FQ),
        ([Qdisc("fq_codel", 0, ROOT), Qdisc("clsact", 0xFFFF0000, CLSACT)], Choice.TAKES_FQ),
        ([Qdisc("fq_codel", 0x80010000, ROOT)], Choice.FOREIGN),
        ([Qdisc("htb", 0x10000, ROOT), Qdisc("fq", 0x100000, 0x10001)], Choice.FOREIGN),
        ([Qdisc("fq", 0, ROOT)], Choice.PACES),
        ([Qdisc("fq", 0x80010000, ROOT)], Choice.PACES),
        ([Qdisc("fq", HANDLE, ROOT)], Choice.PACES),
        ([Qdisc("mq", 0, ROOT), Qdisc("fq_codel", 0, 1), Qdisc("fq_codel", 0, 2)], Choice.TAKES_MQ),
        ([Qdisc("mq", 0, ROOT), Qdisc("fq", 0, 1), Qdisc("fq", 0, 2)], Choice.PACES),
        (
            [Qdisc("mq", HANDLE, ROOT), Qdisc("fq", 0x80020000, HANDLE | 1), Qdisc("pfifo", 0, HANDLE | 2)],
            Choice.FILL_MQ,
        ),
        ([Qdisc("mq", HANDLE, ROOT), Qdisc("fq", 0x80020000, HANDLE | 1)], Choice.PACES),
        ([Qdisc("mq", 0x10000, ROOT), Qdisc("fq_codel", 0, 0x10001)], Choice.FOREIGN),
    ],
)
def test_choice(qdiscs: list[Qdisc], choice: Choice) -> None:
    assert choose(qdiscs)[0] is choice


def test_fq_options() -> None:
    assert fq_options(2.0).hex() == "08000100a0860100" + "08000200e8030000" + "08000e0080969800"
    assert fq_options(30.0)[-4:] == (60_000_000).to_bytes(4, "little")


class TestPacing:
    def test_every_device_that_is_up(self) -> None:
        network = FakeNetwork(LO, ETH, Device(3, "eth1", is_up=False))
        found = limits(network)
        found.update()
        for device in (LO, ETH):
            assert network.qdiscs_of(device.index)[0] == Qdisc("fq", HANDLE, ROOT)
            assert network.program(device.index, EGRESS) == PACE
            assert network.program(device.index, INGRESS) is None
        assert 3 not in network.clsact
        assert found.notes == {}
        assert found.attachments() == [
            "lo: egress paced by 'seedance_egress' before fq of ours",
            "eth0: egress paced by 'seedance_egress' before fq of ours",
        ]

    def test_looking_again_changes_nothing(self) -> None:
        network = FakeNetwork(LO, ETH)
        network.queues[2] = 4
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        network.log.clear()
        found.update()
        assert network.log == []

    def test_hardware_queues(self) -> None:
        network = FakeNetwork(ETH)
        network.queues[2] = 3
        limits(network).update()
        assert kinds(network, 2) == ["mq", "fq", "fq", "fq", "clsact"]
        assert network.program(2, EGRESS) == PACE

    def test_a_queue_of_an_administrator_is_left_alone(self) -> None:
        network = FakeNetwork(ETH)
        network.configure(2, "htb")
        found = limits(network)
        found.update()
        assert kinds(network, 2) == ["htb", "clsact"]
        assert network.program(2, EGRESS) == POLICE
        assert "its queue 'htb' was configured by somebody" in found.notes["eth0"]
        assert found.attachments() == ["eth0: egress policed by 'seedance_egress' before htb"]

    def test_an_fq_of_an_administrator_paces(self) -> None:
        network = FakeNetwork(ETH)
        network.configure(2, "fq")
        found = limits(network)
        found.update()
        assert network.qdiscs_of(2)[0].handle != HANDLE
        assert network.program(2, EGRESS) == PACE
        assert found.notes == {}

    def test_an_administrator_comes_later(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        network.configure(2, "tbf")
        found.update()
        assert network.program(2, EGRESS) == POLICE
        del network.roots[2]
        found.update()
        assert network.program(2, EGRESS) == PACE
        assert found.notes == {}

    @pytest.mark.parametrize("queues", [1, 3])
    def test_a_kernel_without_fq_polices(self, queues: int) -> None:
        network = FakeNetwork(LO, ETH, has_fq=False)
        network.queues[2] = queues
        found = limits(network)
        found.update()
        assert network.program(2, EGRESS) == POLICE
        assert network.qdiscs_of(2)[0].handle == 0
        assert found.notes == {"egress": "policed, not paced: this kernel has no sch_fq"}

    def test_our_filter_is_put_back(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        network.delete_qdisc(2, CLSACT, 0)
        found.update()
        assert network.program(2, EGRESS) == PACE


class TestDevices:
    def test_one_that_comes_later(self) -> None:
        network = FakeNetwork(LO)
        found = limits(network)
        found.update()
        network.present[2] = ETH
        found.update()
        assert network.program(2, EGRESS) == PACE

    def test_one_that_goes_and_another_takes_its_number(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        del network.present[2]
        found.update()
        assert found.attachments() == []
        network.present[2] = Device(2, "eth9")
        for forgotten in (network.roots, network.clsact, network.attached):
            forgotten.clear()
        found.update()
        assert network.program(2, EGRESS) == PACE

    def test_one_that_goes_while_we_look(self) -> None:
        network = FakeNetwork(LO, ETH)
        found = limits(network)

        class Vanishing(dict[int, Device]):
            def __contains__(self, index: object) -> bool:
                return index != 2 and super().__contains__(index)

        network.present = Vanishing(network.present)
        found.update()
        assert network.program(1, EGRESS) == PACE
        assert found.notes == {}

    def test_one_that_refuses_is_named_and_the_others_go_on(self) -> None:
        network = FakeNetwork(ETH, LO)
        network.refusing = {"eth0"}
        found = limits(network)
        found.update()
        assert found.notes == {
            "eth0": "cannot make 'clsact': Operation not supported (errno 95), so its traffic is not limited"
        }
        assert network.program(1, EGRESS) == PACE

    def test_all_queues_are_asked_for_at_once(self) -> None:
        network = FakeNetwork(LO, *(Device(index, f"eth{index}") for index in range(2, 50)), has_fq=False)
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        assert network.dumps == 1
        found.update()
        assert network.dumps == 2

    @pytest.mark.parametrize("has_fq", [False, True])
    def test_one_that_takes_no_fq_is_not_asked_again(self, has_fq: bool) -> None:
        network = FakeNetwork(ETH, has_fq=has_fq)
        network.unqueueing = {"eth0"} if has_fq else set()
        network.queues[2] = 4
        found = limits(network)
        found.update()
        network.log.clear()
        found.update()
        assert network.log == []
        assert "policed, not paced" in found.notes["eth0" if has_fq else "egress"]
        assert network.program(2, EGRESS) == POLICE
        network.configure(2, "fq")
        found.update()
        assert network.program(2, EGRESS) == PACE

    def test_one_with_the_forerunner_of_clsact_is_left_alone(self) -> None:
        network = FakeNetwork(ETH, LO)
        network.ingress = {2}
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        assert network.log == ["lo: make 'clsact'", "lo: attach seedance_egress 102", *network.log[2:]]
        assert not [line for line in network.log if line.startswith("eth0")]
        reason = "cannot make 'clsact' where somebody has put 'ingress'; `tc qdisc del dev eth0 ingress` makes room"
        assert found.off["egress"] == f"device 'eth0': {reason}: File exists (errno 17)"
        assert found.notes["eth0"].startswith(reason)
        found.remove()
        assert kinds(network, 2) == ["fq_codel", "ingress"]
        network.ingress.clear()
        found.update()
        assert found.off == {}
        assert network.program(2, EGRESS) == PACE

    def test_what_fails_on_a_device_says_which_limit_is_off(self) -> None:
        network = FakeNetwork(ETH, Device(3, "eth1"), LO, Device(4, "down0", is_up=False), Device(5, "other0"))
        network.refusing = {"eth0", "eth1", "down0", "other0"}
        found = limits(network, "eth0", "eth1", "lo", "down0", programs=ALL_PROGRAMS)
        found.update()
        reason = "cannot make 'clsact': Operation not supported (errno 95)"
        assert found.off == dict.fromkeys(
            ("egress", "new_connections"), f"device 'eth0': {reason}; device 'eth1': {reason}"
        )
        network.refusing.clear()
        found.update()
        assert found.off == {}

    def test_only_those_that_are_wanted(self) -> None:
        network = FakeNetwork(LO, ETH)
        found = limits(network, "eth0", "eth7")
        found.update()
        assert network.clsact == {2}
        assert found.notes == {"eth7": "there is no such network device yet"}

    def test_new_connections_are_never_policed_on_loopback(self) -> None:
        network = FakeNetwork(LO, ETH)
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        assert network.program(1, INGRESS) is None
        assert network.program(2, INGRESS) == CONNECTIONS
        assert found.attachments()[1].endswith("; new connections policed by 'seedance_connections'")


class TestPorts:
    """What goes out through a bridge passes its port's filters and queue, too."""

    BRIDGE = Device(3, "br0", kind="bridge")
    PORT = Device(2, "eth0", master=3)

    def test_the_queue_of_a_port_is_left_alone(self) -> None:
        network = FakeNetwork(self.PORT, self.BRIDGE)
        found = limits(network)
        found.update()
        assert kinds(network, 2) == ["fq_codel", "clsact"]
        assert kinds(network, 3) == ["fq", "clsact"]
        assert network.program(2, EGRESS) == POLICE
        assert network.program(3, EGRESS) == PACE
        assert found.notes == {}

    @pytest.mark.parametrize(
        "master", [msgspec.structs.replace(BRIDGE, is_up=False), msgspec.structs.replace(BRIDGE, kind="vrf")]
    )
    def test_unless_nothing_is_paced_above_it(self, master: Device) -> None:
        network = FakeNetwork(self.PORT, master)
        limits(network).update()
        assert network.program(2, EGRESS) == PACE

    def test_unless_the_port_alone_is_wanted(self) -> None:
        network = FakeNetwork(self.PORT, self.BRIDGE)
        limits(network, "eth0").update()
        assert network.program(2, EGRESS) == PACE


class TestFiltersOfOthers:
    def test_ours_comes_first(self) -> None:
        network = FakeNetwork(ETH)
        network.replace_qdisc(2, "clsact", CLSACT, 0)
        network.replace_filter(2, EGRESS, Filter(49152, 1, "somebody"), 7)
        found = limits(network)
        found.update()
        assert network.filters(2, EGRESS) == [
            Filter(1, FILTER_HANDLE, "seedance_egress"),
            Filter(49152, 1, "somebody"),
        ]
        assert found.notes == {}

    @pytest.mark.parametrize(("other", "named"), [("somebody", "somebody"), ("", "flower")])
    def test_unless_one_is_there_already(self, other: str, named: str) -> None:
        network = FakeNetwork(ETH)
        network.replace_qdisc(2, "clsact", CLSACT, 0)
        network.replace_filter(2, EGRESS, Filter(1, 1, other, "bpf" if other else "flower"), 7)
        found = limits(network)
        for _ in range(2):
            found.update()
            assert [one.priority for one in network.filters(2, EGRESS)] == [1, 2]
            assert found.notes == {"eth0": f"its traffic may not be limited: the filter '{named}' comes first"}

    def test_one_at_our_priority_is_not_taken_for_ours(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        (ours,) = network.filters(2, EGRESS)
        network.delete_filter(2, EGRESS, ours)
        network.replace_filter(2, EGRESS, Filter(ours.priority, 1, "somebody"), 7)
        found.update()
        assert [one.name for one in network.filters(2, EGRESS)] == ["somebody", "seedance_egress"]
        found.remove()
        assert [one.name for one in network.filters(2, EGRESS)] == ["somebody"]


class TestTakingOver:
    def test_what_is_not_wanted_any_more_goes(self) -> None:
        network = FakeNetwork(LO, ETH, Device(3, "eth1"))
        limits(network, programs=ALL_PROGRAMS).update()
        limits(network, "eth0").update()
        assert network.clsact == {2}
        assert network.program(2, EGRESS) == PACE
        assert network.program(2, INGRESS) is None
        assert kinds(network, 3) == ["fq_codel"]

    def test_what_is_not_wanted_but_stuck_is_a_note(self) -> None:
        network = FakeNetwork(LO, ETH)
        limits(network).update()
        network.refusing = {"eth0"}
        found = limits(network, "lo")
        found.update()
        assert found.notes == {"eth0": "cannot delete a queue: Operation not supported (errno 95)"}
        assert network.program(1, EGRESS) == PACE

    def test_the_programs_of_a_former_run_are_replaced(self) -> None:
        network = FakeNetwork(ETH)
        limits(network).update()
        network.log.clear()
        limits(network, programs=DevicePrograms(pace=201, police=202)).update()
        assert network.program(2, EGRESS) == 201
        # The filter is replaced in place, and never by the one that polices.
        assert network.log == ["eth0: make 'fq'", "eth0: attach seedance_egress 201"]

    def test_another_daemons_filter_is_left_alone(self) -> None:
        network = FakeNetwork(ETH)
        limits(network).update()
        other = limits(network, name="other", programs=DevicePrograms(pace=201, police=202))
        other.update()
        assert network.program(2, EGRESS) == PACE
        assert "the filter 'seedance_egress' of another seedanced is there" in other.notes["eth0"]
        assert other.remove() == []
        assert network.program(2, EGRESS) == PACE
        assert kinds(network, 2) == ["fq", "clsact"]


class TestRemoval:
    @pytest.mark.parametrize("queues", [1, 3])
    def test_everything_is_as_before(self, queues: int) -> None:
        network = FakeNetwork(LO, ETH)
        network.queues[2] = queues
        before = {index: network.qdiscs_of(index) for index in (1, 2)}
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        assert len(found.remove()) == 5
        assert {index: network.qdiscs_of(index) for index in (1, 2)} == before
        assert not any(network.attached.values())

    def test_by_somebody_who_did_not_attach_it(self) -> None:
        network = FakeNetwork(ETH)
        limits(network).update()
        assert DeviceLimits(network, "seedance").remove() == ["queue of eth0", "filter 'seedance_egress' of eth0"]
        assert kinds(network, 2) == ["fq_codel"]

    def test_filters_of_others_keep_their_clsact(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        network.replace_filter(2, INGRESS, Filter(1, 1, "somebody"), 7)
        found.remove()
        assert 2 in network.clsact
        assert network.program(2, INGRESS) == 7

    def test_an_administrators_queue_stays(self) -> None:
        network = FakeNetwork(ETH)
        network.configure(2, "htb")
        found = limits(network)
        found.update()
        assert found.remove() == ["filter 'seedance_egress' of eth0"]
        assert kinds(network, 2) == ["htb"]

    def test_a_device_that_refuses_is_an_error_when_all_others_are_done(self) -> None:
        network = FakeNetwork(ETH, Device(3, "eth1"), LO)
        found = limits(network)
        found.update()
        network.refusing = {"eth0"}
        with pytest.raises(KernelError) as caught:
            found.remove()
        assert caught.value.errno == errno.EOPNOTSUPP
        assert network.clsact == {2}
