"""How an engine runs."""

from dataclasses import dataclass

import torch

from serving.checks import check_buckets, check_int
from serving.policy import Policy


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
        lag: updates that `LAGGING` is late.
        sliding_window: W, the positions that attention reads, its own included; blocks behind it are given up, and
            block 0 is kept back to stand in their place. None: all positions.
        other_group: block size of a second group of layers, which takes its blocks from the same pool, or None.
        offload_blocks: overwritten blocks whose KV the host keeps.
        overcommit: whether requests may come to lack blocks; the one that was admitted last is then preempted.
        max_model_length: tokens of a request, at most: sampling ends there, or None.
        unruly: whether the scheduler turns its order about and starves requests.
        in_order: whether a batch stands as planned, so that whoever fills a block stands before those that hit it.
        sound: whether what the policy cannot bear is refused; False is for those who look for the rows that it spoils.

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
    lag: int = 1
    sliding_window: int | None = None
    other_group: int | None = None
    offload_blocks: int = 0
    overcommit: bool = False
    max_model_length: int | None = None
    unruly: bool = False
    in_order: bool = False
    sound: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy: got {self.policy!r}, expected one of {', '.join(map(str, Policy))}")
        check_int("block_size", self.block_size, 1, 256)
        for name in ("num_blocks", "token_budget", "max_requests", "lookback", "lag"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_drafts", "seed", "offload_blocks"):
            check_int(name, getattr(self, name), 0)
        if self.other_group is not None:
            check_int("other_group", self.other_group, 1)
        if self.max_model_length is not None:
            check_int("max_model_length", self.max_model_length, 2)
        if self.sliding_window is not None:
            # A lookback from the window's newest position reaches `lookback` positions back.
            check_int("sliding_window", self.sliding_window, self.lookback + 1 if self.sound else 1)
            check_int("num_blocks", self.num_blocks, 2)
        check_buckets("pad_tokens", self.pad_tokens)
        check_buckets("pad_requests", self.pad_requests)
        if self.ids_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids_dtype: got {self.ids_dtype}, expected torch.int32 or torch.int64")
        for name in ("share_prefixes", "overcommit", "unruly", "in_order", "sound"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, expected a bool")

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests may hold: all but the null block."""
        return self.num_blocks - (self.sliding_window is not None)
