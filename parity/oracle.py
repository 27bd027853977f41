"""The oracle of the oracle: one hash row in unbounded Python integers, straight from the definition.

Nothing is shared with `reference`: no import, no helper, no array. Only the stream of NumPy's generator, which the
definition of the multipliers names, is NumPy's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class IntegerOracle:
    """Hash any position of any request of one configuration.

    Args:
        config: the model's Engram configuration, or anything with its fields.
        token_map: `[V]` compressed ids.
    """

    def __init__(self, config: Any, token_map: Sequence[int]) -> None:
        self._map = token_map
        self._pad = int(token_map[config.engram_pad_token_id])
        self._orders = range(2, config.engram_max_ngram_size + 1)
        self._heads = config.engram_n_heads
        self.multipliers = [
            odd_numbers(layer_id, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
            for layer_id in config.engram_layer_ids
        ]
        self.primes = prime_table(
            len(config.engram_layer_ids), len(self._orders), self._heads, config.engram_vocab_size
        )

    def row(self, tokens: Sequence[int], dead: Sequence[bool], position: int) -> list[list[int]]:
        """Hash the token at a position: `[L][C]`, from the token ids and flags of its own request alone."""
        values: list[int] = []
        inside = True
        for back in range(self._orders[-1]):
            at = position - back
            inside = inside and at >= 0 and not dead[at]
            values.append(int(self._map[tokens[at]]) if inside else self._pad)
        rows = []
        for layer, odd in enumerate(self.multipliers):
            row: list[int] = []
            start = 0
            for order in self._orders:
                mix = 0
                for value, factor in zip(values[:order], odd, strict=False):
                    mix ^= value * factor
                for prime in self.primes[layer][order - 2]:
                    row.append(start + mix % prime)
                    start += prime
            rows.append(row)
        return rows


def odd_numbers(layer_id: int, compressed: int, count: int) -> list[int]:
    """Draw a layer's multipliers as the definition says, newest token first."""
    largest = 2**63 - 1
    drawn = np.random.default_rng(10007 * layer_id).integers(0, max(1, largest // compressed // 2), count, np.int64)
    return [2 * int(number) + 1 for number in drawn]


def prime_table(layers: int, orders: int, heads: int, start: int) -> list[list[list[int]]]:
    """Hand out primes, layer by layer and order by order, each search from `start`, none twice: sieved, not divided."""
    wanted = layers * orders * heads
    width = 64 * wanted + 1024
    while True:
        primes = _sieve(start, start + width)
        if len(primes) >= wanted:
            break
        width *= 2
    # Since each search passes over what is taken, the searches together walk the primes in rising order.
    walk = iter(primes)
    return [[[next(walk) for _ in range(heads)] for _ in range(orders)] for _ in range(layers)]


def _sieve(low: int, high: int) -> list[int]:
    is_prime = bytearray([1]) * (high - low)
    for divisor in range(2, int(high**0.5) + 2):
        first = max(divisor * divisor, -(-low // divisor) * divisor)
        for multiple in range(first, high, divisor):
            is_prime[multiple - low] = 0
    return [number for number in range(max(low, 2), high) if is_prime[number - low]]
