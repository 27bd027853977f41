"""The hash buckets: one prime a (layer, order, head), laid end to end in a layer's table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reference.config import EngramConfig


class PrimeLayout:
    """Lay out the buckets of every layer's table.

        offset[l, c] = sum of primes[l, c'] over columns c' < c,   column c = (n - 2) * H + h

    Args:
        config: the model's Engram configuration.

    Attributes:
        primes: `[L, N-1, H]` int64; the number of buckets of layer l, order n = 2..N (index n - 2), head h.
        offsets: `[L, C]` int64; a column's first row in its layer's table.
        rows: `[L]` int64; the rows in use of a layer's table, the sum of its primes.

    Source: the DeepSeek-V4.1-Flash config, whose `engram_num_embeddings` are these sums.
    """

    def __init__(self, config: EngramConfig) -> None:
        self.primes = np.array(
            bucket_primes(
                len(config.engram_layer_ids),
                config.engram_max_ngram_size - 1,
                config.engram_n_heads,
                config.engram_vocab_size,
            ),
            dtype=np.int64,
        )
        sizes = self.primes.reshape(len(self.primes), -1)
        self.offsets = np.cumsum(sizes, axis=1) - sizes
        self.rows = sizes.sum(axis=1)


@lru_cache(maxsize=64)
def bucket_primes(layers: int, orders: int, heads: int, engram_vocab_size: int) -> tuple:
    """Hand out the primes in the order layer, n-gram order, head.

    For every (layer, order) the search starts again at `engram_vocab_size`, and what was handed out before, to
    whichever layer, order or head, is passed over.

    Returns:
        nested tuples of ints, `[layers][orders][heads]`.
    """
    taken: set[int] = set()

    def next_free(candidates: Iterator[int]) -> int:
        prime = next(number for number in candidates if number not in taken and _is_prime(number))
        taken.add(prime)
        return prime

    layout = []
    for _ in range(layers):
        layer = []
        for _ in range(orders):
            candidates = count(engram_vocab_size)
            layer.append(tuple(next_free(candidates) for _ in range(heads)))
        layout.append(tuple(layer))
    return tuple(layout)


@lru_cache(maxsize=1 << 16)
def _is_prime(number: int) -> bool:
    # Trial division: the numbers are below 2^31, so at most 23,170 odd divisors, and nothing to take on trust.
    if number < 4:
        return number >= 2
    if number % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True
