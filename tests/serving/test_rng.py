"""The one stream of random numbers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.rng import Rng


def test_stream_is_pinned() -> None:
    """A seed gives these draws on every machine and version."""
    rng = Rng(2026)
    assert [rng.below(1000) for _ in range(6)] == [121, 327, 514, 974, 524, 662]
    assert rng.permutation(10) == [0, 8, 2, 9, 5, 6, 4, 7, 3, 1]
    assert "".join(rng.pick("abcdef") for _ in range(8)) == "fdedbaea"


@given(st.integers(0, 2**80), st.integers(1, 2**70))
def test_below_rejects_and_never_folds(seed: int, n: int) -> None:
    """below(n) is the first draw of as many bits as n - 1 has that is smaller than n."""
    bits, drawn = random.Random(seed).getrandbits, n
    while drawn >= n:
        drawn = bits(len(bin(n - 1)) - 2) if n > 1 else 0
    assert Rng(seed).below(n) == drawn


def test_every_outcome_is_as_likely() -> None:
    """Each of six orders of three items, and a chance of 3 in 8, come as often as they should, within 5 sigma."""
    rng, draws = Rng(1), 6000
    seen = [tuple(rng.permutation(3)) for _ in range(draws)]
    assert len(set(seen)) == 6
    assert all(abs(seen.count(order) - draws / 6) < 5 * (draws * 5 / 36) ** 0.5 for order in set(seen))
    hits = sum(rng.chance(3, 8) for _ in range(draws))
    assert abs(hits - draws * 3 / 8) < 5 * (draws * 15 / 64) ** 0.5


@given(st.integers(0, 2**64), st.integers(0, 300))
def test_permutation_has_every_number_once(seed: int, n: int) -> None:
    """permutation(n) is an order of 0 .. n-1."""
    assert sorted(Rng(seed).permutation(n)) == list(range(n))


@pytest.mark.parametrize(
    "call", [lambda: Rng(-1), lambda: Rng(1).below(0), lambda: Rng(1).chance(3, 2), lambda: Rng(1).pick([])]
)
def test_impossible_draws_are_refused(call) -> None:
    """A negative seed, a choice among nothing and a chance above one are errors."""
    with pytest.raises(ValueError, match=r"got .*, expected"):
        call()


@pytest.mark.parametrize("seed", [1.0, "1", True, None])
def test_seed_is_an_int(seed: object) -> None:
    """Anything else would be hashed by Python in its own way."""
    with pytest.raises(TypeError, match=r"seed: got .*, expected an int"):
        Rng(seed)  # type: ignore[arg-type]
