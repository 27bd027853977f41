"""One rank of a run: takes part in every arrangement, and says where its share is not one rank's.

    python -m tests.distributed.worker RANKS FOLDER [--backend gloo|nccl]

starts RANKS processes and ends with status 0, and `FOLDER/RANK.json` holds a list of what was unequal.
"""

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import optimized.engram
import reference.engram
from reference.shard_plan import ShardPlan
from tests.distributed.layer import SHAPES, Layer, make_config, same_bits

TIMEOUT = timedelta(seconds=60)
MAX_TOKENS = 8
TOKENS = (0, 1, 2, 5, 8)
INTERPRETED = {4: (0, 5), 15: (2, 8)}  # C: lengths of a step
ARRANGEMENTS = (
    {},
    {"sequence_parallel": "all_to_all"},
    {"sequence_parallel": "gather_select"},
    {"data_parallel": "all_to_all"},
    {"data_parallel": "gather_select"},
)
SIDES = {"reference": reference.engram, "optimized": optimized.engram}


def main() -> None:
    """Start the ranks of a run and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    options = parser.parse_args()
    # a forked child has torch imported already; CUDA does not survive a fork
    context = multiprocessing.get_context("fork" if options.backend == "gloo" else "spawn")
    arguments = (options.ranks, options.folder, options.backend)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def run_rank(rank: int, ranks: int, folder: Path, backend: str) -> None:
    """Join the group, go through every case, and write down what was unequal."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    unequal: list[str] = []
    kinds: dict[str, str] = {}
    for columns in shapes(ranks):
        layer = Layer.drawn(make_config(columns), seed=columns)
        kinds[str(columns)] = ShardPlan.of([1] * columns, ranks=ranks).kind
        for side in SIDES:
            for arrangement in ARRANGEMENTS:
                unequal += judge(layer, side, arrangement, rank, device)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps({"kinds": kinds, "unequal": unequal}))


def shapes(ranks: int) -> tuple[int, ...]:
    """Give the columns of a run: all, and over 6 ranks the 15 that 5 ranks share by heads and 6 by rows."""
    return (15,) if ranks == 6 else tuple(SHAPES)


@dataclass(frozen=True, eq=False)
class Share:
    """Hold what a rank brings to a step: ids, mask, and which of its ids' tokens its stream holds, padded to size."""

    ids: torch.Tensor
    mask: torch.Tensor
    first: int
    size: int

    @property
    def window(self) -> slice:
        return slice(self.first, min(self.first + self.size, len(self.ids)))

    @classmethod
    def of(cls, layer: Layer, arrangement: dict[str, str], tokens: int, ranks: int, rank: int) -> "Share":
        """Draw the share of a rank; data parallel, one rank in turn is idle, as `dummy_hashes` has it."""
        if "data_parallel" in arrangement:
            ids, mask = layer.ids(tokens, seed=100 + rank), layer.mask(tokens, seed=200 + rank)
            if tokens and rank == tokens % ranks:
                ids, mask = torch.full_like(ids, -1), torch.zeros_like(mask)
            return cls(ids, mask, 0, tokens)
        ids, mask = layer.ids(tokens, seed=tokens), layer.mask(tokens, seed=300 + tokens)
        if "sequence_parallel" not in arrangement:
            return cls(ids, mask, 0, tokens)
        size = math.ceil(tokens / ranks)
        return cls(ids, mask, rank * size, size)


def judge(layer: Layer, side: str, arrangement: dict[str, str], rank: int, device: torch.device) -> Iterator[str]:
    """Run one arrangement over all lengths of a step, and name each share that is not what one rank has."""
    group, columns = dist.group.WORLD, layer.config.columns
    # under the interpreter a launch takes long, and a gate a program for each row
    interpreted = side == "optimized" and device.type == "cpu"
    lengths = INTERPRETED.get(columns, ()) if interpreted else TOKENS
    module = layer.module(SIDES[side].Engram, max_tokens=MAX_TOKENS, process_group=group, device=device, **arrangement)
    for tokens in lengths:
        name = f"{side} C={columns} T={tokens} {arrangement or 'tensor parallel'}"
        share = Share.of(layer, arrangement, tokens, dist.get_world_size(group), rank)
        module.staged_rows[0].fill_(float("nan"))
        rows = layer.rows(share.ids)[share.window]
        want = torch.zeros(share.size, *rows.shape[1:], dtype=torch.bfloat16)
        want[: len(rows)] = rows
        ids = share.ids.to(device)
        module.prepare_embeddings(ids)
        for again in ("", " again"):
            if not same_bits(module.embed(ids), want):
                yield f"{name}: embed{again}"
        if interpreted and (tokens, columns) != (2, 15):
            continue
        hidden = layer.stream(share.size, seed=400 + rank)
        hidden[len(rows) :] = float("nan")
        got = module(hidden.to(device), ids, share.mask.to(device))
        if not same_bits(got, gated(layer, side, hidden, share, device)):
            yield f"{name}: forward"


def gated(layer: Layer, side: str, hidden: torch.Tensor, share: Share, device: torch.device) -> torch.Tensor:
    """Gate a rank's stream by what is known exactly of its keys and values."""
    keys, mask = layer.keys_and_value(share.ids)[share.window], share.mask[share.window]
    tensors = hidden, keys, layer["q_weight"], layer["k_weight"], mask
    return SIDES[side].engram_gate(*(tensor.to(device) for tensor in tensors), eps=layer.config.rms_norm_eps)


if __name__ == "__main__":
    main()
