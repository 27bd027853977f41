"""The ceilings: what a copy, a copy from the host and an empty launch take on this machine, in this run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import memory
from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.results import Label

_COPY_WORDS, _HOST_WORDS, _QUICK_WORDS = (2 << 30) // 4, (1 << 30) // 4, 1 << 12


def ask(bench: Bench) -> None:
    """Time copies and an empty launch; the Triton copy becomes the ceiling that shares are taken of."""
    words = _QUICK_WORDS if bench.quick else _COPY_WORDS
    source = torch.zeros(words, dtype=torch.int32, device=bench.device)
    target = torch.empty_like(source)
    for name, copy in (("triton copy", memory.copy), ("torch copy", torch.Tensor.copy_)):
        _ceiling(bench, name, 8 * words, "B", partial(copy, target, source))
        if name == "triton copy":
            bench.copy_rate = bench.results.cases[-1].rate
    words = _QUICK_WORDS if bench.quick else _HOST_WORDS
    host = torch.zeros(words, dtype=torch.int32, pin_memory=bench.device.type == "cuda")
    arrived = target[:words]
    _ceiling(bench, "pinned copy", 4 * words, "B", partial(arrived.copy_, host, non_blocking=True))
    _ceiling(bench, "empty launch", 1, "calls", partial(memory.empty, source))


def _ceiling(bench: Bench, name: str, amount: int, unit: str, call: Callable[[], object]) -> None:
    def ours(number: int) -> tuple[torch.Tensor, ...]:
        call()
        return ()

    label = Label(question="ceilings", name=name, series=name, axis=unit, size=amount, amount=amount, unit=unit)
    bench.contest(label, Contest(ours, None, 1), ("wall" if name == "pinned copy" else "graph",), rounds=5)
