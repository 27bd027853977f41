"""A table in the host's memory: how many rows a second does a kernel read across the bus?"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks import memory
from benchmarks.bench import Bench
from benchmarks.lookup import lookup_contest, lookup_label
from parity.world import flash

TOKENS = (256, 1024, 8192)
_ROWS, _QUICK_ROWS = 1 << 26, 1 << 12  # 16 GiB of codes, 512 MiB of scales
_PART = 1 << 22  # rows that are filled on the device at a time
_ROUNDS = 5


def ask(bench: Bench) -> None:
    """Time eager lookups of new random ids each call; a replay would need ids that are new as well."""
    weight, scales = host_table(_QUICK_ROWS if bench.quick else _ROWS, bench.device)
    columns = flash().config.columns
    for tokens in bench.sizes(TOKENS):
        label = lookup_label("host_table", f"{tokens}", "host table", tokens, weight)
        contest = lookup_contest(bench, weight, scales, tokens)
        bench.contest(replace(label, amount=tokens * columns, unit="rows"), contest, ("eager",), rounds=_ROUNDS)


def host_table(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a table of random codes in pinned host memory, filled on the device part by part."""
    dim = flash().config.engram_head_dim
    pinned = device.type == "cuda"
    weight = torch.empty(rows, dim, dtype=torch.uint8, pin_memory=pinned)
    scales = torch.empty(rows, dim // memory.BLOCK, dtype=torch.uint8, pin_memory=pinned)
    for table, are_scales in ((weight, False), (scales, True)):
        part = torch.empty(min(_PART, rows), table.shape[1], dtype=torch.uint8, device=device)
        for first in range(0, rows, len(part)):
            target = table[first : first + len(part)]
            memory.fill(part, first=first * table.shape[1] // 4, scales=are_scales)
            target.copy_(part[: len(target)])
    return weight.view(torch.float8_e4m3fn), scales
