"""Steps to hash: random tokens of requests of given lengths, in the middle of their lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

BLOCK_SIZE = 64
_DEAD_SHARE = 0.02


@dataclass(frozen=True, eq=False)
class HashInputs:
    """Hold one step.

    Attributes:
        arguments: the eight of `HashState.forward`, in its order.
        slots: S that the slot mapping and the block table need; 0 in the stateless way.
    """

    arguments: tuple[torch.Tensor | None, ...]
    slots: int

    @property
    def tokens(self) -> int:
        """T."""
        assert self.arguments[0] is not None
        return self.arguments[0].shape[0]


def draw_step(
    lengths: Sequence[int], vocabulary: int, lookback: int, *, slot_cache: bool, seed: int, device: torch.device
) -> HashInputs:
    """Draw a step whose requests bring `lengths` new tokens, each starting somewhere at 64 to 1023.

    Stateless, the windows hold ids. With a slot cache they hold none, so that every lookback behind the chunk reads a
    slot; each request has blocks of its own, in random places.

    Args:
        lengths: new tokens of each request.
        vocabulary: V.
        lookback: D.
        slot_cache: which way.
        seed: of all that is random.
        device: where the tensors are to lie.

    Returns:
        ids and windows int32, positions and slots int64, boundaries and blocks int32, as engines have them.
    """
    rng = np.random.default_rng(seed)
    requests, tokens = len(lengths), sum(lengths)
    starts = rng.integers(64, 1024, requests)
    firsts = np.cumsum([0, *lengths])
    request = np.repeat(np.arange(requests), lengths)
    positions = starts[request] + np.arange(tokens) - firsts[request]
    window = np.full((requests, lookback), -1) if slot_cache else rng.integers(0, vocabulary, (requests, lookback))
    slot_mapping = block_table = None
    slots = 0
    if slot_cache:
        blocks = -(-(starts + lengths) // BLOCK_SIZE)
        pool = int(blocks.sum()) * 5 // 4 + 1
        owned = np.split(rng.permutation(pool)[: blocks.sum()], np.cumsum(blocks)[:-1])
        block_table = np.zeros((requests, blocks.max()), dtype=np.int32)
        for row, mine in zip(block_table, owned, strict=True):
            row[: len(mine)] = mine
        block = block_table[request, positions // BLOCK_SIZE].astype(np.int64)
        slot_mapping = block * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = pool * BLOCK_SIZE
    arrays = (
        rng.integers(0, vocabulary, tokens).astype(np.int32),
        positions.astype(np.int64),
        firsts.astype(np.int32),
        rng.random(tokens) < _DEAD_SHARE,
        window.astype(np.int32),
        np.zeros((requests, lookback), dtype=bool),
        slot_mapping,
        block_table,
    )
    tensors = tuple(None if array is None else torch.from_numpy(array).to(device) for array in arrays)
    return HashInputs(tensors, slots)
