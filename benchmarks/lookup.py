"""The lookup: how long do T tokens take out of a whole layer's table, and how near is that to a plain copy?"""

from __future__ import annotations

import torch

from benchmarks import memory
from benchmarks.baseline import baseline_lookup
from benchmarks.bench import Bench
from benchmarks.contest import Contest, Outputs
from benchmarks.results import Label
from optimized.embedding import lookup
from parity.world import flash

TOKENS = (1, 64, 256, 1024, 8192, 32768)
BACKGROUND_TOKENS = (1024, 8192, 32768)
_RESERVE = 16 << 30  # bytes of the card that stay free for inputs and outputs
_QUICK_ROWS = 1 << 12


def ask(bench: Bench) -> None:
    """Time foreground lookups side by side, then ours in the background beside the baseline in the foreground."""
    weight, scales = full_table(bench)
    for background in (False, True):
        series = "background" if background else "foreground"
        for tokens in bench.sizes(BACKGROUND_TOKENS if background else TOKENS):
            contest = lookup_contest(bench, weight, scales, tokens, background=background)
            bench.contest(lookup_label("lookup", f"{series} {tokens}", series, tokens, weight), contest)


def lookup_label(question: str, name: str, series: str, tokens: int, weight: torch.Tensor) -> Label:
    """Label a lookup; its amount is every byte it has to read and write: ids, codes, scales and bfloat16 rows."""
    dim, columns = weight.shape[1], flash().config.columns
    amount = tokens * columns * (4 + dim + dim // memory.BLOCK + 2 * dim)
    return Label(question=question, name=name, series=series, axis="T", size=tokens, amount=amount, unit="B")


def lookup_contest(
    bench: Bench, weight: torch.Tensor, scales: torch.Tensor, tokens: int, *, background: bool = False
) -> Contest:
    """Set ours and the baseline to the same random ids, new ones for every call of every sample."""
    columns, (rows, dim), device = flash().config.columns, weight.shape, bench.device
    sets = 2 if bench.quick else 128 if tokens <= (8192 if weight.is_cuda else 1024) else 32
    ids = torch.empty(sets, tokens, columns, dtype=torch.int32, device=device)
    out, other_out = (torch.empty(tokens, columns, dim, dtype=torch.bfloat16, device=device) for _ in range(2))

    def refresh() -> None:
        ids.random_(0, rows)

    def ours(number: int) -> Outputs:
        return (lookup(weight, scales, ids[number % sets], out=out, background=background),)

    function = bench.baseline_function("lookup")
    if function is None:
        return Contest(ours, None, sets, refresh=refresh)
    other = baseline_lookup(function, weight, scales, multiprocessors(device))

    def baseline(number: int) -> Outputs:
        return (other(ids[number % sets], other_out),)

    return Contest(ours, baseline, sets, refresh=refresh)


def full_table(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the first layer's table of random codes once a run, or as much of it as the card holds, which is noted."""
    if bench.table is not None:
        return bench.table
    config = flash().config
    dim, whole = config.engram_head_dim, config.engram_num_embeddings[0]
    rows = whole
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(bench.device)[0]
        rows = min(whole, (free - _RESERVE) // (dim + dim // memory.BLOCK) // 64 * 64)
    if bench.quick:
        rows = _QUICK_ROWS
    if rows < whole:
        bench.results.notes.append(f"the table has {rows:,} of {whole:,} rows; ids past it give zero rows")
    bench.table = memory.random_table(rows, dim, bench.device)
    return bench.table


def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a device; 2 for the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
