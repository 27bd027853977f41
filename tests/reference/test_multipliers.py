"""Laws of the multipliers: the published values, odd, bounded, a layer's own."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parity.oracle import odd_numbers
from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from tests.published import PUBLISHED

FLASH = EngramConfig.deepseek_v41_flash()
configs = st.builds(
    lambda layers, compressed: replace(
        FLASH,
        engram_layer_ids=tuple(layers),
        engram_num_embeddings=(2**31 - 1,) * len(layers),
        engram_compressed_vocab_size=compressed,
    ),
    st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True),
    st.one_of(st.integers(1, 200_000), st.integers(2**31 - 9, 2**31 - 1)),
)


def test_published_multipliers() -> None:
    """Both layers of DeepSeek-V4.1-Flash, as tested by fegato/colibri and pestopoppa/llama.cpp."""
    published = PUBLISHED["multipliers"]["by_layer"]
    multipliers = hash_multipliers(FLASH)
    assert (multipliers.dtype, multipliers.shape) == (np.int64, (2, 4))
    assert dict(zip(map(str, FLASH.engram_layer_ids), multipliers.tolist(), strict=True)) == published


@given(configs)
def test_multipliers_are_odd_and_no_product_overflows(config: EngramConfig) -> None:
    """The largest compressed id times any multiplier stays below 2^63, counted in unbounded integers."""
    for multiplier in hash_multipliers(config).reshape(-1).tolist():
        assert multiplier > 0
        assert multiplier % 2 == 1
        assert (config.engram_compressed_vocab_size - 1) * multiplier < 2**63


@given(configs)
def test_a_layer_draws_by_its_own_id(config: EngramConfig) -> None:
    """A layer's multipliers depend on its id and W alone, not on the layers beside it."""
    multipliers = hash_multipliers(config).tolist()
    assert multipliers == [
        odd_numbers(layer, config.engram_compressed_vocab_size, 4) for layer in config.engram_layer_ids
    ]


def test_every_early_layer_has_multipliers_of_its_own() -> None:
    """Among the first 96 layers no two share a multiplier at any lookback."""
    config = replace(FLASH, engram_layer_ids=tuple(range(8)), engram_num_embeddings=(2**31 - 1,) * 8)
    rows = [hash_multipliers(replace(config, engram_layer_ids=tuple(range(8 * i, 8 * i + 8)))) for i in range(12)]
    numbers = np.concatenate(rows).reshape(-1)
    assert len(np.unique(numbers)) == len(numbers) == 12 * 8 * 4


def test_one_compressed_id_still_has_a_bound() -> None:
    """W = 1 gives the widest range, and no bound below 1 is ever drawn from."""
    config = replace(FLASH, engram_compressed_vocab_size=1)
    assert (hash_multipliers(config) > 2**32).any()
