"""How an engine runs."""

from dataclasses import dataclass

import torch

from serving.checks import check_buckets, check_int
from serving.runner import Policy


@dataclass(frozen=True)
class EngineConfig:
    """Say how an engine runs.

    Attributes:
        policy: what the lookback windows hold, see `Policy`.
        block_size: B, slots a block, 1 to 256.
        num_blocks: blocks in the pool.
        token_budget: tokens a step, at most.
        max_requests: requests that run at once, at most.
        lookback: D, columns of the window.
        num_drafts: k, drafts of a request in a step; 0 for none.
        pad_tokens: bucket sizes of T, rising; empty: no padding.
        pad_requests: bucket sizes of R, rising.
        ids_dtype: torch.int32 or torch.int64, of all token ids.
        share_prefixes: whether a request may start on blocks of others.
        seed: of everything random, at least 0.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range.
    """

    policy: Policy
    block_size: int
    num_blocks: int
    token_budget: int
    max_requests: int
    lookback: int = 3
    num_drafts: int = 0
    pad_tokens: tuple[int, ...] = ()
    pad_requests: tuple[int, ...] = ()
    ids_dtype: torch.dtype = torch.int64
    share_prefixes: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy: got {self.policy!r}, expected one of {', '.join(map(str, Policy))}")
        check_int("block_size", self.block_size, 1, 256)
        for name in ("num_blocks", "token_budget", "max_requests", "lookback"):
            check_int(name, getattr(self, name), 1)
        check_int("num_drafts", self.num_drafts, 0)
        check_int("seed", self.seed, 0)
        check_buckets("pad_tokens", self.pad_tokens)
        check_buckets("pad_requests", self.pad_requests)
        if self.ids_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids_dtype: got {self.ids_dtype}, expected torch.int32 or torch.int64")
        if not isinstance(self.share_prefixes, bool):
            raise TypeError(f"share_prefixes: got {self.share_prefixes!r}, expected a bool")
