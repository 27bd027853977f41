"""From token ids to rows: how long do the hash and the lookups of both layers take, one after the other and as one?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.baseline import baseline_hash, baseline_lookup
from benchmarks.bench import Bench
from benchmarks.contest import Contest, Outputs
from benchmarks.inputs import HashInputs, draw_step
from benchmarks.lookup import full_table, lookup_label, multiprocessors
from optimized.embedding import lookup
from optimized.hash_state import HashState
from parity.world import flash

TOKENS = (1, 64, 256, 1024)  # T = R: decodes
ONE_LAUNCH = ("optimized.engram_rows", "engram_rows")
_STEPS, _SETS = 8, 128

RowsCall = Callable[[HashInputs, list[torch.Tensor]], torch.Tensor]  # fills a layer's rows each, gives the hashes


def ask(bench: Bench) -> None:
    """Time three launches against the baseline's three, then one launch of ours against them."""
    weight, _ = full_table(bench)
    ways: dict[str, Callable[[Bench], RowsCall] | None] = {"launches": _launches, "one launch": _one_launch()}
    for series, make in ways.items():
        for tokens in bench.sizes(TOKENS):
            name = f"{series} {tokens}"
            if make is None:
                bench.skip("rows", name, f"{'.'.join(ONE_LAUNCH)} is not there")
                continue
            label = lookup_label("rows", name, series, tokens, weight)
            layers = len(flash().config.engram_layer_ids)
            bench.contest(replace(label, amount=label.amount * layers), rows_contest(bench, make(bench), tokens))


def rows_contest(bench: Bench, ours_rows: RowsCall, tokens: int) -> Contest:
    """Set ours and the baseline to the same decodes of new random tokens; both layers read one table."""
    world, (weight, scales) = flash(), full_table(bench)
    config, device = world.config, bench.device
    aligned = -(-tokens // 16) * 16  # each set begins on 64 bytes, as an engine's own tensor does
    ids = torch.empty(_SETS, aligned, dtype=torch.int32, device=device)
    drawn = [
        draw_step([1] * tokens, world.vocabulary, config.lookback, slot_cache=False, seed=seed, device=device)
        for seed in range(_STEPS)
    ]
    steps = [HashInputs((ids[i, :tokens], *drawn[i % _STEPS].arguments[1:]), 0) for i in range(_SETS)]
    shape = (len(config.engram_layer_ids), tokens, config.columns, config.engram_head_dim)
    out, other_out = (list(torch.empty(shape, dtype=torch.bfloat16, device=device)) for _ in range(2))

    def refresh() -> None:
        ids.random_(0, world.vocabulary)

    def ours(number: int) -> Outputs:
        return (ours_rows(steps[number % _SETS], out), *out)

    hash_ids, other_lookup = bench.baseline_function("hash_ids"), bench.baseline_function("lookup")
    if hash_ids is None or other_lookup is None:
        return Contest(ours, None, _SETS, refresh=refresh)
    hashed = baseline_hash(hash_ids, world, device)
    looked_up = baseline_lookup(other_lookup, weight, scales, multiprocessors(device))

    def baseline(number: int) -> Outputs:
        hashes = hashed(steps[number % _SETS], None)
        for layer, rows in enumerate(other_out):
            looked_up(hashes[:, layer], rows)
        return (hashes, *other_out)

    return Contest(ours, baseline, _SETS, refresh=refresh)


def _launches(bench: Bench) -> RowsCall:
    weight, scales = full_table(bench)
    state = _stateless(bench)

    def call(step: HashInputs, out: list[torch.Tensor]) -> torch.Tensor:
        hashes = state.forward(*step.arguments)  # type: ignore[arg-type]
        for layer, rows in enumerate(out):
            lookup(weight, scales, hashes[:, layer], out=rows)
        return hashes

    return call


def _one_launch() -> Callable[[Bench], RowsCall] | None:
    """Find the function that does all in one launch; the one place that knows how it is called."""
    try:
        function = getattr(importlib.import_module(ONE_LAUNCH[0]), ONE_LAUNCH[1])
    except (ImportError, AttributeError):
        return None

    def make(bench: Bench) -> RowsCall:
        tables = [full_table(bench)] * len(flash().config.engram_layer_ids)
        state = _stateless(bench)
        return lambda step, out: function(state, *step.arguments, tables=tables, out=out)

    return make


def _stateless(bench: Bench) -> HashState:
    world = flash()
    return HashState(world.config, world.token_map, slot_cache=False, block_size=None, device=bench.device)
