"""Laws of the hash: the published rows, the toy by hand, and the oracle in unbounded integers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parity.world import World, flash
from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from reference.ngram_hash import ngram_hash
from reference.prime_layout import PrimeLayout
from tests.published import PUBLISHED

FLASH = EngramConfig.deepseek_v41_flash()
LAYOUT = PrimeLayout(FLASH)
CONSTANTS = {"multipliers": hash_multipliers(FLASH), "primes": LAYOUT.primes, "offsets": LAYOUT.offsets}
REAL = flash()


@pytest.mark.parametrize("kind", ["unmasked", "masked"])
def test_published_rows(kind: str) -> None:
    """Rows of DeepSeek-V4.1-Flash from pestopoppa/llama.cpp, tests/test-dsv41-engram-hash-vectors.inc."""
    vectors = PUBLISHED["hash_vectors"]
    ids = np.array([vectors["token_map"][token] for token in vectors["tokens"]])
    dead = np.zeros(len(ids), bool)
    if kind == "masked":
        dead[vectors["dead_positions"]] = True
    rows = ngram_hash(ids, dead, pad_id=vectors["compressed_pad"], **CONSTANTS)
    for vector in vectors[kind]:
        assert rows[vector["position"], FLASH.engram_layer_ids.index(vector["layer"])].tolist() == vector["row"]


def toy() -> tuple[np.ndarray, dict[str, Any], list[list[int]]]:
    """Give the toy's ids, its constants, and its rows."""
    values = PUBLISHED["toy"]
    constants = {
        "multipliers": np.array([values["multipliers"]]),
        "primes": np.array(values["primes"]).reshape(1, 2, 1),
        "offsets": np.array([values["offsets"]]),
        "pad_id": values["pad"],
    }
    return np.array(values["compressed"]), constants, values["rows"]


def test_toy_rows_are_those_worked_out_by_hand() -> None:
    """Multipliers 3, 5, 7, primes 101, 103, pad 99: at position 0, 7*3 xor 99*5 is 506, and 506 mod 101 is 1."""
    ids, constants, rows = toy()
    assert ngram_hash(ids, np.zeros(5, bool), **constants)[:, 0].tolist() == rows


def test_a_dead_token_ends_every_ngram_that_reaches_it() -> None:
    """With the toy's third token dead, 20 sees only pads, 31 sees 20 and pads, and the dead one itself only pads."""
    ids, constants, rows = toy()
    dead = np.array([False, False, True, False, False])
    got = ngram_hash(ids, dead, **constants)[:, 0].tolist()
    assert got[:2] == rows[:2]
    for position, two, three in [
        (2, 99 * 3 ^ 99 * 5, 99 * 7),
        (3, 20 * 3 ^ 99 * 5, 99 * 7),
        (4, 31 * 3 ^ 20 * 5, 99 * 7),
    ]:
        assert got[position] == [two % 101, 101 + (two ^ three) % 103]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    """Draw token ids of the whole vocabulary, its top or a few, with any of them dead."""
    size = draw(st.integers(0, 12))
    some = draw(st.sampled_from([(0, 129279), (129200, 129279), (0, 4)]))
    dead = st.booleans() if draw(st.booleans()) else st.just(False)
    return [draw(st.integers(*some)) for _ in range(size)], [draw(dead) for _ in range(size)]


@given(requests(), st.sampled_from([torch.int32, torch.int64]))
@example(([], []), torch.int32)
@example(([129279], [False]), torch.int32)
@example(([129279], [True]), torch.int64)
@example(([129279, 0], [False, False]), torch.int64)
@example(([129279, 0, 129279], [False, True, False]), torch.int64)
def test_numpy_torch_and_plain_integers_agree(
    worlds: dict[str, World], device: torch.device, case: tuple[list[int], list[bool]], dtype: torch.dtype
) -> None:
    """Both array kinds give the oracle's rows, also where the pad token compresses to another id."""
    tokens, dead = case
    for name in ("flash", "another_pad", "toy"):
        world = worlds[name]
        own = [token % world.vocabulary for token in tokens]
        constants = {
            "multipliers": world.multipliers,
            "primes": world.layout.primes,
            "offsets": world.layout.offsets,
        }
        ids, flags = world.token_map[np.array(own, dtype=np.int64)], np.array(dead, dtype=bool)
        arrays = ngram_hash(ids, flags, pad_id=world.pad_id, **constants)
        on_device = {key: torch.from_numpy(value).to(device) for key, value in constants.items()}
        tensors = ngram_hash(
            torch.from_numpy(ids).to(device, dtype),
            torch.from_numpy(flags).to(device),
            pad_id=world.pad_id,
            **on_device,
        )
        assert (arrays.dtype, tensors.dtype) == (np.int32, torch.int32)
        assert arrays.shape == tensors.shape == (len(own), *world.layout.offsets.shape)
        assert arrays.tolist() == tensors.tolist() == [world.oracle.row(own, dead, p) for p in range(len(own))]


@given(requests())
def test_every_row_stays_in_its_column(case: tuple[list[int], list[bool]]) -> None:
    """Column c's rows lie in [offset, offset + prime), so no two columns ever share a row."""
    rows = REAL.alone(np.array(case[0], dtype=np.int64), np.array(case[1], dtype=bool))
    sizes = LAYOUT.primes.reshape(2, -1)
    assert (rows >= LAYOUT.offsets).all()
    assert (rows < LAYOUT.offsets + sizes).all()


def refused() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """List wrong arguments: what is changed, the error, and how its message begins."""
    three = np.zeros(3, bool)
    layers, orders, columns = np.ones((3, 4), np.int64), np.ones((2, 2, 8), np.int64), np.ones((2, 25), np.int64)
    return {
        "one torch among arrays": ({"ids": torch.arange(2)}, TypeError, "ngram_hash: got ids Tensor, dead ndarray"),
        "a list": ({"dead": [True, False]}, TypeError, "ngram_hash: got ids ndarray, dead list"),
        "lengths differ": ({"dead": three}, ValueError, r"dead: got shape \(3,\), expected \[T\]"),
        "ids of two axes": ({"ids": np.zeros((2, 1), int)}, ValueError, r"ids: got shape \(2, 1\), expected \[T\]"),
        "layers differ": ({"multipliers": layers}, ValueError, r"primes: got shape \(2, 3, 8\), expected \[L, O, H\]"),
        "orders differ": ({"primes": orders}, ValueError, "primes, offsets: got .*expected N >= 2, O = N - 1"),
        "columns differ": ({"offsets": columns}, ValueError, r"primes, offsets: got .* C = O \* H columns"),
        "float ids": ({"ids": np.zeros(2)}, TypeError, "ids: got dtype float64, expected int"),
        "integer flags": ({"dead": np.zeros(2, int)}, TypeError, "dead: got dtype int64, expected bool"),
        "narrow multipliers": (
            {"multipliers": CONSTANTS["multipliers"].astype(np.int32)},
            TypeError,
            "multipliers: got dtype int32, expected int64",
        ),
        "a negative id": ({"ids": np.array([5, -1])}, ValueError, "ids: got -1, expected compressed ids"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused())
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    """Kinds that mix, shapes that disagree, and dtypes that would be cast in silence have clear errors."""
    change, error, words = refused()[name]
    arguments = {"ids": np.array([5, 6]), "dead": np.zeros(2, bool), "pad_id": 2, **CONSTANTS} | change
    with pytest.raises(error, match=f"^{words}"):
        ngram_hash(**arguments)


def test_unigrams_alone_are_refused() -> None:
    """N = 1 has no order and no column."""
    empty = {"multipliers": np.ones((1, 1), int), "primes": np.ones((1, 0, 8), int), "offsets": np.ones((1, 0), int)}
    with pytest.raises(ValueError, match="expected N >= 2"):
        ngram_hash(np.array([1]), np.zeros(1, bool), pad_id=0, **empty)


@pytest.mark.parametrize(
    "kind", [(np.array, np.int64, np.bool_), (torch.tensor, torch.int64, torch.bool)], ids=["numpy", "torch"]
)
@pytest.mark.parametrize("max_ngram", range(2, 9))
def test_ngrams_may_be_longer_than_a_request(max_ngram: int, kind: tuple[Any, Any, Any]) -> None:
    """Every N from 2 to 8 on requests of no to nine tokens, the middle one dead: row by row from the definition."""
    make, integer, boolean = kind
    odd, pad, heads = [3, 5, 7, 11, 13, 17, 19, 23], 99, 3
    primes = [[101 + 2 * order, 211 + 2 * order, 307 + 2 * order] for order in range(max_ngram - 1)]
    offsets = [1000 * column for column in range(heads * (max_ngram - 1))]
    for size in range(10):
        ids = [(37 * at + 5) % 98 for at in range(size)]
        dead = [at == size // 2 and size > 3 for at in range(size)]
        got = ngram_hash(
            make(ids, dtype=integer), make(dead, dtype=boolean), multipliers=make([odd[:max_ngram]]),
            primes=make([primes]), offsets=make([offsets]), pad_id=pad,
        )  # fmt: skip
        for p in range(size):
            first = max([at + 1 for at in range(p + 1) if dead[at]], default=0)  # what a lookback may reach
            values = [ids[p - k] if p - k >= first else pad for k in range(max_ngram)]
            mix = values[0] * odd[0]
            for n in range(2, max_ngram + 1):
                mix ^= values[n - 1] * odd[n - 1]
                for h in range(heads):
                    column = (n - 2) * heads + h
                    assert int(got[p, 0, column]) == mix % primes[n - 2][h] + offsets[column]


def test_a_long_request_is_hashed_to_its_end() -> None:
    """Of 20,000 tokens each row is that of the last N tokens before it hashed by themselves, and torch agrees."""
    ids = np.arange(20_000) * 7919 % 99_092
    rows = ngram_hash(ids, np.zeros(len(ids), bool), pad_id=2, **CONSTANTS)
    tensors = {name: torch.from_numpy(value) for name, value in CONSTANTS.items()}
    whole = ngram_hash(torch.from_numpy(ids), torch.zeros(len(ids), dtype=torch.bool), pad_id=2, **tensors)
    assert np.array_equal(rows, whole.numpy())
    for at in (4095, 8191, 8192, 8193, 16383, 16384, 19_999):
        few = ngram_hash(ids[at - 3 : at + 1], np.zeros(4, bool), pad_id=2, **CONSTANTS)
        assert np.array_equal(rows[at], few[3])
