"""The lookup: rows of a layer's quantized table, by the ids that the hash gave."""

import torch

from reference.checkpoint import TableShard
from reference.quantization import dequantize
from reference.shard_plan import check_lookup


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
    """Look rows up, dequantized.

        out[t, j] = dequantize(weight[row], scales[row]),   row = ids[t, head_start + j] - first_row

    An id outside [first_row, first_row + rows) gives a zero row, so does a column past C; neither reads the table.

    Args:
        weight: [rows, dim] float8_e4m3fn, on the device of ids or in pinned host memory; dim a multiple of 32.
        scales: [rows, dim/32] uint8 or float8_e8m0fnu, likewise.
        ids: [T, C] int32 or int64, rows of the whole layer; any strides.
        out: [T, local_heads, dim] bfloat16, contiguous, to be filled; None makes one.
        first_row: the layer's row that weight[0] is.
        head_start: the first column to look up.
        local_heads: how many columns to look up; None takes all from head_start on.
        background: leave at least half of the device to others; changes no bit, and nothing here.

    Returns:
        [T, local_heads, dim] bfloat16, `out` where given; every NaN has the bits 0x7FC0.

    Raises:
        TypeError, ValueError: an argument of another type, shape, dtype, device or range.
    """
    tokens, heads, dim = check_lookup(weight, scales, ids, out, first_row, head_start, local_heads)
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=ids.device)
    out.zero_()
    for j in range(heads):
        if head_start + j >= ids.shape[1]:
            break
        column = ids[:, head_start + j].long()  # [T]
        held = (column >= first_row) & (column < first_row + weight.shape[0])
        rows = (column[held] - first_row).to(weight.device)
        out[held, j] = dequantize(weight.view(torch.uint8)[rows], scales.view(torch.uint8)[rows]).to(ids.device)
    return out


class EngramEmbedding(TableShard):
    """Hold a rank's shard of a layer's table and look rows up in it.

    See `TableShard` for how it is made and loaded.
    """

    _lookup = staticmethod(lookup)
