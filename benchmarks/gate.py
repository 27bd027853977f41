"""The gate: how long does it take to add the looked-up value to the stream, and how near is that to a plain copy?"""

from __future__ import annotations

import torch

from benchmarks.bench import Bench
from benchmarks.contest import Contest, Outputs, nearly_same
from benchmarks.results import Label
from optimized.gate import engram_gate
from parity.world import flash

TOKENS = (1, 64, 256, 1024, 8192)
_SETS_BYTES = 256 << 20  # all sets together: several times any level-2 cache, where sets are large enough
_MOST_SETS = 32
_CLAMP = 1e-6


def ask(bench: Bench) -> None:
    """Time every size; outputs are reductions, so they are compared to bfloat16's precision."""
    config = flash().config
    for tokens in bench.sizes(TOKENS):
        row = config.hidden_size * 2 * (3 * config.hc_mult + 1)  # stream, keys and value in, stream out
        label = Label(
            question="gate", name=f"{tokens}", series="gate", axis="T", size=tokens, amount=tokens * row, unit="B"
        )
        bench.contest(label, gate_contest(bench, tokens, sets_for(tokens * row)))


def sets_for(call_bytes: int) -> int:
    """How many sets of inputs: 2 to 32, together past the caches if that many do."""
    return min(max(_SETS_BYTES // call_bytes + 1, 2), _MOST_SETS)


def gate_contest(bench: Bench, tokens: int, sets: int) -> Contest:
    """Set ours and the baseline to the same normal numbers."""
    config, device = flash().config, bench.device
    copies, width, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    hidden = [normal(tokens, copies, width) for _ in range(sets)]
    kv = [normal(tokens, (copies + 1) * width) for _ in range(sets)]
    q_weight, k_weight = normal(copies, width), normal(copies, width)

    def ours(number: int) -> Outputs:
        i = number % sets
        return (engram_gate(hidden[i], kv[i], q_weight, k_weight, eps=eps, clamp=_CLAMP),)

    gate = bench.baseline_function("gate")
    if gate is None:
        return Contest(ours, None, sets, nearly_same)

    def baseline(number: int) -> Outputs:
        i = number % sets
        return (gate(hidden[i], kv[i], q_weight, k_weight, eps=eps, clamp_value=_CLAMP),)

    return Contest(ours, baseline, sets, nearly_same)
