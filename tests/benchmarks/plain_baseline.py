"""A baseline as benchmarks/README.md describes it, out of the reference."""

from typing import Any

import torch

from parity.world import flash
from reference import embedding, hash_state
from reference import gate as plain_gate


def hash_ids(*step: torch.Tensor, cache: Any, slot_mapping: Any, block_table: Any, block_size: int, **_: Any) -> Any:
    """Hash one step."""
    world, slot_cache = flash(), cache is not None
    state = hash_state.HashState(
        world.config, world.token_map, slot_cache=slot_cache, block_size=block_size, device=step[0].device
    )
    state.cache = cache
    return state.forward(*step, slot_mapping, block_table)


def lookup(
    weight: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Look rows of a whole table up."""
    return embedding.lookup(weight, scales, indices, out=out)


def gate(hidden: Any, kv: Any, q_weight: Any, k_weight: Any, *, eps: float, clamp_value: float) -> torch.Tensor:
    """Gate the stream."""
    return plain_gate.engram_gate(hidden, kv, q_weight, k_weight, eps=eps, clamp=clamp_value)
