"""Shard plans against the definition, counted out row by row and column by column."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.shard_plan import ShardPlan

# A public layer, DeepSeek-V4.1-Flash's layer 1: its primes add up to its engram_num_embeddings.
PRIMES = [16000000 + rest for rest in (57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321)]
PRIMES += [16000000 + rest for rest in (339, 381, 393, 399, 403, 409, 447, 463)]


def plans(sizes: list[int], ranks: int) -> list[ShardPlan]:
    """Plan every rank."""
    return [ShardPlan.of(sizes, ranks=ranks, rank=rank) for rank in range(ranks)]


@pytest.mark.parametrize("columns", [15, 24])
@pytest.mark.parametrize("ranks", range(1, 31))
def test_ranks_hold_the_layer_once(columns: int, ranks: int) -> None:
    """The ranks' rows lie end to end over the whole layer, for every P from 1 to 30, at the public primes."""
    sizes = PRIMES[:columns]
    held = plans(sizes, ranks)
    assert held[0].first_row == 0
    assert held[-1].end_row == sum(sizes)
    for left, right in pairwise(held):
        assert left.end_row == right.first_row
    assert len({(plan.kind, plan.local_heads, plan.rows, plan.columns, plan.ranks) for plan in held}) == 1
    assert [plan.rank for plan in held] == list(range(ranks))


def test_heads_are_dealt_only_where_every_rank_gets_one() -> None:
    """For 24 columns the ranks that heads cannot be dealt to are 7, 9, 10, 11, 13 to 23 and all above 24."""
    by_rows = {ranks for ranks in range(1, 31) if ShardPlan.of(PRIMES, ranks=ranks).kind == "rows"}
    assert by_rows == {7, 9, 10, 11, *range(13, 24), *range(25, 31)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=25), st.integers(1, 60))
def test_a_plan_is_its_definition(sizes: list[int], ranks: int) -> None:
    """Column by column and row by row, a rank holds what the definition deals to it."""
    columns, owner = len(sizes), [column for column, size in enumerate(sizes) for _ in range(size)]
    heads, share = math.ceil(columns / ranks), math.ceil(sum(sizes) / ranks)
    dealt = [[c for c in range(columns) if c // heads == rank] for rank in range(ranks)]
    for rank, plan in enumerate(plans(sizes, ranks)):
        if all(dealt):
            rows = [row for row, column in enumerate(owner) if column in dealt[rank]]
            assert (plan.kind, plan.head_start, plan.local_heads) == ("heads", dealt[rank][0], heads)
        else:
            rows = [row for row in range(len(owner)) if row // share == rank]
            assert (plan.kind, plan.head_start, plan.local_heads) == ("rows", 0, columns)
        assert list(range(plan.first_row, plan.end_row)) == rows
        assert plan.local_rows == len(rows)


@pytest.mark.parametrize("ranks", [5, 7])
def test_combining_keeps_every_bit(ranks: int) -> None:
    """Parts are joined as bits: -0.0, NaN with a payload, infinity and subnormals come out as they went in."""
    columns, dim = 15, 32
    rng = np.random.default_rng(ranks)
    patterns = np.array([0x8000, 0x0000, 0x7FC1, 0xFF80, 0x0001, 0x8001, 0x3F80], dtype=np.uint16)
    whole = rng.choice(patterns, size=(6, columns, dim))
    held = plans([4] * columns, ranks)
    parts = np.zeros((ranks, 6, held[0].local_heads, dim), dtype=np.uint16)
    for t in range(6):
        for column in range(columns):
            rank = column // held[0].local_heads if held[0].kind == "heads" else int(rng.integers(ranks))
            parts[rank, t, column - held[rank].head_start] = whole[t, column]
    given_parts = [torch.from_numpy(part.view(np.int16)).view(torch.bfloat16) for part in parts]
    got = held[0].combine(given_parts)
    assert got.shape == (6, columns, dim)
    np.testing.assert_array_equal(got.contiguous().view(torch.int16).numpy().view(np.uint16), whole)


def test_padding_columns_are_cut() -> None:
    """What the last rank has in columns past C, were it NaN, is no part of the whole."""
    held = plans([1] * 15, 4)
    parts = [torch.full((2, 4, 32), float(rank), dtype=torch.bfloat16) for rank in range(4)]
    parts[3][:, 3] = math.nan
    got = held[0].combine(parts)
    assert got.shape == (2, 15, 32)
    assert got[0, :, 0].tolist() == [column // 4 for column in range(15)]


PART = torch.zeros(2, 5, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ShardPlan.of([], ranks=1), ValueError, "columns: got 0, expected at least 1"),
        (lambda: ShardPlan.of([3, 0]), ValueError, r"sizes\[1\]: got 0"),
        (lambda: ShardPlan.of([3], ranks=0), ValueError, "ranks: got 0"),
        (lambda: ShardPlan.of([3], ranks=2, rank=2), ValueError, "rank: got 2, expected at least 0 and at most 1"),
        (lambda: ShardPlan.of([3], ranks=2, rank=-1), ValueError, "rank: got -1"),
        (lambda: ShardPlan.of([3], ranks=1.0), TypeError, "ranks: got float"),
        (
            lambda: ShardPlan.of([1] * 15, ranks=3).combine([PART] * 2),
            ValueError,
            "parts: got 2, expected one for each",
        ),
        (lambda: ShardPlan.of([1] * 15, ranks=3).combine([PART, PART[:1], PART]), ValueError, r"parts\[1\]: got shape"),
        (lambda: ShardPlan.of([1] * 15, ranks=3).combine([PART[:, :4]] * 3), ValueError, r"parts\[0\]: got shape"),
        (lambda: ShardPlan.of([1] * 15, ranks=3).combine([PART.float()] * 3), TypeError, r"parts\[0\]: got dtype"),
    ],
)
def test_refusals_name_the_argument(call, error, message) -> None:
    """What does not fit is refused by name, with what came and what was expected."""
    with pytest.raises(error, match=message):
        call()
