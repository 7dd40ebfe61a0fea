from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.decode_group import DecodeGroup

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 4


class Member:
    def __init__(self, computed: int) -> None:
        self.computed = computed
        self.joined = 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.integers(0, 50)),
            st.tuples(st.sampled_from(["leave", "put_back"]), st.integers(0, 50)),
            st.tuples(st.just("advance"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_it_counts_as_if_each_member_were_counted(events: list[tuple[str, int]]) -> None:
    group = DecodeGroup(BLOCK_TOKENS)
    members: list[tuple[Member, list[int]]] = []
    has_advanced = False
    for event, number in events:
        if event == "join":
            members.append((Member(number), [number]))
            group.join(members[-1][0])
        elif event == "advance":
            due = sum(position[0] % BLOCK_TOKENS == 0 for _, position in members)
            assert group.growth() == due
            assert group.advance() == due
            for _, position in members:
                position[0] += 1
        elif members:
            member, position = members[number % len(members)]
            if event == "leave":
                group.leave(member)
                assert member.computed == position[0]
                members.remove((member, position))
            elif has_advanced and position[0] > 0:
                position[0] -= 1
                assert group.put_back(member) == (position[0] % BLOCK_TOKENS == 0)
        has_advanced = event == "advance"
        assert group.size == len(members)
        assert group.context_tokens == sum(position[0] for _, position in members)
        assert [group.position(member) for member, _ in members] == [position[0] for _, position in members]
