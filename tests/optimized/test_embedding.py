"""The kernel under the laws of the lookup, and what only a GPU can show."""

import inspect

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import optimized.embedding
import reference.embedding
from optimized.embedding import _lookup_kernel, launch_shape, lookup
from reference.shard_plan import ShardPlan
from tests.reference.test_embedding import FULL_ROWS, SEEDS, TOKENS, LookupLaws, bits
from tests.reference.test_quantization import exact_bits


class TestOptimized(LookupLaws):
    lookup = staticmethod(lookup)
    embedding = optimized.embedding.EngramEmbedding

    @given(data=st.data(), seed=SEEDS)
    @pytest.mark.filterwarnings("ignore:overflow encountered")
    def test_a_row_is_its_definition(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of columns of any ids gives the defined rows, and zeros for what the rank has not."""
        self.row_law(device, data, seed)

    @given(seed=SEEDS, tokens=TOKENS)
    def test_background_changes_no_bit(self, device: torch.device, seed: int, tokens: int) -> None:
        """A background lookup gives the bits of a plain one."""
        self.background_law(device, seed, tokens)

    def rank_counts(self, device: torch.device) -> list[int]:
        """Give every number of ranks on a GPU; under the interpreter, some of each kind of plan."""
        return list(range(1, 31)) if device.type == "cuda" else [1, 2, 4, 7, 11, 24, 30]


def test_both_sides_have_one_signature() -> None:
    """A caller can exchange the two sides: same names, parameters and defaults."""
    assert inspect.signature(lookup) == inspect.signature(reference.embedding.lookup)
    for name in ("__init__", "lookup", "gather", "load_weight", "load_scales", "load_checkpoint"):
        sides = [getattr(side.EngramEmbedding, name) for side in (reference.embedding, optimized.embedding)]
        assert inspect.signature(sides[0]) == inspect.signature(sides[1])


@pytest.mark.parametrize("tokens", [1, 700])
def test_several_programs_cover_all_rows(device: torch.device, tokens: int) -> None:
    """Rows at the edges of the programs' shares are right, with more rows than one program takes."""
    rng = np.random.default_rng(tokens)
    weight = torch.from_numpy(rng.integers(0, 256, (5000, 256), dtype=np.uint8)).to(device).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.integers(100, 150, (5000, 8), dtype=np.uint8)).to(device)
    ids = torch.from_numpy(rng.integers(0, 5000, (tokens, 3)).astype(np.int32)).to(device)
    want = bits(reference.embedding.lookup(weight, scales, ids))
    for background in (False, True):
        np.testing.assert_array_equal(bits(lookup(weight, scales, ids, background=background)), want)


def random_table(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill a table on the device: weight [rows, 256], scales [rows, 8]."""
    weight = torch.empty(rows, 256, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, 8, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(14)
    for part in weight.split(1 << 22):
        part.random_(0, 256, generator=generator)
    for part in scales.split(1 << 22):
        part.random_(100, 150, generator=generator)
    return weight.view(torch.float8_e4m3fn), scales


@pytest.mark.gpu
def test_the_full_table_is_read_to_its_last_row(device: torch.device) -> None:
    """On a table of 384,016,682 rows, offsets past 2^31 and 2^32 give the right rows, to the very last."""
    torch.cuda.empty_cache()
    need = FULL_ROWS * 264 + (4 << 30)
    free = torch.cuda.mem_get_info(device)[0]
    if free < need:
        pytest.skip(f"got {free >> 30} GiB of free device memory, needs {need >> 30}")
    try:
        check_full_table(device)
    finally:
        torch.cuda.empty_cache()


def check_full_table(device: torch.device) -> None:
    """Make the table, look rows at every edge up and compare them, and let the table go."""
    weight, scales = random_table(FULL_ROWS, device)
    rng = np.random.default_rng(1)
    edges = np.array([1, 2**31 // 256, 2**32 // 256, 2**33 // 256, 2**31 // 8, 2**35 // 256, FULL_ROWS])
    rows = np.concatenate([edges - 1, edges[:-1], rng.integers(0, FULL_ROWS, 299)])
    ids = torch.from_numpy(rows.astype(np.int32)).to(device).view(-1, 6)
    codes, factors = weight.view(torch.uint8), scales
    for background in (False, True):
        got = bits(lookup(weight, scales, ids, background=background)).reshape(-1, 256)
        for i, row in enumerate(rows.tolist()):
            code = codes.narrow(0, row, 1).cpu().numpy()[0]  # a slice: no index arithmetic of ours
            factor = factors.narrow(0, row, 1).cpu().numpy()[0]
            np.testing.assert_array_equal(got[i], exact_bits()[factor.repeat(32), code], err_msg=f"row {row}")
    many = torch.randint(0, FULL_ROWS, (8192, 24), dtype=torch.int32, device=device)
    fast, again = lookup(weight, scales, many), lookup(weight, scales, many, background=True)
    assert torch.equal(fast.view(torch.int16), again.view(torch.int16))
    assert torch.equal(fast.view(torch.int16), reference.embedding.lookup(weight, scales, many).view(torch.int16))


@pytest.mark.gpu
def test_a_pinned_table_gives_the_same_bits(device: torch.device) -> None:
    """The kernel reads a table in pinned host memory, torch's own or a shard's, and changes no bit."""
    weight, scales = random_table(100_003, device)
    ids = torch.randint(-3, 100_010, (513, 24), dtype=torch.int32, device=device)
    want = lookup(weight, scales, ids)
    pinned = weight.cpu().pin_memory(), scales.cpu().pin_memory()
    shard = optimized.embedding.EngramEmbedding(
        ShardPlan.of([4166] * 23 + [4185]), 256, device=device, placement="pinned"
    )
    shard.load_weight(weight)
    shard.load_scales(scales)
    assert shard.weight.is_pinned()
    assert shard.scales.is_pinned()
    for background in (False, True):
        for got in (lookup(*pinned, ids, background=background), shard.lookup(ids, background=background)):
            assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert torch.equal(reference.embedding.lookup(*pinned, ids).view(torch.int16), want.view(torch.int16))


@pytest.mark.gpu
def test_a_pageable_table_is_refused(device: torch.device) -> None:
    """A host table that CUDA cannot read is refused by name, on both sides."""
    weight = torch.zeros(4, 64, dtype=torch.float8_e4m3fn)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for side in (reference.embedding, optimized.embedding):
        with pytest.raises(ValueError, match=r"weight: got device cpu, expected cuda.* or pinned host memory"):
            side.lookup(weight, torch.zeros(4, 2, dtype=torch.uint8, device=device), ids)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 24, 1000, 200_000, 10_000_000])
def test_background_leaves_half_of_the_device(device: torch.device, count: int) -> None:
    """A background lookup launches at most half as many programs as there are multiprocessors, whatever its size."""
    programs, rows, _ = launch_shape(count, 256, device, background=True)
    assert 1 <= programs <= torch.cuda.get_device_properties(device).multi_processor_count // 2
    assert programs <= triton.cdiv(count, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("background", [False, True])
def test_one_variant_serves_all_sizes(device: torch.device, background: bool) -> None:
    """Sizes, windows, strides and odd addresses compile one variant of the kernel for an id dtype."""
    weight, scales = random_table(4096, device)

    def variants() -> int:
        return sum(len(cache[0]) for cache in _lookup_kernel.device_caches.values())

    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(0, 4096, (514, 25), dtype=dtype, device=device)
        lookup(weight, scales, ids[:3], background=background)
        before = variants()
        for tokens in (1, 3, 16, 17, 32, 257, 512):
            for start, heads in ((0, 1), (0, 16), (1, 24), (16, 3)):
                view = ids[1 : tokens + 1, 1:]
                lookup(weight, scales, view, head_start=start, local_heads=heads, background=background)
                lookup(weight[16:], scales[16:], view.t().contiguous().t(), first_row=1, background=background)
                lookup(weight[:1], scales[1:2], ids[::2], first_row=16, background=background)
        assert variants() == before


@pytest.mark.gpu
def test_a_captured_lookup_follows_its_inputs(device: torch.device) -> None:
    """A lookup captured in a CUDA graph and replayed over changed ids gives what an eager one gives."""
    weight, scales = random_table(4096, device)
    ids = torch.zeros(64, 24, dtype=torch.int32, device=device)
    out = torch.empty(64, 24, 256, dtype=torch.bfloat16, device=device)
    lookup(weight, scales, ids, out=out)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lookup(weight, scales, ids, out=out)
    for _ in range(10):
        ids.random_(0, 4096)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out.view(torch.int16), lookup(weight, scales, ids).view(torch.int16))
