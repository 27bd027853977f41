"""The physical blocks of the KV cache: who holds one, and which is reused next."""

from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Hand out blocks, counting references; every block is either free or referenced.

    The free list is in least-recently-freed order: the block that has been free for longest is reused first, so a
    freed block keeps what stands in it for as long as possible.

    Args:
        order: the block numbers 0 .. n-1 in the order in which they are first handed out.
        null_block: whether block 0 is kept back, to stand in tables where a block was given up.

    Raises:
        ValueError: order is not a permutation of 0 .. n-1.
    """

    def __init__(self, order: Sequence[int], *, null_block: bool = False) -> None:
        if sorted(order) != list(range(len(order))):
            raise ValueError(f"order: got {order}, expected every block number below {len(order)} once")
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(order)
        if null_block:
            del self._free[NULL_BLOCK]
        self.num_usable = len(self._free)
        self._references = [0] * len(order)
        self._owners = [0] * len(order)
        self._aborted: set[int] = set()
        self._from_aborted = [False] * len(order)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """How many blocks nobody references."""
        return len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks, the one to be reused next first."""
        return tuple(self._free)

    def references(self, block: int) -> int:
        """How many requests hold this block."""
        return self._references[block]

    def owners(self, block: int) -> int:
        """How often this block was handed out afresh, now included: 2 or more is a reused block."""
        return self._owners[block]

    def take(self) -> int:
        """Hand out the block that has been free for longest, with one reference.

        Raises:
            RuntimeError: no block is free.
        """
        if not self._free:
            raise RuntimeError(f"blocks: got none free of {self.num_blocks}, expected one; admission must prevent this")
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        self._owners[block] += 1
        self._from_aborted[block] = block in self._aborted
        self._aborted.discard(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block whose content is wanted; a free one comes back to life as it is."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def from_aborted(self, block: int) -> bool:
        """Whether a request that was aborted held this block last, before it was handed out afresh."""
        return self._from_aborted[block]

    def release(self, block: int, *, aborted: bool = False) -> None:
        """Drop a reference; the last one puts the block at the end of the free list.

        Args:
            block: its number.
            aborted: whether its holder was aborted.

        Raises:
            RuntimeError: nobody references the block.
        """
        if self._references[block] == 0:
            raise RuntimeError(f"block {block}: got a release of a free block, expected a reference to drop")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if aborted:
                self._aborted.add(block)
