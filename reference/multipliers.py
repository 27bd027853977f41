"""The hash multipliers: odd, drawn from a generator of each layer's own, small enough that no product overflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reference.config import EngramConfig

_SEED_STEP = 10007


def hash_multipliers(config: EngramConfig) -> np.ndarray:
    """Draw one odd multiplier a (layer, lookback).

        multiplier[l, k] = 2 * u + 1,   u drawn from [0, bound),   bound = max(1, (2^63 - 1) // W // 2)

    so `compressed_id * multiplier` stays below 2^63 for every compressed id below W.

    Args:
        config: `engram_layer_ids` seed one generator each, `engram_compressed_vocab_size` is W.

    Returns:
        `[L, N]` int64; index 0 of the second axis belongs to the newest token.

    Source: the seed rule is the one that published V4.1 ports agree on. NumPy does not promise the stream of
    `default_rng` for ever: the published values are the test.
    """
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    rows = [
        np.random.default_rng(_SEED_STEP * layer_id).integers(
            0, bound, size=config.engram_max_ngram_size, dtype=np.int64
        )
        for layer_id in config.engram_layer_ids
    ]
    return np.stack(rows) * 2 + 1
