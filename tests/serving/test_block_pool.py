"""Blocks are neither lost nor handed out twice."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Take, share and release at will, beside a list of holds and a list of free blocks."""

    @initialize(order=st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))))
    def make(self, order: list[int]) -> None:
        self.pool, self.holds, self.free = BlockPool(order), [], list(order)
        self.taken = [0] * len(order)

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.free.pop(0)
        self.holds.append(block)
        self.taken[block] += 1

    @precondition(lambda self: not self.free)
    @rule()
    def take_from_none(self) -> None:
        with pytest.raises(RuntimeError, match="got none free"):
            self.pool.take()

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.share(block)
        self.holds.append(block)
        if block in self.free:
            self.free.remove(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(block)
        if block not in self.holds:
            self.free.append(block)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free))
        with pytest.raises(RuntimeError, match=f"block {block}: got a release of a free block"):
            self.pool.release(block)

    @invariant()
    def every_block_is_free_xor_referenced(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_blocks == tuple(self.free)
        assert self.pool.num_free == len(self.free)
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == self.holds.count(block)
            assert (self.pool.references(block) == 0) == (block in self.free)
            assert self.pool.owners(block) == self.taken[block]


TestPoolConserves = PoolMachine.TestCase


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [-1, 0]])
def test_order_is_a_permutation(order: list[int]) -> None:
    """A block that is missing or doubled in the first order is refused."""
    with pytest.raises(ValueError, match=r"order: got .*, expected every block number"):
        BlockPool(order)
