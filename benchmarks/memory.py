# mypy: disallow-untyped-defs=False
"""Plain Triton kernels on whole memory: the copy that is the ceiling, a fill with random codes, and an empty one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference.quantization import BLOCK

_WORDS = 4096  # int32 words of a program
_NUMBERS = 1 << 22  # of a program in Triton's interpreter, whose cost is a program's
_LEAST_SCALE, _SCALE_MASK = 112, 31  # scale bytes 112 to 143: 2^-15 to 2^16, where no product is subnormal


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int32 words, contiguous, of the same number."""
    block = _block(source)
    _copy_kernel[(triton.cdiv(source.numel(), block),)](target, source, source.numel(), BLOCK=block, num_warps=8)


def empty(tensor: torch.Tensor) -> None:
    """Launch a kernel that does nothing."""
    _empty_kernel[(1,)](tensor, num_warps=1)


def random_table(rows: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a table of random codes: `[rows, dim]` float8_e4m3fn without NaN, `[rows, dim/32]` uint8 scales."""
    weight = torch.empty(rows, dim, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, dim // BLOCK, dtype=torch.uint8, device=device)
    fill(weight, first=0, scales=False)
    fill(scales, first=0, scales=True)
    return weight.view(torch.float8_e4m3fn), scales


def fill(codes: torch.Tensor, *, first: int, scales: bool) -> None:
    """Fill uint8 memory, contiguous, a multiple of 4 bytes, with random codes; int32 word i is one of first + i."""
    words = codes.view(-1).view(torch.int32)
    block = _block(words)
    grid = (triton.cdiv(words.numel(), block),)
    _fill_kernel[grid](
        words, words.numel(), first, SCALES=scales, LEAST=_LEAST_SCALE, MASK=_SCALE_MASK, BLOCK=block, num_warps=8
    )


def _block(words: torch.Tensor) -> int:
    return _WORDS if words.is_cuda else min(_NUMBERS, triton.next_power_of_2(words.numel()))


@triton.jit
def _copy_kernel(target, source, words, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < words), mask=place < words)


@triton.jit
def _empty_kernel(tensor):
    pass


@triton.jit(do_not_specialize=["first"])
def _fill_kernel(
    codes, words, first, SCALES: tl.constexpr, LEAST: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = place + first
    # two rounds of multiply and shift: neighbours look unrelated
    mixed = (word ^ (word >> 32)).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    mixed = mixed ^ (mixed >> 13)
    if SCALES:
        mixed = (mixed & (MASK * 0x01010101)) + LEAST * 0x01010101
    else:
        nan = ((mixed & 0x7F7F7F7F) + 0x01010101) & 0x80808080  # the high bit of every byte that would be NaN
        mixed = mixed ^ (nan >> 7)
    tl.store(codes + place, mixed.to(tl.int32, bitcast=True), mask=place < words)
