"""A buffer is in exactly one state, and never lent while an operation on it is open."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from seedance.daemon.ring.pool import Buffer, BufferPool, BufferState

COUNT = 4


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(COUNT, 64)
        self.lent_count = 0
        self.open: dict[Buffer, int] = {}

    lent: Bundle[Buffer | None] = Bundle("lent")

    @rule(target=lent)
    def lend(self) -> Buffer | None:
        buffer = self.pool.lend()
        assert (buffer is None) == (self.lent_count + len(self.open) == COUNT)
        if buffer is not None:
            assert buffer not in self.open
            self.lent_count += 1
        return buffer

    @rule(buffer=consumes(lent), references=st.integers(1, 300))
    def submit(self, buffer: Buffer | None, references: int) -> None:
        if buffer is not None:
            self.pool.give_to_kernel(buffer, references)
            self.lent_count -= 1
            self.open[buffer] = references

    @rule(data=st.binary(max_size=64), references=st.integers(1, 300))
    def load(self, data: bytes, references: int) -> None:
        buffer = self.pool.load(data, references)
        assert (buffer is None) == (self.lent_count + len(self.open) == COUNT)
        if buffer is not None:
            assert buffer.read(0, len(data)) == data
            self.open[buffer] = references

    @rule(buffer=consumes(lent))
    def give_back(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self.pool.give_back(buffer)
            self.lent_count -= 1

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if self.open:
            buffer = data.draw(st.sampled_from(sorted(self.open, key=lambda one: one.offset)))
            count = data.draw(st.integers(1, self.open[buffer]))
            self.pool.complete(buffer, count)
            self.open[buffer] -= count
            if not self.open[buffer]:
                del self.open[buffer]
                assert buffer.state is BufferState.FREE

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.free + self.lent_count + len(self.open) == COUNT
        assert all(buffer.state is BufferState.IN_KERNEL for buffer in self.open)


TestPool = PoolMachine.TestCase
