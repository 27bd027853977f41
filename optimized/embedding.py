"""The lookup as one Triton kernel: each program fetches, decodes and rounds a few rows."""

import torch
import triton
import triton.language as tl

from reference.checkpoint import TableShard
from reference.quantization import BLOCK
from reference.shard_plan import check_lookup

_FRONT_ROWS, _FRONT_WARPS = 4, 2  # 16 bytes a thread at dim 256: many small programs hide the latency
_BACK_ROWS, _BACK_WARPS = 32, 16  # few multiprocessors, so each has more rows in flight
_INTERPRETED_ELEMENTS = 1 << 18  # a program of Triton's interpreter costs the same whatever its block


def lookup(
    weight: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    first_row: int = 0,
    head_start: int = 0,
    local_heads: int | None = None,
    background: bool = False,
) -> torch.Tensor:
    """Look rows up, decoded and rounded once to bfloat16.

        out[t, j] = e4m3(weight[row]) * 2^(scales[row] - 127),   row = ids[t, head_start + j] - first_row

    An id outside [first_row, first_row + rows) gives a zero row, so does a column past C; neither reads the table.
    One variant is compiled for all sizes and windows of a table width, id dtype and kind of lookup.

    Args:
        weight: [rows, dim] float8_e4m3fn, on the device of ids or in pinned host memory; dim a multiple of 32.
        scales: [rows, dim/32] uint8 or float8_e8m0fnu, likewise.
        ids: [T, C] int32 or int64, rows of the whole layer; any strides.
        out: [T, local_heads, dim] bfloat16, contiguous, to be filled; None makes one.
        first_row: the layer's row that weight[0] is.
        head_start: the first column to look up.
        local_heads: how many columns to look up; None takes all from head_start on.
        background: occupy at most half of the multiprocessors; changes no bit.

    Returns:
        [T, local_heads, dim] bfloat16, `out` where given; every NaN has the bits 0x7FC0.

    Raises:
        TypeError, ValueError: an argument of another type, shape, dtype, device or range.
    """
    tokens, heads, dim = check_lookup(weight, scales, ids, out, first_row, head_start, local_heads)
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=ids.device)
    if out.numel() == 0:
        return out
    by_bits = triton.knobs.runtime.interpret  # where casts of the interpreter are wrong
    programs, rows, warps = launch_shape(tokens * heads, dim, ids.device, background=background)
    with torch.cuda.device_of(ids):
        _lookup_kernel[(programs,)](
            out.view(torch.int16),
            # a pinned tensor too: the launcher asks CUDA for its device-visible address
            weight.view(torch.uint8) if by_bits else weight,
            scales.view(torch.uint8),
            ids,
            ids.stride(0),
            ids.stride(1),
            tokens * heads,
            heads,
            ids.shape[1],
            min(head_start, ids.shape[1]),
            first_row,
            weight.shape[0],
            DIM=dim,
            GROUP=BLOCK,
            GROUPS=triton.next_power_of_2(dim // BLOCK),
            ROWS=rows,
            BY_BITS=by_bits,
            num_warps=warps,
        )
    return out


class EngramEmbedding(TableShard):
    """Hold a rank's shard of a layer's table and look rows up in it.

    See `TableShard` for how it is made and loaded.
    """

    _lookup = staticmethod(lookup)


def launch_shape(count: int, dim: int, device: torch.device, *, background: bool) -> tuple[int, int, int]:
    """Choose how `count` rows are spread.

    Args:
        count: rows to look up, T * local_heads.
        dim: width of a row.
        device: where the kernel runs.
        background: at most half of the multiprocessors get a program, each of which loops.

    Returns:
        Programs, rows that a program handles at a time, and its warps.
    """
    if device.type != "cuda":
        rows = max(_INTERPRETED_ELEMENTS // triton.next_power_of_2(dim), 1)
        rows = min(rows, triton.next_power_of_2(count))
        return 1 if background else triton.cdiv(count, rows), rows, 1
    if not background:
        return triton.cdiv(count, _FRONT_ROWS), _FRONT_ROWS, _FRONT_WARPS
    half = max(torch.cuda.get_device_properties(device).multi_processor_count // 2, 1)
    return min(half, triton.cdiv(count, _BACK_ROWS)), _BACK_ROWS, _BACK_WARPS


_SIZES = ["stride_token", "stride_column", "count", "heads", "columns", "head_start", "first_row", "rows"]


@triton.jit(
    do_not_specialize=_SIZES,
    # weight and out stay aligned to 16 bytes in every allocation, and wide accesses need that
    do_not_specialize_on_alignment=[*_SIZES, "ids", "scales"],
)
def _lookup_kernel(
    out,
    weight,
    scales,
    ids,
    stride_token,
    stride_column,
    count,
    heads,
    columns,
    head_start,
    first_row,
    rows,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    group = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
    element = tl.arange(0, GROUP)[None, None, :]  # [1, 1, GROUP]
    block = tl.program_id(0)
    while block < tl.cdiv(count, ROWS):  # once, but in the background
        place = block * ROWS + tl.arange(0, ROWS)  # [ROWS] in [T * heads]
        column = head_start + place % heads
        named = (place < count) & (column < columns)
        address = ids + (place // heads).to(tl.int64) * stride_token + column.to(tl.int64) * stride_column
        row = tl.load(address, mask=named, other=0).to(tl.int64)
        first = first_row.to(tl.int64)
        held = named & (row >= first) & (row < first + rows)
        row = tl.where(held, row - first, 0)[:, None]  # [ROWS, 1]

        real = held[:, None] & (group < DIM // GROUP)  # [ROWS, GROUPS]
        byte = tl.load(scales + row * (DIM // GROUP) + group, mask=real, other=0).to(tl.int32)[:, :, None]
        within = (row * DIM + group * GROUP)[:, :, None] + element  # [ROWS, GROUPS, GROUP]
        if BY_BITS:
            code = tl.load(weight + within, mask=real[:, :, None], other=0).to(tl.int32)
            bits = _bfloat16_bits(code, byte).to(tl.int16)
        else:
            # 2^-127 is a subnormal float32, and a byte of 255 NaN; every product is exact, so one rounding remains
            odd = (byte == 0) | (byte == 255)
            factor = ((byte << 23) | tl.where(odd, 1 << 22, 0)).to(tl.float32, bitcast=True)
            product = tl.load(weight + within, mask=real[:, :, None], other=0.0).to(tl.float32) * factor
            bits = product.to(tl.bfloat16).to(tl.int16, bitcast=True)
            bits = tl.where(product == product, bits, 0x7FC0)

        kept = (place < count)[:, None] & (group < DIM // GROUP)
        target = (place.to(tl.int64)[:, None] * DIM + group * GROUP)[:, :, None] + element
        tl.store(out + target, bits, mask=kept[:, :, None])
        block += tl.num_programs(0)


@triton.jit
def _bfloat16_bits(code, byte):
    """Give the bits of bf16(e4m3(code) * 2^(byte - 127)), exact and without a subnormal float32 on the way.

    From byte 10 on, the product is a normal float32 (or infinity) of which bfloat16 keeps every bit. Below, it is taken
    times 2^133, so that bfloat16's smallest step is 1, and rounded to whole steps as it meets 2^23.
    """
    magnitude = code & 0x7F
    # laid over float16, which has a bit more of exponent, a code counts 2^-8 times its value, subnormal or not
    value = (magnitude << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256

    low = byte < 10
    factor = (tl.minimum(tl.where(low, byte + 133, byte), 254) << 23).to(tl.float32, bitcast=True)
    whole = tl.where(low, 8388608.0, 0.0)  # 2^23: float32 steps by 1 from here on
    rounded = value * factor + whole
    exact = rounded - whole
    steps = rounded.to(tl.int32, bitcast=True) & 0xFF  # a bfloat16 subnormal is its number of steps
    normal = (exact.to(tl.int32, bitcast=True) >> 16) - tl.where(low, 133 << 7, 0)
    result = tl.where(low & (exact < 128), steps, normal)
    nan = (magnitude == 0x7F) | (byte == 255)
    return tl.where(nan, 0x7FC0, result | ((code & 0x80) << 8))
