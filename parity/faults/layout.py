"""Mistakes in the constants: multipliers, primes, offsets, and how they are put to use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from parity.faults.fault import plant
from parity.faults.model import Model
from parity.oracle import prime_table
from reference.config import EngramConfig
from reference.prime_layout import PrimeLayout


class _OtherConstants(Model):
    """Hash with constants that are made in another way: a subclass says which in `spoil`."""

    def __init__(self, config: EngramConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.spoil(config)

    def spoil(self, config: EngramConfig) -> None:
        """Put other constants in the place of the right ones."""


def _odd(config: EngramConfig, bound: int, *, seed: int = 0, step: int = 10007) -> torch.Tensor:
    """Draw odd multipliers below 2 * bound, each layer's from seed + step * layer id."""
    count = config.engram_max_ngram_size
    rows = [
        np.random.default_rng(seed + step * layer).integers(0, bound, count, np.int64)
        for layer in config.engram_layer_ids
    ]
    return torch.from_numpy(np.stack(rows) * 2 + 1)


def _bound(config: EngramConfig) -> int:
    return (2**63 - 1) // config.engram_compressed_vocab_size // 2


@plant("C1", "the multipliers are paired with the tokens from the oldest on")
class MultipliersOldestFirst(_OtherConstants):
    """The multipliers are taken to begin with the oldest token; kernel and oracle agreed on it, so no test fell.

    Source: b12x#332. Law: agreement.
    """

    def mix(self, values: torch.Tensor) -> torch.Tensor:
        """Pair the multipliers of each order the wrong way round."""
        mixes = []
        for order in range(2, values.shape[1] + 1):
            factors = self.multipliers[:, :order].flip(1)
            mixed = values[:, 0, None] * factors[:, 0]
            for k in range(1, order):
                mixed = mixed ^ values[:, k, None] * factors[:, k]
            mixes.append(mixed)
        return torch.stack(mixes, 2)


@plant("C2", "the multipliers of a layer are drawn from another seed")
class AnotherSeed(_OtherConstants):
    """The generator is seeded with the layer's id plus a constant, where the id times a constant is meant.

    Source: mlx-lm#1788. Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Seed by a sum."""
        self.multipliers = _odd(config, _bound(config), seed=10007, step=1)


@plant("C3", "all layers hash with the multipliers of the first")
class OneRowOfMultipliers(_OtherConstants):
    """The multipliers are made once, for the first Engram layer, and shared.

    Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Repeat the first layer's."""
        self.multipliers = self.multipliers[:1].expand_as(self.multipliers)


@plant("C4", "the multipliers are drawn below 2^31")
class MultipliersBoundedToInt32(_OtherConstants):
    """The bound of the multipliers is that of int32, so that products stay small; the stream of draws is another then.

    Source: the public MaxText port. Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Draw below the bound of int32."""
        self.multipliers = _odd(config, (2**31 - 1) // 2)


@plant("C5", "the multipliers, which have 47 bits, are kept as int32")
class MultipliersStoredAsInt32(_OtherConstants):
    """The converter stores the multipliers as int32 and loses what is above.

    Source: llama.cpp#28696. Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Keep the low 32 bits."""
        self.multipliers = self.multipliers.int().long()


@plant("C6", "the n-gram is hashed as a polynomial, where products are combined by xor")
class PolynomialHash(Model):
    """An n-gram hash of a textbook, mix * base + id, stands in the place of the one that the table was trained with.

    Law: agreement.
    """

    def mix(self, values: torch.Tensor) -> torch.Tensor:
        """Evaluate a polynomial in the newest token's multiplier."""
        base, mixed, mixes = self.multipliers[:, 0], values[:, 0, None].expand(-1, len(self.multipliers)), []
        for k in range(1, values.shape[1]):
            mixed = (mixed * base + values[:, k, None]) & (2**63 - 1)
            mixes.append(mixed)
        return torch.stack(mixes, 2)


@plant("C7", "the products are added, where they should be combined by xor")
class AddedNotXored(Model):
    """Sum and xor look alike in a formula, and agree where no two products share a bit.

    Law: agreement.
    """

    def mix(self, values: torch.Tensor) -> torch.Tensor:
        """Add the products up."""
        return (values[:, None, :] * self.multipliers).cumsum(2)[:, :, 1:]


@plant("C9", "token ids are hashed without being compressed")
class IdsNotCompressed(_OtherConstants):
    """Raw ids pass the bound that multipliers are made for: products overflow, and a truncating remainder is negative.

    Law: compression.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Map every id to itself."""
        self.token_map = torch.arange(len(self.token_map))

    def reduce(self, mixes: torch.Tensor) -> torch.Tensor:
        """Take the remainder as C does."""
        return torch.fmod(mixes[:, :, :, None], self.primes).flatten(2) + self.offsets


@plant("C10", "each layer has its own set of primes taken, so that layers share primes")
class PrimesPerLayer(_OtherConstants):
    """The set of primes that are taken is emptied at every layer, and all layers get the same ones.

    Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Give every layer the first layer's primes and offsets."""
        self.primes = self.primes[:1].expand_as(self.primes)
        self.offsets = self.offsets[:1].expand_as(self.offsets)


class _Layout(PrimeLayout):
    """Lay primes out that are found from another start or in another way."""

    def __init__(self, config: EngramConfig) -> None:
        layers, orders, heads = len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads
        self.primes = np.array(self.hand_out(layers, orders, heads, config.engram_vocab_size), np.int64)
        sizes = self.primes.reshape(layers, -1)
        self.offsets, self.rows = np.cumsum(sizes, axis=1) - sizes, sizes.sum(axis=1)

    def hand_out(self, layers: int, orders: int, heads: int, start: int) -> list:
        """Give the primes by layer, order and head."""
        return prime_table(layers, orders, heads, start)


@plant("C11", "the search for primes skips a start that is prime itself", offers="prime_layout.PrimeLayout")
class SearchSkipsItsStart(_Layout):
    """A "next prime" function looks strictly above its argument, and it is given the size, not the size minus one.

    Law: buckets.
    """

    def hand_out(self, layers: int, orders: int, heads: int, start: int) -> list:
        """Search above the start."""
        return prime_table(layers, orders, heads, start + 1)


@plant("C11b", "the search for primes begins two below the size", offers="prime_layout.PrimeLayout")
class SearchStartsBelow(_Layout):
    """The minus one is applied twice: a prime just below the size gets in.

    Law: buckets.
    """

    def hand_out(self, layers: int, orders: int, heads: int, start: int) -> list:
        """Search from below the start."""
        return prime_table(layers, orders, heads, max(start - 1, 1))


@plant("C12", "a composite number is taken for a prime", offers="prime_layout.PrimeLayout")
class CompositeAccepted(_Layout):
    """Trial division stops one divisor early, and squares of primes pass.

    Law: buckets.
    """

    def hand_out(self, layers: int, orders: int, heads: int, start: int) -> list:
        """Walk numbers that no divisor below their root divides."""
        numbers: list[int] = []
        at = max(start, 2)
        while len(numbers) < layers * orders * heads:
            if all(at % divisor for divisor in range(2, int(at**0.5 + 1e-9) + (int(at**0.5 + 1e-9) ** 2 != at))):
                numbers.append(at)
            at += 1
        return np.array(numbers).reshape(layers, orders, heads).tolist()


@plant("C13", "each column starts where it should end")
class OffsetsInclusive(_OtherConstants):
    """Offsets are running sums that include the column itself.

    Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Add each column's own size."""
        self.offsets = self.offsets + self.primes.flatten(1)


@plant("C14", "a column is numbered head by head, where it is order by order")
class HeadsBeforeOrders(Model):
    """Order and head are swapped when the columns are flattened: every id is right and stands elsewhere.

    Law: agreement.
    """

    def reduce(self, mixes: torch.Tensor) -> torch.Tensor:
        """Flatten the transposed axes."""
        rows = super().reduce(mixes)
        return rows.unflatten(2, self.primes.shape[1:]).transpose(2, 3).flatten(2)


@plant("C24", "all layers use the buckets of the first layer's offsets")
class OffsetsOfTheFirstLayer(_OtherConstants):
    """Offsets are kept once and not by layer; primes differ so little that most ids stay near.

    Law: agreement.
    """

    def spoil(self, config: EngramConfig) -> None:
        """Repeat the first layer's offsets."""
        self.offsets = self.offsets[:1].expand_as(self.offsets)
