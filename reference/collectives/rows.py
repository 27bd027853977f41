"""What P ranks do to put their looked-up parts together: pure torch.distributed, the same on both sides.

Each function is called by every rank of a group with the same T, and returns nothing but copies: no bit of a row
changes on the way. Copies of windows are left to the caller's `select_rows`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from reference.checks import check_tensor
from reference.shard_plan import ShardPlan, check_count

Form = Literal["all_to_all", "gather_select"]
FORMS = ("all_to_all", "gather_select")
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# torch 2.13 deprecates the second names, and 2.11 has no other
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Window(NamedTuple):
    """Say which tokens of a step a rank's stream holds.

    Attributes:
        first: the first token, min(r * size, T).
        live: how many tokens, min(size, T - first).
        size: rows of the stream, ceil(T / P); those past `live` are padding.
    """

    first: int
    live: int
    size: int


def token_window(tokens: int, *, ranks: int, rank: int) -> Window:
    """Cut a step of `tokens` tokens into equal streams and give the window of one rank."""
    size = -(-tokens // ranks)
    first = min(rank * size, tokens)
    return Window(first, min(size, tokens - first), size)


def check_select(gathered: torch.Tensor, ranks: int, first_token: int, tokens: int, columns: int) -> int:
    """Refuse arguments that `select_rows` cannot take, and give the tokens of each rank's part.

    Returns:
        T = gathered.shape[0] / ranks.

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """
    check_tensor("gathered", gathered, ("P*T", "local", "dim"), ROW_DTYPES)
    if not gathered.is_contiguous():
        raise ValueError(f"gathered: got strides {gathered.stride()}, expected a contiguous tensor")
    check_count("ranks", ranks, 1)
    if gathered.shape[0] % ranks:
        raise ValueError(f"gathered: got {gathered.shape[0]} rows, expected a multiple of {ranks} ranks")
    check_count("first_token", first_token, 0)
    check_count("tokens", tokens, 0)
    check_count("columns", columns, 0, ranks * gathered.shape[1])
    return gathered.shape[0] // ranks


def gather_ids(hash_ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Lay the ids of all ranks one after the other.

    Args:
        hash_ids: [T, C] this rank's own ids, of one dtype and one T on all ranks; DEAD for tokens it has not.
        group: the ranks.

    Returns:
        [P*T, C], rank-major.
    """
    tokens, columns = hash_ids.shape
    gathered = hash_ids.new_empty(dist.get_world_size(group) * tokens, columns)
    if gathered.numel():
        _all_gather(gathered, hash_ids.contiguous(), group=group)
    return gathered


def whole_rows(
    part: torch.Tensor, plan: ShardPlan, group: dist.ProcessGroup, select_rows: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Give every rank all rows (tensor parallel): heads are gathered on the head axis and cut to C, rows are summed.

    Args:
        part: [T, local_heads, dim] bfloat16, contiguous, what this rank looked up; not written.
        plan: what this rank holds.
        group: the ranks, in the plan's order.
        select_rows: the side's own.

    Returns:
        [T, C, dim] bfloat16.
    """
    tokens = part.shape[0]
    if tokens == 0:
        return part.new_empty(0, plan.columns, part.shape[2])
    if plan.kind == "rows":
        return _sum_bits(part, group)
    return select_rows(_gather(part, group), ranks=plan.ranks, first_token=0, tokens=tokens, columns=plan.columns)


def window_rows(
    part: torch.Tensor,
    plan: ShardPlan,
    group: dist.ProcessGroup,
    select_rows: Callable[..., torch.Tensor],
    form: Form,
) -> torch.Tensor:
    """Give every rank all columns of its own tokens (sequence parallel); both forms give the same bits.

    "all_to_all" sends each rank only what it keeps: an all-to-all of heads, a reduce-scatter of rows. "gather_select"
    sends everything to all (all-gather, all-reduce) and selects.

    Args:
        part: [T, local_heads, dim] bfloat16, contiguous, what this rank looked up for the whole step; not written.
        plan: what this rank holds.
        group: the ranks, in the plan's order.
        select_rows: the side's own.
        form: how the rows travel.

    Returns:
        [ceil(T/P), C, dim] bfloat16, zero rows past the rank's live tokens.
    """
    tokens, ranks, columns = part.shape[0], plan.ranks, plan.columns
    window = token_window(tokens, ranks=ranks, rank=plan.rank)
    if tokens == 0:
        return part.new_empty(0, columns, part.shape[2])
    if plan.kind == "rows" and form == "all_to_all":
        return _scatter_bits(part, window.size * ranks, group)
    if plan.kind == "rows":
        total = _sum_bits(part, group)
        return select_rows(total, ranks=1, first_token=window.first, tokens=window.size, columns=columns)
    if form == "all_to_all":
        live = [token_window(tokens, ranks=ranks, rank=rank).live for rank in range(ranks)]
        received = part.new_empty(ranks * window.live, *part.shape[1:])  # rank-major, my tokens of every rank's heads
        dist.all_to_all_single(received, part, [window.live] * ranks, live, group=group)
        return select_rows(received, ranks=ranks, first_token=0, tokens=window.size, columns=columns)
    gathered = _gather(part, group)
    return select_rows(gathered, ranks=ranks, first_token=window.first, tokens=window.size, columns=columns)


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    _all_gather(gathered, part, group=group)
    return gathered


def _sum_bits(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add bit patterns: one rank has a row, the others zero bits, so that no pair of bfloat16 carries into the next.

    As int32, for neither NCCL nor gloo adds int16; not as floats, for those turn -0.0 into +0.0.
    """
    total = part.clone()
    dist.all_reduce(total.view(torch.int32), group=group)
    return total


def _scatter_bits(part: torch.Tensor, padded: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Add bit patterns as `_sum_bits` does, of a step padded with zero rows, and keep this rank's share."""
    source = part.new_zeros(padded, *part.shape[1:])
    source[: part.shape[0]] = part
    kept = part.new_empty(padded // dist.get_world_size(group), *part.shape[1:])
    _reduce_scatter(kept.view(torch.int32), source.view(torch.int32), group=group)
    return kept
