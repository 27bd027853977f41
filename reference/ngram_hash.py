"""The n-gram hash of one whole request: a function of its own tokens alone.

Equations, for the token at position p, looking back k = 0 .. N-1 (numbers as in reference/README.md):

    (1) source[p, k]  = id[p - k], DEAD where that token is dead
    (2) blocked[p, k] = any j <= k with p - j < 0 or source[p, j] = DEAD       (once blocked, blocked for all greater k)
    (3) value[p, k]   = pad where blocked, else source[p, k]
    (4) mix[p, l, k]  = xor over j <= k of value[p, j] * multiplier[l, j]
    (5) row[p, l, c]  = mix[p, l, n - 1] mod prime[l, n, h] + offset[l, c],    column c = (n - 2) * H + h,  n = 2 .. N
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)

_PART = 8192  # tokens at a time in NumPy: what lies between values and rows then stays in the cache


def ngram_hash(ids: Array, dead: Array, *, multipliers: Array, primes: Array, offsets: Array, pad_id: int) -> Array:
    """Hash every position of one request, from position 0.

    Args:
        ids: `[T]` integers, compressed ids in [0, W).
        dead: `[T]` bool, tokens that take no part in an n-gram (an image span).
        multipliers: `[L, N]` int64, index 0 for the newest token.
        primes: `[L, N-1, H]` int64.
        offsets: `[L, C]` int64.
        pad_id: the compressed id of the pad token.

    Returns:
        `[T, L, C]` int32 rows of each layer's table. NumPy arrays give a NumPy array, torch tensors a tensor on their
        device, with the same bits.

    Raises:
        TypeError: NumPy and torch mixed, or ids that are no integers, flags that are no bools.
        ValueError: shapes that do not fit each other, or a negative id.
    """
    _check({"ids": ids, "dead": dead, "multipliers": multipliers, "primes": primes, "offsets": offsets})
    if isinstance(ids, torch.Tensor):
        sources, blocked = lookback_torch(ids, dead, multipliers.shape[1])
        return hash_values(torch.where(blocked, pad_id, sources), multipliers, primes, offsets).to(torch.int32)
    sources, blocked = lookback_numpy(ids, dead, multipliers.shape[1])
    return hash_values_numpy(np.where(blocked, np.int64(pad_id), sources), multipliers, primes, offsets)


def lookback_numpy(ids: np.ndarray, dead: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Look back from every position: equations (1) and (2), `[T, N]` sources (0 where there is none) and blocked."""
    sources = np.zeros((len(ids), depth), dtype=np.int64)
    blocked = np.ones((len(ids), depth), dtype=bool)
    for k in range(depth):
        reach = max(len(ids) - k, 0)  # the positions p >= k, which have a token at p - k
        sources[k:, k] = ids[:reach]
        blocked[k:, k] = dead[:reach]
    return sources, np.logical_or.accumulate(blocked, axis=1)


def lookback_torch(ids: torch.Tensor, dead: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Look back as `lookback_numpy` does, on the tensors' device."""
    sources = ids.new_zeros((len(ids), depth), dtype=torch.int64)
    blocked = dead.new_ones((len(ids), depth))
    for k in range(depth):
        reach = max(len(ids) - k, 0)
        sources[k:, k] = ids[:reach]
        blocked[k:, k] = dead[:reach]
        if k > 0:
            blocked[:, k] |= blocked[:, k - 1]
    return sources, blocked


def hash_values(
    values: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Mix and reduce: equations (4) and (5), from `[T, N]` int64 values to `[T, L, C]` int64 rows."""
    products = values[:, None, :] * multipliers  # [T, L, N], below 2^63 by the multipliers' bound
    mix = products[:, :, 0]
    rows = []
    for n in range(2, multipliers.shape[1] + 1):
        mix = mix ^ products[:, :, n - 1]
        rows.append(mix[:, :, None] % primes[:, n - 2])  # [T, L, H]
    return torch.cat(rows, dim=2) + offsets


def hash_values_numpy(
    values: np.ndarray, multipliers: np.ndarray, primes: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Mix and reduce as `hash_values` does, column by column, to `[T, L, C]` int32 rows."""
    layers, orders, heads = primes.shape
    rows = np.empty((len(values), *offsets.shape), dtype=np.int32)
    for first in range(0, len(values), _PART):
        part = slice(first, first + _PART)
        for layer in range(layers):
            mix = values[part, 0] * multipliers[layer, 0]
            for n in range(2, orders + 2):
                mix = mix ^ values[part, n - 1] * multipliers[layer, n - 1]
                for h in range(heads):
                    c, prime = (n - 2) * heads + h, primes[layer, n - 2, h]
                    # mix mod prime; by one number NumPy divides with SIMD, but does not take remainders so
                    rows[part, layer, c] = mix - mix // prime * prime + offsets[layer, c]
    return rows


def _check(arrays: Mapping[str, np.ndarray | torch.Tensor]) -> None:
    kinds = {name: torch.Tensor if isinstance(value, torch.Tensor) else type(value) for name, value in arrays.items()}
    if set(kinds.values()) not in ({np.ndarray}, {torch.Tensor}):
        got = ", ".join(f"{name} {kind.__name__}" for name, kind in kinds.items())
        raise TypeError(f"ngram_hash: got {got}, expected all NumPy arrays or all torch tensors")
    axes: dict[str, int] = {}
    shapes = {"ids": "T", "dead": "T", "multipliers": "LN", "primes": "LOH", "offsets": "LC"}
    for name, letters in shapes.items():
        shape = tuple(arrays[name].shape)
        if len(shape) != len(letters) or any(
            axes.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)
        ):
            raise ValueError(f"{name}: got shape {shape}, expected [{', '.join(letters)}] with {axes}")
    if axes["N"] < 2 or axes["O"] != axes["N"] - 1 or axes["C"] != axes["O"] * axes["H"]:
        raise ValueError(f"primes, offsets: got {axes}, expected N >= 2, O = N - 1 orders and C = O * H columns")
    for name, kind in (
        ("ids", "int"),
        ("dead", "bool"),
        ("multipliers", "int64"),
        ("primes", "int64"),
        ("offsets", "int64"),
    ):
        if kind not in str(arrays[name].dtype):
            raise TypeError(f"{name}: got dtype {arrays[name].dtype}, expected {kind}")
    if axes["T"] and arrays["ids"].min() < 0:
        raise ValueError(f"ids: got {arrays['ids'].min()}, expected compressed ids, which are not negative")
