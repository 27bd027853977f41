"""The laws of the lookup, and the reference under them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference.embedding
from reference.shard_plan import ShardPlan
from tests.reference.test_quantization import all_pairs, exact_bits

INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
SEEDS, TOKENS = st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 7, 17])
FULL_ROWS = 384_016_682  # layer 14 of DeepSeek-V4.1-Flash


def bits(rows: torch.Tensor) -> np.ndarray:
    """Give the bits of bfloat16 rows."""
    return rows.view(torch.int16).cpu().numpy().view(np.uint16)


def expected_bits(
    weight: np.ndarray, scales: np.ndarray, ids: np.ndarray, first: int, start: int, heads: int
) -> np.ndarray:
    """Look up by the definition, element by element of the exact table; weight and scales are bytes."""
    out = np.zeros((len(ids), heads, weight.shape[1]), dtype=np.uint16)
    for t, row_ids in enumerate(ids.tolist()):
        for j in range(heads):
            if start + j < len(row_ids) and first <= row_ids[start + j] < first + len(weight):
                row = row_ids[start + j] - first
                out[t, j] = exact_bits()[scales[row].repeat(32), weight[row]]
    return out


def fenced(inner: np.ndarray, poison: int, device: torch.device) -> torch.Tensor:
    """Put bytes on the device as a slice of a larger tensor that holds poison before and after it."""
    big = torch.full((len(inner) + 32, inner.shape[1]), poison, dtype=torch.uint8, device=device)
    big[16 : 16 + len(inner)] = torch.from_numpy(inner).to(device)
    return big[16 : 16 + len(inner)]


def draw_ids(rng: np.random.Generator, shape: tuple[int, int], first: int, rows: int) -> np.ndarray:
    """Draw ids: most of them held, the others DEAD, at either edge, or far outside."""
    edges = [-1, first - 1, first, first + rows - 1, first + rows, first + rows + 5, INT32.min, INT32.max, 0]
    inside = rng.integers(first, first + max(rows, 1), size=shape)
    return np.where(rng.random(shape) < 0.7, inside, rng.choice(edges, size=shape)).astype(np.int64)


def strided(ids: np.ndarray, dtype: torch.dtype, how: str, device: torch.device) -> torch.Tensor:
    """Give ids on the device under strides of their own, with poison between them."""
    tokens, columns = ids.shape
    values = torch.from_numpy(ids).to(device, dtype)
    if how == "dense":
        return values
    if how == "transposed":
        return values.t().contiguous().t()
    wide = torch.full((tokens * 2 + 1, columns * 3 + 1), 7, dtype=dtype, device=device)
    wide[1::2, 1::3][:tokens] = values
    return wide[1::2, 1::3][:tokens]


class LookupLaws:
    """What holds of every lookup; a subclass names the one under test, and calls the laws that are drawn."""

    lookup: Callable[..., torch.Tensor]
    embedding: type[Any]

    @pytest.mark.filterwarnings("ignore:overflow encountered")
    def test_every_code_pair_is_exact(self, device: torch.device) -> None:
        """All 65,536 pairs of code and scale look up to the bits that exact fractions give; every NaN is 0x7FC0."""
        weight, scales = (tensor.to(device) for tensor in all_pairs())
        ids = torch.arange(256, dtype=torch.int32, device=device)[:, None]
        for kind in (scales, scales.view(torch.float8_e8m0fnu)):
            got = self.lookup(weight.view(torch.float8_e4m3fn), kind, ids)
            np.testing.assert_array_equal(bits(got)[:, 0], exact_bits())

    def row_law(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of columns of any ids gives the defined rows, and zeros for what the rank has not."""
        rng = np.random.default_rng(seed)
        rows = data.draw(st.sampled_from([0, 1, 2, 40]), "rows")
        dim = data.draw(st.sampled_from([32, 96, 256]), "dim")
        tokens = data.draw(st.sampled_from([0, 1, 2, 3, 17, 33]), "T")
        columns = data.draw(st.sampled_from([1, 2, 15, 24]), "C")
        first = data.draw(st.sampled_from([0, 1, 1000, 384_000_000]), "first_row")
        start = data.draw(st.integers(0, columns), "head_start")
        heads = data.draw(st.none() | st.integers(0, columns + 2), "local_heads")
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "ids")
        how = data.draw(st.sampled_from(["dense", "transposed", "sliced"]), "strides")
        codes = rng.integers(0, 256, size=(rows, dim), dtype=np.uint8)
        scales = rng.integers(0, 256, size=(rows, dim // 32), dtype=np.uint8)
        ids = draw_ids(rng, (tokens, columns), first, rows)
        if dtype is torch.int64:
            far = rng.choice([-(2**32), 2**32, 2**40], size=ids.shape)  # ids that 32 bits would take for held ones
            ids = np.where(rng.random(ids.shape) < 0.3, ids + far, ids)
        got = self.lookup(
            fenced(codes, 0x7F, device).view(torch.float8_e4m3fn),
            fenced(scales, 255, device),
            strided(ids, dtype, how, device),
            first_row=first,
            head_start=start,
            local_heads=heads,
        )
        local = columns - start if heads is None else heads
        assert got.dtype is torch.bfloat16
        assert got.device == device or got.device.type == device.type
        np.testing.assert_array_equal(bits(got), expected_bits(codes, scales, ids, first, start, local))

    def test_foreign_rows_are_zero_not_read(self, device: torch.device) -> None:
        """Ids of other ranks' rows, which hold NaN in this very tensor's neighbourhood, give positive zeros."""
        weight = fenced(np.full((4, 64), 0x38, dtype=np.uint8), 0x7F, device).view(torch.float8_e4m3fn)
        scales = fenced(np.full((4, 2), 127, dtype=np.uint8), 255, device)
        ids = torch.arange(-6, 14, dtype=torch.int32, device=device)[:, None] + 100
        got = self.lookup(weight, scales, ids, first_row=104)
        held = ((ids >= 104) & (ids < 108)).expand(-1, 64)
        assert torch.equal(got[:, 0], held.to(torch.bfloat16))
        assert not np.signbit(got.float().cpu().numpy()).any()

    @pytest.mark.parametrize("first", [0, 1, 2**31 - 1])
    def test_far_ids_do_not_wrap(self, device: torch.device, first: int) -> None:
        """An id that 32 bits, or a subtraction in 64, would turn into a held one is outside."""
        weight = torch.full((4, 64), 0x38, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((4, 2), 127, dtype=torch.uint8, device=device)
        far = [first + 2**32, first - 2**32, first + 2**40, INT64.min, INT64.max, INT64.min + first, INT64.max - 1]
        ids = torch.tensor([[first, *far, first + 3]], device=device)
        got = self.lookup(weight, scales, ids, first_row=first)
        assert got[0, :, 0].tolist() == [1.0] + [0.0] * len(far) + [1.0]

    def test_out_is_filled_and_nothing_else(self, device: torch.device) -> None:
        """`out` is returned, every row of it is written, zero rows too, and no byte around it."""
        weight, scales = (tensor.to(device) for tensor in all_pairs())
        weight = weight.view(torch.float8_e4m3fn)
        ids = torch.tensor([[3, -1, 200], [256, 100, 128]], dtype=torch.int32, device=device)
        buffer = torch.full((4, 5, 256), 77.0, dtype=torch.bfloat16, device=device)
        want = self.lookup(weight, scales, ids, local_heads=5)
        got = self.lookup(weight, scales, ids, local_heads=5, out=buffer[1:3])
        assert got.data_ptr() == buffer[1:3].data_ptr()
        np.testing.assert_array_equal(bits(buffer[1:3]), bits(want))
        assert (buffer[[0, 3]] == 77).all()
        assert bits(want)[:, 3:].any() == 0

    def background_law(self, device: torch.device, seed: int, tokens: int) -> None:
        """A background lookup gives the bits of a plain one."""
        rng = np.random.default_rng(seed)
        weight = torch.from_numpy(rng.integers(0, 256, (300, 256), dtype=np.uint8)).to(device).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(rng.integers(90, 160, (300, 8), dtype=np.uint8)).to(device)
        ids = torch.from_numpy(rng.integers(-5, 305, (tokens, 24)).astype(np.int32)).to(device)
        plain = self.lookup(weight, scales, ids, head_start=8, local_heads=8)
        background = self.lookup(weight, scales, ids, head_start=8, local_heads=8, background=True)
        np.testing.assert_array_equal(bits(background), bits(plain))

    def test_offsets_pass_two_to_the_31(self, device: torch.device, tmp_path: Path) -> None:
        """Rows of a table of full size are found where byte and scale offsets pass 2^31 and 2^32, to the very last row.

        The table is a sparse file with 2^31 bytes before it, where an offset that wraps around would land on zeros.
        """
        if device.type != "cpu":
            pytest.skip("the sparse file stands for the full table on a CPU; the GPU has the table itself")
        weight = sparse(tmp_path / "weight", FULL_ROWS, 256)
        scales = sparse(tmp_path / "scales", FULL_ROWS, 8)
        edges = [2**31 // 256, 2**32 // 256, 2**31 // 8, 2**33 // 256, FULL_ROWS]
        rows = sorted({0, 1, *(edge - 1 for edge in edges), *edges[:-1], 300_000_000})
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 256, (len(rows), 256), dtype=np.uint8)
        factors = rng.integers(100, 150, (len(rows), 8), dtype=np.uint8)
        weight[rows], scales[rows] = torch.from_numpy(codes), torch.from_numpy(factors)
        ids = torch.tensor(rows, dtype=torch.int32)[:, None]
        for background in (False, True):
            got = self.lookup(weight.view(torch.float8_e4m3fn), scales, ids, background=background)
            for i, row in enumerate(rows):
                want = exact_bits()[factors[i].repeat(32), codes[i]]
                np.testing.assert_array_equal(bits(got)[i, 0], want, err_msg=f"row {row}")

    @pytest.mark.filterwarnings("ignore:overflow encountered")
    @pytest.mark.parametrize("columns", [15, 24])
    def test_parts_of_ranks_are_the_whole(self, device: torch.device, columns: int) -> None:
        """The parts of P ranks, each with its own rows alone, make the whole, bit for bit, -0.0 included."""
        rng = np.random.default_rng(columns)
        sizes = rng.integers(1, 9, size=columns).tolist()
        rows = sum(sizes)
        weight = torch.from_numpy(rng.choice([0x00, 0x80, 0x38, 0xB9, 0x7F], (rows, 32)).astype(np.uint8)).to(device)
        scales = torch.from_numpy(rng.integers(0, 255, (rows, 1), dtype=np.uint8)).to(device)
        ends = np.cumsum(sizes)
        ids = np.stack([rng.integers(end - size, end, 9) for end, size in zip(ends, sizes, strict=True)], axis=1)
        ids[4] = -1
        want = expected_bits(weight.cpu().numpy(), scales.cpu().numpy(), ids, 0, 0, columns)
        given_ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        for ranks in self.rank_counts(device):
            parts, shards = [], []
            for rank in range(ranks):
                shard = self.embedding(ShardPlan.of(sizes, ranks=ranks, rank=rank), 32, device=device)
                shard.load_scales(scales)
                shard.load_weight(weight.view(torch.float8_e4m3fn))
                assert shard.weight.shape[0] == shard.plan.end_row - shard.plan.first_row
                parts.append(shard.lookup(given_ids))
                shards.append(shard)
            np.testing.assert_array_equal(bits(shards[-1].gather(parts)), want, err_msg=f"{ranks} ranks")

    def rank_counts(self, device: torch.device) -> list[int]:
        """Give the numbers of ranks to try."""
        return list(range(1, 31))

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"weight": torch.zeros(4, 64)}, TypeError, "weight: got dtype torch.float32"),
            ({"weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}, ValueError, "weight: got shape"),
            ({"weight": torch.zeros(4, 48, dtype=torch.float8_e4m3fn)}, ValueError, "weight: .* multiple of 32"),
            ({"weight": torch.zeros(64, 4, dtype=torch.uint8).view(torch.float8_e4m3fn).t()}, ValueError, "contiguous"),
            ({"scales": torch.zeros(4, 2)}, TypeError, "scales: got dtype torch.float32"),
            ({"scales": torch.zeros(2, 4, dtype=torch.uint8)}, ValueError, r"scales: got shape \(2, 4\)"),
            ({"scales": torch.zeros(3, 2, dtype=torch.uint8)}, ValueError, r"expected \[4, 2\]"),
            ({"ids": torch.zeros(3, 5)}, TypeError, "ids: got dtype torch.float32"),
            ({"ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "ids: got shape"),
            ({"out": torch.zeros(3, 4, 64, dtype=torch.bfloat16)}, ValueError, r"out: got shape \(3, 4, 64\)"),
            ({"out": torch.zeros(3, 5, 64)}, TypeError, "out: got dtype torch.float32"),
            ({"out": torch.zeros(3, 5, 128, dtype=torch.bfloat16)[..., ::2]}, ValueError, "out: got strides"),
            ({"first_row": -1}, ValueError, "first_row: got -1"),
            ({"first_row": 2**31}, ValueError, "first_row: got 2147483648"),
            ({"first_row": 0.0}, TypeError, "first_row: got float"),
            ({"head_start": -1}, ValueError, "head_start: got -1"),
            ({"head_start": 6}, ValueError, "head_start: got 6, expected at most the 5 columns"),
            ({"local_heads": -1}, ValueError, "local_heads: got -1"),
            ({"local_heads": True}, TypeError, "local_heads: got bool"),
        ],
    )
    def test_refusals_name_the_argument(self, device: torch.device, change: dict, error: type, message: str) -> None:
        """What does not fit is refused by name, with what came and what was expected."""
        arguments = {
            "weight": torch.zeros(4, 64, dtype=torch.float8_e4m3fn),
            "scales": torch.zeros(4, 2, dtype=torch.uint8),
            "ids": torch.zeros(3, 5, dtype=torch.int32),
        } | change
        moved = {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
        if "strides" in message:
            moved["out"] = torch.zeros(3, 5, 128, dtype=torch.bfloat16, device=device)[..., ::2]
        tensors = [moved.pop(name) for name in ("weight", "scales", "ids")]
        with pytest.raises(error, match=message):
            self.lookup(*tensors, **moved)


def sparse(path: Path, rows: int, width: int) -> torch.Tensor:
    """Map a file of zeros that takes no space until written: rows * width bytes, with 2^31 bytes before them."""
    before = 2**31
    with open(path, "wb") as file:
        file.truncate(before + rows * width)
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))[before:].view(rows, width)


class TestReference(LookupLaws):
    lookup = staticmethod(reference.embedding.lookup)
    embedding = reference.embedding.EngramEmbedding

    @given(data=st.data(), seed=SEEDS)
    @pytest.mark.filterwarnings("ignore:overflow encountered")
    def test_a_row_is_its_definition(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of columns of any ids gives the defined rows, and zeros for what the rank has not."""
        self.row_law(device, data, seed)

    @given(seed=SEEDS, tokens=TOKENS)
    def test_background_changes_no_bit(self, device: torch.device, seed: int, tokens: int) -> None:
        """A background lookup gives the bits of a plain one."""
        self.background_law(device, seed, tokens)
