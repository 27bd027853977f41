"""Laws of the bucket layout: the published primes, and for any shape the ones that the definition hands out."""

from types import SimpleNamespace

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from parity.oracle import prime_table
from reference.config import EngramConfig
from reference.prime_layout import PrimeLayout, bucket_primes
from tests.published import PUBLISHED


def layout_of(layers: int, max_ngram: int, heads: int, start: int) -> PrimeLayout:
    """Lay out a config of which only the sizes matter."""
    return PrimeLayout(
        SimpleNamespace(  # type: ignore[arg-type]
            engram_layer_ids=range(layers),
            engram_max_ngram_size=max_ngram,
            engram_n_heads=heads,
            engram_vocab_size=start,
        )
    )


def handed_out(layers: int, orders: int, heads: int, start: int) -> list[list[list[int]]]:
    """Hand primes out exactly as the definition is worded, with sympy's primes: one search a (layer, order)."""
    taken: set[int] = set()
    table = []
    for _ in range(layers):
        for _ in range(orders):
            last = start - 1
            for _ in range(heads):
                last = sympy.nextprime(last)
                while last in taken:
                    last = sympy.nextprime(last)
                taken.add(last)
                table.append(last)
    return np.array(table).reshape(layers, orders, heads).tolist()


shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9))
starts = st.one_of(
    st.integers(1, 60),
    st.integers(2, 20_000_000),
    st.integers(2, 20_000_000).map(sympy.nextprime),
    st.integers(2, 20_000_000).map(lambda n: sympy.nextprime(n) + 1),
)


@given(shapes, starts)
def test_primes_are_those_of_the_definition(shape: tuple[int, int, int], start: int) -> None:
    """Each search starts at the same number, and no prime is handed out twice to any layer, order or head."""
    primes = [[list(order) for order in layer] for layer in bucket_primes(*shape, start)]
    assert primes == handed_out(*shape, start)
    assert primes == prime_table(*shape, start)


@given(shapes, starts)
def test_buckets_lie_end_to_end(shape: tuple[int, int, int], start: int) -> None:
    """A column starts where the columns before it end, the first at 0; the rows in use end where the last ends."""
    layers, orders, heads = shape
    layout = layout_of(layers, orders + 1, heads, start)
    assert layout.primes.shape == shape
    assert layout.offsets.shape == (layers, orders * heads)
    for layer in range(layers):
        row = 0
        for order in range(orders):
            for head in range(heads):
                assert layout.offsets[layer, order * heads + head] == row
                row += int(layout.primes[layer, order, head])
        assert layout.rows[layer] == row
    assert {layout.primes.dtype, layout.offsets.dtype, layout.rows.dtype} == {np.dtype(np.int64)}


def test_a_prime_start_is_the_first_prime() -> None:
    """The search includes the number that it starts at: 1009 is a prime, 1008 and 1010 are not."""
    firsts = [bucket_primes(1, 1, 1, start)[0][0][0] for start in (1008, 1009, 1010)]
    assert firsts == [1009, 1009, 1013]


@pytest.mark.parametrize("layer", [0, 1])
def test_published_primes(layer: int) -> None:
    """The 24 primes of each layer of DeepSeek-V4.1-Flash, as several public ports test them."""
    table = PUBLISHED["primes"]
    config = EngramConfig.deepseek_v41_flash()
    layout = PrimeLayout(config)
    published = table["by_layer"][str(config.engram_layer_ids[layer])]
    assert layout.primes[layer].reshape(-1).tolist() == published
    assert layout.rows[layer] == table["sums"][layer] == config.engram_num_embeddings[layer]


def test_published_small_layout() -> None:
    """Two layers of two orders of two heads from 1000 on: the layout test of sgl-project/sglang."""
    small = PUBLISHED["primes_small"]
    layout = layout_of(len(small["layer_ids"]), small["max_ngram_size"], small["heads"], small["engram_vocab_size"])
    assert layout.primes.tolist() == small["primes"]
