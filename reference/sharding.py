"""Copy a window of tokens out of what the ranks' heads were gathered into."""

import torch

from reference.collectives.rows import check_select


def select_rows(gathered: torch.Tensor, *, ranks: int, first_token: int, tokens: int, columns: int) -> torch.Tensor:
    """Lay the ranks' heads of a window of tokens side by side.

        out[t, c] = gathered[(c // local) * T + first_token + t, c % local],   T = gathered.shape[0] / ranks

    A token at or past T gives a zero row. Bits are copied as they are.

    Args:
        gathered: [P*T, local, dim] bfloat16, float16 or float32, contiguous, rank-major.
        ranks: P >= 1.
        first_token: >= 0, the first token of the window.
        tokens: >= 0, its length; it may reach past T.
        columns: C <= P * local; the heads past it are padding and left out.

    Returns:
        [tokens, columns, dim], contiguous, dtype and device of gathered.

    Raises:
        TypeError, ValueError: an argument of another type, shape, dtype or range.
    """
    source_tokens = check_select(gathered, ranks, first_token, tokens, columns)
    local, dim = gathered.shape[1:]
    out = gathered.new_zeros(tokens, columns, dim)
    live = max(min(tokens, source_tokens - first_token), 0)
    for column in range(columns):
        rank, head = divmod(column, local)
        start = rank * source_tokens + first_token
        out[:live, column] = gathered[start : start + live, head]
    return out
