"""Who holds what: the rows and columns of a layer's table that one of P ranks holds, and how parts become the whole."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from reference.checks import check_tensor
from reference.quantization import BLOCK


def check_count(name: str, value: object, lowest: int, highest: int | None = None) -> None:
    """Refuse what is not an int from `lowest` to `highest`.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < lowest or (highest is not None and value > highest):
        limit = "" if highest is None else f" and at most {highest}"
        raise ValueError(f"{name}: got {value}, expected at least {lowest}{limit}")


@dataclass(frozen=True)
class ShardPlan:
    """Say what one rank holds of a layer's table with C columns, of which column c owns sizes[c] consecutive rows.

    By heads, where every rank gets one: rank r holds columns [r*h, min((r+1)*h, C)) with h = ceil(C/P), and their rows.
    By rows, where a rank would get none ((P-1)*h >= C): rank r holds rows [r*n, min((r+1)*n, rows)) with
    n = ceil(rows/P), and looks every column up.

    Attributes:
        kind: "heads" or "rows".
        rank, ranks: r and P.
        rows: rows of the layer in use, sum(sizes).
        first_row, end_row: the rows that the rank holds, [first_row, end_row) of the layer.
        head_start: the first column that it looks up.
        local_heads: columns that it looks up, equal on every rank; by heads the last rank's may reach past C.
        columns: C.
    """

    kind: Literal["heads", "rows"]
    rank: int
    ranks: int
    rows: int
    first_row: int
    end_row: int
    head_start: int
    local_heads: int
    columns: int

    @classmethod
    def of(cls, sizes: Sequence[int], *, ranks: int = 1, rank: int = 0) -> "ShardPlan":
        """Plan the shard of a rank.

        Args:
            sizes: [C] rows of each column (its prime).
            ranks: P.
            rank: 0 <= rank < ranks.

        Raises:
            TypeError: a size, ranks or rank that is not an int.
            ValueError: no columns, a size below 1, ranks below 1, or a rank out of range.
        """
        sizes = [int(size) for size in sizes]
        check_count("columns", len(sizes), 1)
        for column, size in enumerate(sizes):
            check_count(f"sizes[{column}]", size, 1)
        check_count("ranks", ranks, 1)
        check_count("rank", rank, 0, ranks - 1)
        columns, rows = len(sizes), sum(sizes)
        heads = -(-columns // ranks)
        if (ranks - 1) * heads >= columns:
            share = -(-rows // ranks)
            first, end = (min(r * share, rows) for r in (rank, rank + 1))
            return cls("rows", rank, ranks, rows, first, end, 0, columns, columns)
        start = rank * heads
        first, end = sum(sizes[:start]), sum(sizes[: start + heads])
        return cls("heads", rank, ranks, rows, first, end, start, heads, columns)

    @property
    def local_rows(self) -> int:
        """Count the rows that the rank holds; 0 for a rank past the last row."""
        return self.end_row - self.first_row

    def combine(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the ranks' looked-up parts together.

        By heads they are laid side by side on the head axis and cut to C. By rows exactly one rank has a given row and
        the others have zero bits: the bit patterns are added as integers, as a float sum turns -0.0 into +0.0.

        Args:
            parts: P tensors [T, local_heads, dim] bfloat16, in rank order.

        Returns:
            [T, C, dim] bfloat16.

        Raises:
            TypeError, ValueError: another number of parts, or a part of another shape or dtype.
        """
        if len(parts) != self.ranks:
            raise ValueError(f"parts: got {len(parts)}, expected one for each of {self.ranks} ranks")
        for rank, part in enumerate(parts):
            first = parts[0]
            shape = ("T", self.local_heads, "dim") if rank == 0 else first.shape
            check_tensor(f"parts[{rank}]", part, shape, [torch.bfloat16], first.device if rank else None)
        if self.kind == "heads":
            return torch.cat(list(parts), dim=1)[:, : self.columns]
        return functools.reduce(torch.add, (part.view(torch.int16) for part in parts)).view(torch.bfloat16)


def check_lookup(
    weight: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor | None,
    first_row: int,
    head_start: int,
    local_heads: int | None,
) -> tuple[int, int, int]:
    """Refuse arguments that a lookup cannot take, and give the shape of what it returns.

    Args:
        weight, scales, ids, out, first_row, head_start, local_heads: as `lookup` has them.

    Returns:
        (T, local heads, dim).

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """
    check_table(weight, scales)
    check_tensor("ids", ids, ["T", "C"], [torch.int32, torch.int64])
    for name, tensor in (("weight", weight), ("scales", scales)):
        reachable = tensor.device == ids.device or tensor.numel() == 0 or (ids.is_cuda and tensor.is_pinned())
        if not reachable:
            raise ValueError(f"{name}: got device {tensor.device}, expected {ids.device} or pinned host memory")
    check_count("first_row", first_row, 0, 2**31 - 1)
    check_count("head_start", head_start, 0)
    if local_heads is None:
        local_heads = ids.shape[1] - head_start
        if local_heads < 0:
            raise ValueError(f"head_start: got {head_start}, expected at most the {ids.shape[1]} columns of ids")
    check_count("local_heads", local_heads, 0)
    shape = (ids.shape[0], local_heads, weight.shape[1])
    if out is not None:
        check_tensor("out", out, shape, [torch.bfloat16], ids.device)
        if not out.is_contiguous():
            raise ValueError(f"out: got strides {out.stride()}, expected a contiguous tensor")
    return shape


def check_table(weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuse what is not a table: weight [rows, dim] float8_e4m3fn, scales [rows, dim/32] bytes, both contiguous.

    Raises:
        TypeError, ValueError: naming the tensor, what it is and what was expected.
    """
    check_tensor("weight", weight, ["rows", "dim"], [torch.float8_e4m3fn])
    rows, dim = weight.shape
    if dim % BLOCK or dim == 0:
        raise ValueError(f"weight: got dim {dim}, expected a multiple of {BLOCK}")
    check_tensor("scales", scales, [rows, dim // BLOCK], [torch.uint8, torch.float8_e8m0fnu])
    for name, tensor in (("weight", weight), ("scales", scales)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: got strides {tensor.stride()}, expected a contiguous tensor")
