"""The oracles: how many rows (tokens) a second do NumPy and PyTorch hash on one core, and how does that grow with T?"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.results import Label
from parity.world import World, flash
from reference.ngram_hash import ngram_hash

TOKENS = (100, 1_000, 10_000, 100_000)


def ask(bench: Bench) -> None:
    """Time whole requests at the real layout, on one thread."""
    world = flash()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for series, convert in (("numpy", np.asarray), ("torch", torch.from_numpy)):
            for tokens in bench.sizes(TOKENS):
                label = Label(
                    question="oracles", name=f"{series} {tokens}", series=series, axis="T", size=tokens,
                    amount=tokens, unit="rows",
                )  # fmt: skip
                bench.contest(label, oracle_contest(world, tokens, convert), ("wall",))
    finally:
        torch.set_num_threads(threads)


def oracle_contest(world: World, tokens: int, convert) -> Contest:  # type: ignore[no-untyped-def]
    """Hash one of four requests of random tokens, in the arrays of `convert`."""
    rng = np.random.default_rng(tokens)
    requests = [
        (convert(world.token_map[rng.integers(0, world.vocabulary, tokens)]), convert(rng.random(tokens) < 0.02))
        for _ in range(4)
    ]
    constants = {
        "multipliers": convert(world.multipliers),
        "primes": convert(world.layout.primes),
        "offsets": convert(world.layout.offsets),
    }

    def ours(number: int) -> tuple[torch.Tensor]:
        rows = ngram_hash(*requests[number % 4], pad_id=world.pad_id, **constants)
        return (torch.as_tensor(rows),)

    return Contest(ours, None, 4)
