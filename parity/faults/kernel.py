"""Mistakes in kernels: whole small Triton kernels, each with one."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM108  a kernel may not choose between two dtypes in one expression

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from parity.faults.fault import plant
from parity.faults.model import Model


class _Kernel(Model):
    """Hash values with a Triton kernel of the subclass's own, one program for all."""

    kernel: Any

    def mix(self, values: torch.Tensor) -> torch.Tensor:
        """Leave the values to the kernel."""
        return values

    def reduce(self, mixes: torch.Tensor) -> torch.Tensor:
        """Run the kernel on values `[T, N]`, for all layers and columns."""
        tokens, ngram = mixes.shape
        layers, columns = self.offsets.shape
        rows = torch.empty((tokens, layers, columns), dtype=torch.int32)
        values, primes = mixes.contiguous(), self.primes.contiguous()
        type(self).kernel[(layers,)](
            values, self.multipliers, primes, self.offsets, rows, tokens, layers, columns, columns // (ngram - 1),
            N=ngram, COLUMNS=triton.next_power_of_2(columns), BLOCK=triton.next_power_of_2(tokens),
        )  # fmt: skip
        return rows


@triton.jit
def _oldest_first_kernel(
    values, multipliers, primes, offsets, rows, tokens, layers, columns, heads,
    N: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    t, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    order = column // heads + 2
    mix = tl.zeros((BLOCK, COLUMNS), tl.int64)
    for k in tl.static_range(N):
        value = tl.load(values + t * N + k, t < tokens, other=0)
        taken = k < order
        factor = tl.load(multipliers + layer * N + order - 1 - k, taken, other=0)  # the mistake: k belongs here
        mix ^= value[:, None] * factor[None, :]
    prime = tl.load(primes + layer * columns + column, column < columns, other=1)
    offset = tl.load(offsets + layer * columns + column, column < columns, other=0)
    row = (mix % prime[None, :] + offset[None, :]).to(tl.int32)
    cell = (t * layers + layer)[:, None] * columns + column[None, :]
    tl.store(rows + cell, row, (t < tokens)[:, None] & (column < columns)[None, :])


@triton.jit
def _narrow_product_kernel(
    values, multipliers, primes, offsets, rows, tokens, layers, columns, heads,
    N: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    t, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    order = column // heads + 2
    mix = tl.zeros((BLOCK, COLUMNS), tl.int64)
    for k in tl.static_range(N):
        value = tl.load(values + t * N + k, t < tokens, other=0).to(tl.uint32)
        factor = tl.load(multipliers + layer * N + k).to(tl.uint32)
        product = (value * factor).to(tl.int64)  # the mistake: widened behind the product, not before
        mix ^= tl.where((k < order)[None, :], product[:, None], 0)
    prime = tl.load(primes + layer * columns + column, column < columns, other=1)
    offset = tl.load(offsets + layer * columns + column, column < columns, other=0)
    row = (mix % prime[None, :] + offset[None, :]).to(tl.int32)
    cell = (t * layers + layer)[:, None] * columns + column[None, :]
    tl.store(rows + cell, row, (t < tokens)[:, None] & (column < columns)[None, :])


@triton.jit
def _next_prime_kernel(
    values, multipliers, primes, offsets, rows, tokens, layers, columns, heads,
    N: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    t, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    order = column // heads + 2
    mix = tl.zeros((BLOCK, COLUMNS), tl.int64)
    for k in tl.static_range(N):
        value = tl.load(values + t * N + k, t < tokens, other=0)
        product = value * tl.load(multipliers + layer * N + k)
        mix ^= tl.where((k < order)[None, :], product[:, None], 0)
    after = (column + 1) % columns  # the mistake: the pointer is advanced before it is read
    prime = tl.load(primes + layer * columns + after, column < columns, other=1)
    offset = tl.load(offsets + layer * columns + column, column < columns, other=0)
    row = (mix % prime[None, :] + offset[None, :]).to(tl.int32)
    cell = (t * layers + layer)[:, None] * columns + column[None, :]
    tl.store(rows + cell, row, (t < tokens)[:, None] & (column < columns)[None, :])


@triton.jit
def _narrow_mix_kernel(
    values, multipliers, primes, offsets, rows, tokens, layers, columns, heads,
    N: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    t, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    order = column // heads + 2
    mix = tl.zeros((BLOCK, COLUMNS), tl.int32)  # the mistake: 64 bits belong here
    for k in tl.static_range(N):
        value = tl.load(values + t * N + k, t < tokens, other=0)
        product = value * tl.load(multipliers + layer * N + k)
        mix ^= tl.where((k < order)[None, :], product[:, None], 0).to(tl.int32)
    prime = tl.load(primes + layer * columns + column, column < columns, other=1)
    offset = tl.load(offsets + layer * columns + column, column < columns, other=0)
    row = ((mix & 0x7FFFFFFF).to(tl.int64) % prime[None, :] + offset[None, :]).to(tl.int32)
    cell = (t * layers + layer)[:, None] * columns + column[None, :]
    tl.store(rows + cell, row, (t < tokens)[:, None] & (column < columns)[None, :])


@plant("C1b", "the multipliers are paired with the tokens from the oldest on, within a kernel")
class MultipliersOldestFirstInAKernel(_Kernel):
    """The kernel walks from the oldest token of each order and the multipliers from their first.

    Source: b12x#332. Law: agreement.
    """

    kernel = _oldest_first_kernel


@plant("C8", "the products are computed in 32 bits and widened afterwards")
class ProductIn32Bits(_Kernel):
    """Both factors fit 32 bits on paper; the product does not, and the cast comes too late.

    Law: agreement.
    """

    kernel = _narrow_product_kernel


@plant("C22", "each column is reduced by the prime of the column after it")
class NextPrime(_Kernel):
    """The walk over primes and the walk over columns are one step apart.

    Source: ports of vllm and TileKernels. Law: agreement.
    """

    kernel = _next_prime_kernel


@plant("C23", "the mix is kept in 32 bits")
class MixIn32Bits(_Kernel):
    """The accumulator has the dtype of the output.

    Law: agreement.
    """

    kernel = _narrow_mix_kernel


@triton.jit
def _write_and_read_kernel(cache, writes, values, reads, found, count, asked, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # The mistake: one launch for both. Nothing orders the loads behind the stores of other programs.
    slot = tl.load(reads + at, at < asked, other=0)
    tl.store(found + at, tl.load(cache + slot, at < asked, other=0), at < asked)
    target = tl.load(writes + at, at < count, other=-1)
    tl.store(cache + target, tl.load(values + at, at < count, other=0), (at < count) & (target >= 0))


@plant("H20b", "the slots are read in the launch that writes them, unordered")
class SlotsWrittenAndReadInOneLaunch(Model):
    """Writes and reads share a launch to save one; a block that another program fills is read too early.

    Law: prefix_hit.
    """

    def write(self, step: dict[str, Any], batch: torch.Tensor) -> None:
        """Leave the writes to the launch that reads."""
        self._writes = step["slot_mapping"][: len(batch)].long(), batch.int()

    def read(self, table: torch.Tensor, request: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Read, and write in the same launch."""
        assert self.cache is not None
        assert self.block_size is not None
        block = table[request, (q // self.block_size).clamp(0, table.shape[1] - 1)].long()
        slots = (block * self.block_size + q % self.block_size).clamp(0, len(self.cache) - 1)
        self._launch(slots, found := torch.empty(len(slots), dtype=torch.int32))
        return found.long()

    def finish(self) -> None:
        """Write where nothing was read."""
        if self.cache is not None:
            self._launch(nothing := torch.zeros(0, dtype=torch.int64), nothing.int())

    def _launch(self, reads: torch.Tensor, found: torch.Tensor) -> None:
        writes, values = vars(self).pop("_later", self._writes)
        if len(reads):  # every read of the step sees the slots as they were
            self._later, writes = (writes, values), torch.full_like(writes, -1)
        block = triton.next_power_of_2(max(len(writes), len(reads)))
        _write_and_read_kernel[(1,)](self.cache, writes, values, reads, found, len(writes), len(reads), BLOCK=block)


@triton.jit
def _narrow_offsets_kernel(
    weight, scales, ids, out, count, DIM: tl.constexpr, ROW32: tl.constexpr, SCALE32: tl.constexpr
):
    row = tl.load(ids + tl.program_id(0))
    lane = tl.arange(0, DIM)
    if ROW32:
        code = tl.load(weight + row * DIM + lane)  # the mistake: row is an int32, and so is the product
    else:
        code = tl.load(weight + row.to(tl.int64) * DIM + lane)
    if SCALE32:
        byte = tl.load(scales + row * (DIM // 32) + lane // 32)  # the mistake: likewise
    else:
        byte = tl.load(scales + row.to(tl.int64) * (DIM // 32) + lane // 32)
    tl.store(out + tl.program_id(0) * DIM + lane, (byte.to(tl.int32) << 8) | code.to(tl.int32))


def _look_up_narrow(
    weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, *, row32: bool, scale32: bool
) -> torch.Tensor:
    from reference.quantization import dequantize

    dim = weight.shape[1]
    pairs = torch.empty((ids.numel(), dim), dtype=torch.int32)
    _narrow_offsets_kernel[(ids.numel(),)](
        weight.view(torch.uint8), scales.view(torch.uint8), ids.contiguous().int(), pairs, ids.numel(), DIM=dim,
        ROW32=row32, SCALE32=scale32,
    )  # fmt: skip
    codes, bytes_ = (pairs & 255).to(torch.uint8), (pairs >> 8)[:, ::32].contiguous().to(torch.uint8)
    return dequantize(codes, bytes_).reshape(*ids.shape, dim)


@plant("T5", "the offset of a row, row * dim, is computed in 32 bits", offers="embedding.lookup")
def row_offset_in_32_bits(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """Past 8.4 million rows the offset of a row of 256 leaves int32: the kernel reads before its table, or dies.

    Source: vllm#48398. Law: far_rows.
    """
    return _look_up_narrow(weight, scales, ids, row32=True, scale32=False)


@plant("T6", "the offset of a row's scales, row * 8, is computed in 32 bits", offers="embedding.lookup")
def scale_offset_in_32_bits(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """Past 268 million rows the scales' offset leaves int32; on two ranks no rank has so many, and it hides.

    Law: far_rows.
    """
    return _look_up_narrow(weight, scales, ids, row32=False, scale32=True)
