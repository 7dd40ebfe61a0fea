"""Where our part of the cgroup tree is."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.qos.cgroup_site import Mounts, Site, choose_site, is_delegated, parse_mounts, parse_own_group

MOUNT = Path("/sys/fs/cgroup")
MOUNTS = Mounts(MOUNT, "/", frozenset())
UNIT = MOUNT / "seedance.slice/seedanced.service"

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""


def choose(own: str | None, *ours: Path, wanted: str = "", mounts: Mounts = MOUNTS, is_root: bool = True) -> Site | str:
    return choose_site(mounts, own, wanted, "seedance", lambda path: path in ours, is_root=is_root)


def test_mounts() -> None:
    assert parse_mounts(HYBRID) == Mounts(Path("/sys/fs/cgroup/unified"), "/", frozenset(("rw", "cpu", "cpuacct")))
    assert parse_mounts("").path is None


def test_a_mount_of_our_own_group_in_the_mount_of_all() -> None:
    own = "50 30 0:26 /x.slice/y.service /sys/fs/cgroup/x.slice/y.service rw - cgroup2 cgroup2 rw\n"
    every = "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"
    expected = Mounts(Path("/sys/fs/cgroup"), "/", frozenset())
    assert parse_mounts(every + own) == parse_mounts(own + every) == expected


def test_own_group() -> None:
    assert parse_own_group("4:memory:/m\n0::/user.slice/x\n") == "/user.slice/x"
    assert parse_own_group("4:memory:/m\n") is None


class TestChoice:
    def test_a_unit_that_may_divide_its_group(self) -> None:
        site = choose("/seedance.slice/seedanced.service", UNIT)
        slice_ = MOUNT / "seedance.slice"
        assert site == Site(mount=MOUNT, top=UNIT, made=False, sockets=slice_, origin=UNIT)

    def test_a_unit_that_was_started_in_the_supervisors_part(self) -> None:
        site = choose("/seedance.slice/seedanced.service/supervisor", UNIT)
        assert isinstance(site, Site)
        assert (site.top, site.origin, site.made) == (UNIT, UNIT / "supervisor", False)

    def test_a_slice_of_others_is_not_ours_to_attach_to(self) -> None:
        group = MOUNT / "system.slice/seedanced.service"
        site = choose("/system.slice/seedanced.service", group)
        assert isinstance(site, Site)
        assert site.sockets == group

    @pytest.mark.parametrize(("slice_", "ours"), [("second.slice", True), ("user.slice", False), ("plain", False)])
    def test_any_other_slice_has_our_sockets_too(self, slice_: str, ours: bool) -> None:
        group = MOUNT / slice_ / "seedanced.service"
        site = choose(f"/{slice_}/seedanced.service", group)
        assert isinstance(site, Site)
        assert site.sockets == (group.parent if ours else group)

    def test_root_in_any_other_group_makes_one(self) -> None:
        site = choose("/user.slice/session-1.scope")
        top = MOUNT / "seedance"
        origin = MOUNT / "user.slice/session-1.scope"
        assert site == Site(mount=MOUNT, top=top, made=True, sockets=top, origin=origin)

    def test_anybody_else_cannot(self) -> None:
        reason = choose("/user.slice/session-1.scope", is_root=False)
        assert isinstance(reason, str)
        assert "may not divide its cgroup '/user.slice/session-1.scope'" in reason
        assert "Delegate=yes" in reason

    @pytest.mark.parametrize("wanted", ["/ours/here", "ours/here", "/sys/fs/cgroup/ours/here"])
    def test_a_group_of_the_operators_choice(self, wanted: str) -> None:
        site = choose("/", wanted=wanted)
        assert isinstance(site, Site)
        assert site.top == MOUNT / "ours/here"
        assert site.made
        assert isinstance(given := choose("/", MOUNT / "ours/here", wanted=wanted), Site)
        assert not given.made

    def test_a_mount_that_shows_a_part_of_the_tree(self) -> None:
        site = choose("/docker/abc/inner", mounts=Mounts(MOUNT, "/docker/abc", frozenset()))
        assert isinstance(site, Site)
        assert site.origin == MOUNT / "inner"

    @pytest.mark.parametrize(("own", "mounts"), [(None, MOUNTS), ("/", Mounts(None, "/", frozenset()))])
    def test_no_cgroup_v2(self, own: str | None, mounts: Mounts) -> None:
        assert choose(own, mounts=mounts) == "this machine has no cgroup v2 mount"


def test_a_folder_without_the_managers_mark_is_not_delegated() -> None:
    assert not is_delegated(Path("/nonexistent"))
