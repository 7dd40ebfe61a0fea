"""Our filters and queues on devices: what is chosen, what is replaced, and that all of it goes again."""

from __future__ import annotations

import errno

import pytest
from support.fake_netlink import FakeNetwork

from seedance.errors import KernelError
from seedance.qos.devices import HANDLE, PRIORITY, Choice, DeviceLimits, DevicePrograms, choose, fq_options
from seedance.qos.netlink import CLSACT, EGRESS, INGRESS, ROOT, Device, Qdisc

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
    return [qdisc.kind for qdisc in network.qdiscs(index)]


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
    assert fq_options(2.0).hex() == "08000100a0860100" + "0800020010270000" + "08000e0080969800"
    assert fq_options(30.0)[-4:] == (60_000_000).to_bytes(4, "little")


class TestPacing:
    def test_every_device_that_is_up(self) -> None:
        network = FakeNetwork(LO, ETH, Device(3, "eth1", is_up=False))
        found = limits(network)
        found.update()
        for device in (LO, ETH):
            assert network.qdiscs(device.index)[0] == Qdisc("fq", HANDLE, ROOT)
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
        assert network.qdiscs(2)[0].handle != HANDLE
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
        assert network.qdiscs(2)[0].handle == 0
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


class TestTakingOver:
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
        before = {index: network.qdiscs(index) for index in (1, 2)}
        found = limits(network, programs=ALL_PROGRAMS)
        found.update()
        assert len(found.remove()) == 5
        assert {index: network.qdiscs(index) for index in (1, 2)} == before
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
        network.replace_filter(2, INGRESS, 1, "somebody", 7)
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

    def test_a_device_that_refuses_is_an_error(self) -> None:
        network = FakeNetwork(ETH)
        found = limits(network)
        found.update()
        network.refusing = {"eth0"}
        with pytest.raises(KernelError) as caught:
            found.remove()
        assert caught.value.errno == errno.EOPNOTSUPP


def test_priority_and_handle_say_the_same() -> None:
    assert HANDLE >> 16 == PRIORITY
