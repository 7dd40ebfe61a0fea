"""Tags and their owners."""

from __future__ import annotations

import pytest

from seedance.daemon.ring.operations import TAG_MASK, Owners


def test_an_owner_is_found_by_its_tag_and_its_place_used_again() -> None:
    owners: Owners[str] = Owners()
    first, second = owners.new_tag(), owners.new_tag()
    owners.put(first, "first")
    owners.put(second, "second")
    assert (owners.get(first), owners.get(second)) == ("first", "second")
    owners.remove(first)
    third = owners.new_tag()
    owners.put(third, "third")
    assert third != first
    assert third & 0xFFFFFFFF == first & 0xFFFFFFFF, "the place was not used again"
    assert owners.get(third) == "third"
    with pytest.raises(AssertionError):
        owners.get(first)
    assert sorted(owners.all()) == ["second", "third"]


def test_tags_stay_below_the_kind() -> None:
    owners: Owners[int] = Owners()
    for number in range(1000):
        tag = owners.new_tag()
        assert 0 < tag <= TAG_MASK
        owners.put(tag, number)
        owners.remove(tag)
