"""The kernel under the laws of select_rows, and what only a GPU can show."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference.sharding
from optimized.sharding import _select_kernel, select_rows
from tests.reference.test_sharding import SelectLaws


class TestOptimized(SelectLaws):
    select_rows = staticmethod(select_rows)

    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_a_window_is_its_definition(self, device: torch.device, data: st.DataObject, seed: int) -> None:
        """Any window of any ranks' parts is its definition, bit for bit, zero past T, the padding heads left out."""
        self.window_law(device, data, seed)


def test_both_sides_have_one_signature() -> None:
    """A caller can exchange the two sides: same names, parameters and defaults."""
    assert inspect.signature(select_rows) == inspect.signature(reference.sharding.select_rows)


@pytest.mark.parametrize("tokens", [1, 700])
def test_several_programs_cover_all_rows(device: torch.device, tokens: int) -> None:
    """Rows at the edges of the programs' shares are right, with more rows than one program takes."""
    gathered = torch.randint(-(2**15), 2**15, (4 * 701, 6, 256), dtype=torch.int16, device=device).view(torch.bfloat16)
    arguments = {"ranks": 4, "first_token": 1, "tokens": tokens, "columns": 23}
    want = reference.sharding.select_rows(gathered, **arguments)
    assert torch.equal(select_rows(gathered, **arguments).view(torch.int16), want.view(torch.int16))


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31(device: torch.device) -> None:
    """Rows behind 2^31 and 2^32 elements of the gathered parts come out right, and so do rows written there."""
    tokens = 2**32 // (2 * 12 * 256) + 5
    if torch.cuda.mem_get_info(device)[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    gathered = torch.empty(2 * tokens, 12, 256, dtype=torch.int16, device=device).random_().view(torch.bfloat16)
    got = select_rows(gathered, ranks=2, first_token=0, tokens=tokens, columns=24)
    for rank in range(2):
        part = gathered.narrow(0, rank * tokens, tokens)
        assert torch.equal(got[:, 12 * rank : 12 * rank + 12].view(torch.int16), part.view(torch.int16))
    del got
    last = select_rows(gathered, ranks=2, first_token=tokens - 3, tokens=5, columns=23)
    assert torch.equal(last[:3, 12:].view(torch.int16), gathered[-3:, :11].view(torch.int16))
    assert not last[3:].view(torch.int16).any()


@pytest.mark.gpu
def test_one_variant_serves_all_sizes(device: torch.device) -> None:
    """After the first call no ranks, heads, lengths or windows compile the kernel again."""

    def variants() -> int:
        return sum(len(cache[0]) for cache in _select_kernel.device_caches.values())

    gathered = torch.zeros(2 * 3, 4, 256, dtype=torch.bfloat16, device=device)
    select_rows(gathered, ranks=2, first_token=0, tokens=3, columns=8)
    before = variants()
    for tokens in (1, 3, 16, 17, 32, 257):
        for ranks, local in ((1, 1), (1, 16), (2, 12), (5, 5), (16, 2)):
            gathered = torch.zeros(ranks * tokens, local, 256, dtype=torch.bfloat16, device=device)
            for first in (0, 1, 16):
                select_rows(gathered, ranks=ranks, first_token=first, tokens=tokens, columns=ranks * local)
    assert before >= 1
    assert variants() == before
