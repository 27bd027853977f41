"""The hash: how long does a step take, stateless and with a slot cache, from one token to 131,072?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.baseline import baseline_hash
from benchmarks.bench import Bench
from benchmarks.contest import Contest, Outputs
from benchmarks.inputs import BLOCK_SIZE, draw_step
from benchmarks.results import Label
from optimized.hash_state import HashState
from parity.world import World, flash

# (T, R): decodes and verifies, then prompts
SHAPES = ((1, 1), (64, 64), (256, 256), (1024, 1024), (8192, 8), (8192, 256), (32768, 16), (131072, 64))
# prompts of any length, drafts to verify, and decodes, in one step
MIXED = (3001, 1777, 517, 129, *[1] * 200, *[4] * 32)
_SETS = 8


def ask(bench: Bench) -> None:
    """Time every shape both ways, then steps of mixed lengths."""
    world = flash()
    for slot_cache in (False, True):
        way = "slot cache" if slot_cache else "stateless"
        for tokens, requests in bench.sizes(SHAPES):
            lengths = [tokens // requests] * requests
            _measure(bench, world, f"{way} {tokens}/{requests}", way, lengths, slot_cache=slot_cache)
        mixed = MIXED[-3:] if bench.quick else MIXED
        _measure(bench, world, f"{way} mixed", f"{way} mixed", mixed, slot_cache=slot_cache)


def hash_contest(bench: Bench, world: World, lengths: Sequence[int], *, slot_cache: bool) -> Contest:
    """Set ours and the baseline to the same steps, each with a slot cache of its own that holds the same at first."""
    config, device = world.config, bench.device
    steps = [
        draw_step(lengths, world.vocabulary, config.lookback, slot_cache=slot_cache, seed=seed, device=device)
        for seed in range(_SETS)
    ]
    state = HashState(
        config, world.token_map, slot_cache=slot_cache, block_size=BLOCK_SIZE if slot_cache else None, device=device
    )
    slots = max(step.slots for step in steps)
    first = torch.randint(0, config.engram_compressed_vocab_size, (slots,), dtype=torch.int32, device=device)
    theirs = first.clone() if slot_cache else None
    if slot_cache:
        state.ensure_cache(torch.empty(-(-slots // BLOCK_SIZE), 1, device=device))

    def reset() -> None:
        for cache in (state.cache, theirs):
            if cache is not None:
                cache.copy_(first)

    def ours(number: int) -> Outputs:
        return (state.forward(*steps[number % _SETS].arguments),)  # type: ignore[arg-type]

    hash_ids = bench.baseline_function("hash_ids")
    if hash_ids is None:
        return Contest(ours, None, _SETS, reset=reset)
    other = baseline_hash(hash_ids, world, device)

    def baseline(number: int) -> Outputs:
        return (other(steps[number % _SETS], theirs),)

    return Contest(ours, baseline, _SETS, reset=reset)


def _measure(bench: Bench, world: World, name: str, series: str, lengths: Sequence[int], *, slot_cache: bool) -> None:
    tokens = sum(lengths)
    label = Label(question="hash", name=name, series=series, axis="T", size=tokens, amount=tokens, unit="tokens")
    bench.contest(label, hash_contest(bench, world, lengths, slot_cache=slot_cache))
