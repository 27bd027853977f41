"""One stream of random numbers for everything that is random here."""

import random
from collections.abc import Sequence
from typing import TypeVar

from serving.checks import check_int

Item = TypeVar("Item")


class Rng:
    """Draw from one seed, the same on every machine and Python version.

    Only `random.Random(seed).getrandbits` is used: its stream is kept, while those of `shuffle`, `choice`
    and NumPy's generators may change between versions.

    Args:
        seed: an int of at least 0 (the sign of a seed would be lost).
    """

    def __init__(self, seed: int) -> None:
        self._bits = random.Random(check_int("seed", seed, 0)).getrandbits

    def below(self, n: int) -> int:
        """Draw an int in [0, n), each equally likely: draws of the bits of n - 1 until one is below n."""
        width = (check_int("n", n, 1) - 1).bit_length()
        drawn = self._bits(width) if width else 0
        while drawn >= n:
            drawn = self._bits(width)
        return drawn

    def chance(self, numerator: int, denominator: int) -> bool:
        """Draw True with probability numerator / denominator."""
        check_int("numerator", numerator, 0, denominator)
        return self.below(denominator) < numerator

    def pick(self, items: Sequence[Item]) -> Item:
        """Draw one of the items, each equally likely; an empty sequence is refused."""
        return items[self.below(len(items))]

    def permutation(self, n: int) -> list[int]:
        """Draw an order of 0 .. n-1, each equally likely (Fisher and Yates, from the end)."""
        order = list(range(check_int("n", n, 0)))
        for last in range(n - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
