"""Laws of the expected rows: pieces give what whole requests give, and a judge that errs is found out."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parity.truth
from parity.truth import Truth
from parity.world import World
from serving.step import Piece

CPU = torch.device("cpu")


def piece_of(stream: np.ndarray, dead: np.ndarray, start: int, end: int, request: int = 0) -> Piece:
    """Give positions start .. end - 1 of a stream as a piece."""
    return Piece(request, stream, dead, start, stream[start:end], dead[start:end], 0, 0, frozenset())


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    """Draw streams with dead tokens, and where each is cut."""
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        stream = draw(st.lists(st.integers(0, 129279), min_size=1, max_size=12))
        dead = draw(st.lists(st.sampled_from([False, False, True]), min_size=len(stream), max_size=len(stream)))
        cuts = draw(st.sets(st.integers(1, len(stream))))
        drawn.append((np.array(stream), np.array(dead), sorted({0, len(stream), *cuts})))
    return drawn


@given(requests())
def test_pieces_give_the_rows_of_the_oracle(worlds: dict[str, World], drawn: list) -> None:
    """Laid end to end behind dead tokens, the pieces of any requests hash as each request does by itself."""
    world = worlds["another_pad"]
    truth, pieces, want = Truth(world, CPU), [], []
    for stream, dead, cuts in drawn:
        for start, end in pairwise(cuts):
            pieces.append(piece_of(stream, dead, start, end))
            want += [world.oracle.row(stream.tolist(), dead.tolist(), at) for at in range(start, end)]
    rows = truth.rows(pieces)
    assert rows.tolist() == want
    truth.check_integers(pieces, rows, samples=9)
    assert truth.integer_rows == 9


def test_rejected_drafts_have_rows_of_their_own(worlds: dict[str, World]) -> None:
    """A draft's row looks back over the drafts before it; only those on the stream are held to the whole request."""
    world = worlds["flash"]
    stream, dead = np.arange(50, 58), np.zeros(8, bool)
    drafted = replace(
        piece_of(stream[:4], dead[:4], 3, 4), tokens=np.array([53, 54, 900]), token_dead=np.zeros(3, bool)
    )
    after = piece_of(stream, dead, 5, 8)
    truth = Truth(world, CPU)
    rows = truth.rows([drafted, after])
    fed = [50, 51, 52, 53, 54, 900]
    assert rows[:3].tolist() == [world.oracle.row(fed, [False] * 6, at) for at in (3, 4, 5)]
    truth.check_whole([0, 0], [drafted, after], rows, limit=100)
    assert truth.whole_rows == 5
    assert truth.integer_row(drafted, 2) == rows[2].tolist()


@pytest.fixture
def case(worlds: dict[str, World]) -> tuple[Truth, list[Piece]]:
    """A truth and two pieces of one request."""
    stream, dead = np.arange(1000, 1012), np.zeros(12, bool)
    return Truth(worlds["flash"], CPU), [piece_of(stream, dead, 0, 5), piece_of(stream, dead, 5, 12)]


def test_a_wrong_row_is_found_out_by_whole_requests_and_by_integers(case: tuple[Truth, list[Piece]]) -> None:
    """One id that is off by one, in any row, and the judge says that the judge itself is wrong."""
    truth, pieces = case
    for at in range(12):
        rows = truth.rows(pieces)
        rows[at, 1, 23] += 1
        with pytest.raises(RuntimeError, match=r"^the judge: request 0 from \d+ on: whole and piece differ"):
            truth.check_whole([0, 0], pieces, rows, limit=100)
        with pytest.raises(RuntimeError, match=r"^the judge: request 0 at \d+: integers differ"):
            truth.check_integers(pieces, rows, samples=400)


def test_a_reference_that_forgets_its_lookback_is_found_out(
    case: tuple[Truth, list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash that is wrong on torch alone differs from NumPy's, and one that is wrong on both from the integers."""
    truth, pieces = case
    right = parity.truth.ngram_hash

    def forgetful(ids: torch.Tensor, dead: torch.Tensor, **constants: torch.Tensor) -> torch.Tensor:
        return right(ids, torch.ones_like(dead), **constants)

    monkeypatch.setattr(parity.truth, "ngram_hash", forgetful)
    rows = truth.rows(pieces)
    with pytest.raises(RuntimeError, match="whole and piece differ"):
        truth.check_whole([0, 0], pieces, rows, limit=100)
    monkeypatch.setattr(World, "alone", lambda self, tokens, dead: rows.numpy())
    truth.check_whole([0, 0], pieces, rows, limit=100)
    with pytest.raises(RuntimeError, match="integers differ"):
        truth.check_integers(pieces, rows, samples=1)


def test_the_whole_check_stops_at_its_limit(case: tuple[Truth, list[Piece]]) -> None:
    """With no positions left to hash nothing is checked, and nothing is counted."""
    truth, pieces = case
    truth.check_whole([0, 0], pieces, truth.rows(pieces), limit=0)
    assert truth.whole_rows == 0
