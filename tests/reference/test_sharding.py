"""The laws of select_rows, and the reference under them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference.sharding
from reference.collectives.rows import token_window

POISON = 0x5A5A
WORDS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}


def draw_words(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    """Draw any bits: NaN with payloads, infinities, -0 and subnormals among them."""
    return rng.integers(0, 2 ** (8 * dtype.itemsize), size=shape, dtype=WORDS[dtype])


def fenced(words: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Put words on the device as rows in the middle of a tensor that holds poison before and after them."""
    big = np.full((len(words) + 8, *words.shape[1:]), POISON, dtype=words.dtype)
    big[4 : 4 + len(words)] = words
    signed = big.view(np.int16 if dtype.itemsize == 2 else np.int32)
    return torch.from_numpy(signed).view(dtype).to(device)[4 : 4 + len(words)]


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """Give a tensor's bits."""
    signed = tensor.cpu().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
    return signed.numpy().view(WORDS[tensor.dtype])


def expected(words: np.ndarray, ranks: int, first: int, tokens: int, columns: int) -> np.ndarray:
    """Select element by element: rank, token, head."""
    source, local = len(words) // ranks, words.shape[1]
    parts = words.reshape(ranks, source, local, words.shape[2])
    out = np.zeros((tokens, columns, words.shape[2]), dtype=words.dtype)
    for t in range(min(tokens, max(source - first, 0))):
        for c in range(columns):
            out[t, c] = parts[c // local, first + t, c % local]
    return out


class SelectLaws:
    """What holds of every select_rows; a subclass names the one under test, and calls the law that is drawn."""

    select_rows: Callable[..., torch.Tensor]

    def window_law(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of any ranks' parts is its definition, bit for bit, zero past T, the padding heads left out."""
        ranks = data.draw(st.integers(1, 7), "P")
        source = data.draw(st.sampled_from([0, 1, 2, 5, 33]), "T")
        local = data.draw(st.sampled_from([1, 2, 3, 5, 8]), "local")
        dim = data.draw(st.sampled_from([32, 64, 96, 256]), "dim")
        columns = data.draw(st.integers(max(ranks * local - local, 0), ranks * local), "columns")
        first = data.draw(st.integers(0, source + 3) | st.just(2**31 - 1), "first_token")
        tokens = data.draw(st.integers(0, source + 3), "tokens")
        dtype = data.draw(st.sampled_from(list(WORDS)), "dtype")
        words = draw_words(np.random.default_rng(seed), (ranks * source, local, dim), dtype)
        gathered = fenced(words, dtype, device)
        got = self.select_rows(gathered, ranks=ranks, first_token=first, tokens=tokens, columns=columns)
        assert (got.dtype, got.device, got.is_contiguous()) == (dtype, gathered.device, True)
        np.testing.assert_array_equal(words_of(got), expected(words, ranks, first, tokens, columns))

    @pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    def test_windows_of_all_ranks_are_the_step(self, device: torch.device, ranks: int, tokens: int) -> None:
        """The ranks' windows of a step, end to end, are the step, and zero rows pad the last ones."""
        words = draw_words(np.random.default_rng(tokens), (ranks * tokens, 2, 32), torch.bfloat16)
        gathered, columns = fenced(words, torch.bfloat16, device), 2 * ranks - (ranks > 1)
        windows = [token_window(tokens, ranks=ranks, rank=rank) for rank in range(ranks)]
        parts = [
            self.select_rows(gathered, ranks=ranks, first_token=w.first, tokens=w.size, columns=columns)
            for w in windows
        ]
        heads = np.concatenate(words.reshape(ranks, tokens, 2, 32), axis=1)[:, :columns]  # [T, C, dim]
        got = words_of(torch.cat(parts))
        np.testing.assert_array_equal(got[:tokens], heads)
        assert not got[tokens:].any()
        assert [len(part) for part in parts] == [-(-tokens // ranks)] * ranks

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"gathered": None}, TypeError, "gathered: got NoneType"),
            ({"gathered": torch.zeros(6, 2, 32, dtype=torch.int32)}, TypeError, "gathered: got dtype torch.int32"),
            ({"gathered": torch.zeros(6, 64)}, ValueError, r"gathered: got shape \(6, 64\)"),
            ({"gathered": torch.zeros(12, 2, 32)[::2]}, ValueError, "gathered: got strides"),
            ({"gathered": torch.zeros(7, 2, 32)}, ValueError, "gathered: got 7 rows, expected a multiple of 3 ranks"),
            ({"ranks": 0}, ValueError, "ranks: got 0, expected at least 1"),
            ({"ranks": True}, TypeError, "ranks: got bool"),
            ({"first_token": -1}, ValueError, "first_token: got -1, expected at least 0"),
            ({"tokens": -1}, ValueError, "tokens: got -1, expected at least 0"),
            ({"tokens": 2.0}, TypeError, "tokens: got float, expected an int"),
            ({"columns": 7}, ValueError, "columns: got 7, expected at least 0 and at most 6"),
        ],
    )
    def test_bad_argument_is_refused_by_name(self, change: dict, error: type[Exception], message: str) -> None:
        """What does not fit is refused, and the message says name, got and expected."""
        good = {"gathered": torch.zeros(6, 2, 32), "ranks": 3, "first_token": 0, "tokens": 2, "columns": 5}
        with pytest.raises(error, match=message):
            self.select_rows(**good | change)


class TestReference(SelectLaws):
    select_rows = staticmethod(reference.sharding.select_rows)

    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_a_window_is_its_definition(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of any ranks' parts is its definition, bit for bit, zero past T, the padding heads left out."""
        self.window_law(device, data, seed)


@given(tokens=st.integers(0, 50), ranks=st.integers(1, 12))
def test_windows_deal_each_token_once(tokens: int, ranks: int) -> None:
    """Streams are of one size, ceil(T/P), and their live tokens are the step in order."""
    dealt = []
    for rank in range(ranks):
        first, live, size = token_window(tokens, ranks=ranks, rank=rank)
        assert size * ranks >= tokens > size * ranks - ranks
        assert 0 <= live <= size
        dealt += range(first, first + live)
    assert dealt == list(range(tokens))
