"""Refusals of the engine: every message names the argument, what it got and what it expected."""

from collections.abc import Sequence

import numpy as np


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return value as an int with low <= value <= high.

    Raises:
        TypeError: not an integer (a bool is none).
        ValueError: outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: got {value!r}, expected an int")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: got {value}, expected {bounds}")
    return int(value)


def check_buckets(name: str, sizes: object) -> None:
    """Refuse bucket sizes that are not a tuple of strictly rising positive ints."""
    if not isinstance(sizes, tuple):
        raise TypeError(f"{name}: got {type(sizes).__name__}, expected a tuple of ints")
    floor = 1
    for size in sizes:
        floor = check_int(f"{name} (strictly rising)", size, floor) + 1


def check_ids(name: str, ids: Sequence[int] | np.ndarray, largest: int) -> np.ndarray:
    """Return ids as a new int64 array [n] with every entry in [0, largest].

    Raises:
        TypeError: entries that are not integers.
        ValueError: not one axis, or an entry out of range.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{name}: got shape {array.shape}, expected one axis")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got dtype {array.dtype}, expected integers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= largest:
        raise ValueError(f"{name}: got ids {array.min()} to {array.max()}, expected 0 to {largest}")
    return array.astype(np.int64)


def check_flags(name: str, flags: Sequence[bool] | np.ndarray, length: int) -> np.ndarray:
    """Return flags as a new bool array [length].

    Raises:
        TypeError: entries that are not bools.
        ValueError: another length.
    """
    array = np.asarray(flags)
    if array.shape != (length,):
        raise ValueError(f"{name}: got shape {array.shape}, expected [{length}], one flag a token")
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected bool")
    return array.copy()
