"""The baseline: a Python file with the functions that README.md describes, each wrapped as a call like ours."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.inputs import BLOCK_SIZE, HashInputs
from parity.world import World

FUNCTIONS = ("hash_ids", "lookup", "gate")


def load_baseline(path: Path) -> ModuleType:
    """Import a file as the baseline.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it offers none of the functions.
    """
    if not path.is_file():
        raise FileNotFoundError(f"baseline: got {path}, expected a Python file")
    spec = importlib.util.spec_from_file_location("benchmarks_baseline", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"baseline: got {path}, expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not any(hasattr(module, name) for name in FUNCTIONS):
        raise ValueError(f"baseline: {path} offers none of {', '.join(FUNCTIONS)}; see benchmarks/README.md")
    return module


def fingerprint(path: Path) -> str:
    """Name a baseline so that another can tell whether he has the same: its file name and SHA-256."""
    return f"{path.name} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()})"


def baseline_hash(
    hash_ids: Callable[..., torch.Tensor], world: World, device: torch.device
) -> Callable[[HashInputs, torch.Tensor | None], torch.Tensor]:
    """Bind a model's constants to the baseline's hash: (step, slot cache or None) -> [T, L, C]."""
    constants = {
        "token_map": torch.from_numpy(world.token_map).to(device),
        "multipliers": torch.from_numpy(world.multipliers).to(device),
        "primes": torch.from_numpy(world.layout.primes).to(device),
        "offsets": torch.from_numpy(world.layout.offsets).to(device),
        "pad_id": world.pad_id,
    }

    def call(step: HashInputs, cache: torch.Tensor | None) -> torch.Tensor:
        slot_mapping, block_table = step.arguments[6:]
        return hash_ids(
            *step.arguments[:6],
            **constants,
            cache=cache,
            slot_mapping=slot_mapping,
            block_table=block_table,
            block_size=BLOCK_SIZE,
        )

    return call


def baseline_lookup(
    lookup: Callable[..., object], weight: torch.Tensor, scales: torch.Tensor, multiprocessors: int
) -> Callable[..., torch.Tensor]:
    """Bind a whole table to the baseline's lookup: (ids [T, C], out [T, C, dim], background) -> out."""

    def call(ids: torch.Tensor, out: torch.Tensor, *, background: bool = False) -> torch.Tensor:
        columns = ids.shape[1]
        lookup(
            weight,
            scales,
            ids,
            out,
            vocab_start=0,
            vocab_end=weight.shape[0],
            head_start=0,
            local_heads=columns,
            total_heads=columns,
            num_sms=multiprocessors,
            background=background,
        )
        return out

    return call
