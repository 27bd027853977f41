"""Mistakes in the shards: who holds which rows, and how parts become the whole. A port offers a table's shard."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from parity.faults.fault import plant
from reference.embedding import EngramEmbedding
from reference.shard_plan import ShardPlan
from reference.sharding import select_rows

_TABLE = "embedding.EngramEmbedding"


@plant("T8b", "the ranks' rows are summed although each has clamped ids into its own rows", offers=_TABLE)
class RanksClampForeignIds(EngramEmbedding):
    """A rank has no zeros for ids that are not its own: it gives its first or last row.

    Law: shards.
    """

    def lookup(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Clamp ids into the rank's rows."""
        if self.plan.local_rows == 0:
            return super().lookup(ids, **options)
        return super().lookup(ids.clamp(self.plan.first_row, self.plan.end_row - 1), **options)


@plant("T9", "the boundary between ranks is one head off", offers=_TABLE)
class BoundaryOneHeadOff(EngramEmbedding):
    """Rows are cut by one rule and columns by another: each rank but the first misses the rows of its first head.

    Law: shards.
    """

    def __init__(self, plan: ShardPlan, *args: Any, **options: Any) -> None:
        start = plan.head_start + (plan.rank > 0 and plan.kind == "heads")
        super().__init__(replace(plan, head_start=min(start, plan.columns)), *args, **options)


@plant("T10", "the padding columns of the last rank are not cut", offers=_TABLE)
class PaddingColumnsKept(EngramEmbedding):
    """The gathered heads are used as they come: the key projection then sees columns that no head has.

    Law: shards.
    """

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay parts side by side, whole."""
        return torch.cat(list(parts), dim=1) if self.plan.kind == "heads" else super().gather(parts)


@plant("T11", "the ranks' parts are glued token by token, not rank by rank", offers=_TABLE)
class PartsGluedTokenMajor(EngramEmbedding):
    """A gathered buffer holds rank after rank, and is viewed as if a token's heads lay side by side in it.

    Source: a report on the HYGON port. Law: shards.
    """

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """View what lies rank after rank as tokens."""
        if self.plan.kind == "rows":
            return super().gather(parts)
        tokens, _, dim = parts[0].shape
        return torch.cat(list(parts)).reshape(tokens, -1, dim)[:, : self.plan.columns]


@plant("T12", "rows that every rank has are added up once a rank", offers=_TABLE)
class ReplicatedRowsAddedTwice(EngramEmbedding):
    """Where heads cannot be dealt each rank loads all rows, and the all-reduce is left in.

    Law: shards.
    """

    def __init__(self, plan: ShardPlan, *args: Any, **options: Any) -> None:
        if plan.kind == "rows":
            plan = replace(plan, first_row=0, end_row=plan.rows)
        super().__init__(plan, *args, **options)

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum what is equal on all ranks."""
        return super().gather(parts) if self.plan.kind == "heads" else functools.reduce(torch.add, parts)


@plant("T17", "rows are summed over ranks as floats, which turns -0.0 into +0.0", offers=_TABLE)
class RowsSummedAsFloats(EngramEmbedding):
    """One rank has a row and the others zeros; their float sum loses the sign of zero.

    Law: shards.
    """

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum floats."""
        return super().gather(parts) if self.plan.kind == "heads" else functools.reduce(torch.add, parts)


@plant("T16", "a rank's window starts at a multiple of the unpadded chunk", offers="sharding.select_rows")
def window_of_the_unpadded_chunk(
    gathered: torch.Tensor, *, ranks: int, first_token: int, tokens: int, columns: int
) -> torch.Tensor:
    """The stream is cut into ceil(T/P) tokens and the rows into T // P: they part at the second rank.

    Law: windows.
    """
    padded = max(tokens, 1)
    unpadded = len(gathered) // ranks // ranks if first_token else 0
    first = first_token // padded * unpadded if first_token % padded == 0 else first_token
    return select_rows(gathered, ranks=ranks, first_token=first, tokens=tokens, columns=columns)
