"""Triton's interpreter: how many steps a second does the hash kernel take on a CPU, and how does it grow with T and R?

The baseline is the reference's model of a step.
"""

from __future__ import annotations

import torch

from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.inputs import BLOCK_SIZE, draw_step
from benchmarks.results import Label
from optimized.hash_state import HashState
from parity.world import flash
from reference.hash_state import HashState as PlainHashState

SHAPES = {
    "T": ((8, 8), (64, 8), (512, 8), (2048, 8)),  # (T, R)
    "R": ((2048, 2), (2048, 32), (2048, 512)),
}
_SETS, _ROUNDS = 4, 5


def ask(bench: Bench) -> None:
    """Time steps with a slot cache, growing in tokens, then in requests."""
    for axis, shapes in SHAPES.items():
        for tokens, requests in [(8, 2)] if bench.quick else shapes:
            label = Label(
                question="interpreter", name=f"{axis} {tokens}/{requests}", series=f"growing {axis}", axis=axis,
                size=tokens if axis == "T" else requests, amount=1, unit="steps",
            )  # fmt: skip
            contest = interpreter_contest(bench, tokens, requests)
            bench.contest(label, contest, ("wall",), rounds=min(_ROUNDS, bench.rounds))


def interpreter_contest(bench: Bench, tokens: int, requests: int) -> Contest:
    """Set the interpreted kernel and the reference to the same steps."""
    world, device = flash(), bench.device
    steps = [
        draw_step([tokens // requests] * requests, world.vocabulary, 3, slot_cache=True, seed=seed, device=device)
        for seed in range(_SETS)
    ]
    kv_cache = torch.empty(-(-max(step.slots for step in steps) // BLOCK_SIZE), 1, device=device)
    states = [
        kind(world.config, world.token_map, slot_cache=True, block_size=BLOCK_SIZE, device=device)
        for kind in (HashState, PlainHashState)
    ]

    for state in states:
        state.ensure_cache(kv_cache)

    def reset() -> None:
        for state in states:
            state.cache.zero_()  # type: ignore[union-attr]

    ours, plain = (lambda number, state=state: (state.forward(*steps[number % _SETS].arguments),) for state in states)
    return Contest(ours, plain, _SETS, reset=reset)
