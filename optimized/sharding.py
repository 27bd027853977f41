"""Copy a window of tokens out of what the ranks' heads were gathered into, as one Triton kernel."""

import torch
import triton
import triton.language as tl

from reference.collectives.rows import check_select

_ROWS, _WARPS = 8, 4
_INTERPRETED_ELEMENTS = 1 << 18  # a program of Triton's interpreter costs the same whatever its block
_BITS = {2: torch.int16, 4: torch.int32}
_MAX_ROWS = 2**31 - 1


def select_rows(gathered: torch.Tensor, *, ranks: int, first_token: int, tokens: int, columns: int) -> torch.Tensor:
    """Lay the ranks' heads of a window of tokens side by side.

        out[t, c] = gathered[(c // local) * T + first_token + t, c % local],   T = gathered.shape[0] / ranks

    A token at or past T gives a zero row. Bits are copied as they are. One variant is compiled for all ranks, windows
    and heads of a width and an element size.

    Args:
        gathered: [P*T, local, dim] bfloat16, float16 or float32, contiguous, rank-major.
        ranks: P >= 1.
        first_token: >= 0, the first token of the window.
        tokens: >= 0, its length; it may reach past T.
        columns: C <= P * local; the heads past it are padding and left out.

    Returns:
        [tokens, columns, dim], contiguous, dtype and device of gathered.

    Raises:
        TypeError, ValueError: an argument of another type, shape, dtype or range, or 2^31 rows or more.
    """
    source_tokens = check_select(gathered, ranks, first_token, tokens, columns)
    local, dim = gathered.shape[1:]
    count = tokens * columns
    if max(count, gathered.shape[0] * local) > _MAX_ROWS:
        raise ValueError(f"tokens: got {count} rows of {gathered.shape[0] * local}, expected at most {_MAX_ROWS}")
    out = torch.empty(tokens, columns, dim, dtype=gathered.dtype, device=gathered.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(dim)
    rows = _ROWS
    if gathered.device.type != "cuda":
        rows = min(max(_INTERPRETED_ELEMENTS // block, 1), triton.next_power_of_2(count))
    bits = _BITS[gathered.dtype.itemsize]
    with torch.cuda.device_of(gathered):
        _select_kernel[(triton.cdiv(count, rows),)](
            out.view(bits),
            gathered.view(bits),
            count,
            source_tokens,
            min(first_token, source_tokens),
            local,
            columns,
            DIM=dim,
            BLOCK=block,
            ROWS=rows,
            num_warps=_WARPS,
        )
    return out


_SIZES = ["count", "source_tokens", "first_token", "local", "columns"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _select_kernel(
    out,  # [tokens, columns, DIM]
    gathered,  # [ranks * source_tokens, local, DIM]
    count,
    source_tokens,
    first_token,
    local,
    columns,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS] in [tokens * columns]
    inside = place < count
    lane = tl.arange(0, BLOCK)[None, :]
    place32 = tl.where(inside, place, 0).to(tl.int32)  # the divisions of an int32 are the cheap ones
    column = place32 % columns
    token = first_token.to(tl.int64) + place32 // columns
    source = ((column // local).to(tl.int64) * source_tokens + token) * local + column % local
    held = inside & (token < source_tokens)
    values = tl.load(gathered + source[:, None] * DIM + lane, mask=held[:, None] & (lane < DIM), other=0)
    tl.store(out + place[:, None] * DIM + lane, values, mask=inside[:, None] & (lane < DIM))
