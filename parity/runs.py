"""The runs of the main job: every way of giving a hash state its history, on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parity.actions import Action
from parity.compare import Comparison, Judge
from parity.corpus import Corpus, Mix
from parity.protocol import Implementation
from parity.workload import Session, Workload, run
from parity.world import World
from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy
from serving.step import Step

ALL = frozenset({"batch", "window", "slot", "pad"})
# What a policy's lookbacks must come from, or the run has tested nothing of the kind. In the slot ways a window that
# knows every id leaves nothing to the slots.
REQUIRED_SOURCES = {
    Policy.STATELESS: ALL - {"slot"},
    Policy.PROMPT_ONLY: ALL,
    Policy.KNOWN_IDS: ALL - {"slot"},
    Policy.LAGGING: ALL,
    Policy.SLOTS_ONLY: ALL,
}


@dataclass(frozen=True)
class Size:
    """Say how large the runs are: what suits the interpreter, or a GPU."""

    mix: Mix
    token_budget: int
    max_requests: int
    num_blocks: int
    pad_tokens: tuple[int, ...]
    pad_requests: tuple[int, ...]
    rows: int
    small_block_rows: int = 2**62  # of a run whose blocks are so small that the engine, not the hash, takes the time


SMALL = Size(Mix((1, 160), (1, 24), (1, 24), 16, longest=200), 128, 16, 160, (16, 32, 64, 128), (4, 8, 16), 30_000)
LARGE = Size(
    Mix((1, 6000), (1, 48), (1, 576), 64, per_step=8, longest=16_000),
    16384,
    256,
    16384,
    (256, 1024, 4096, 16384),
    (16, 64, 256),
    5_000_000,
    small_block_rows=100_000,
)


@dataclass(frozen=True)
class Run:
    """Name one run: its world, its policy, how the engine runs and how the implementation is shown the step.

    Attributes:
        engine: fields of the engine's configuration in which the run differs from the others.
        actions: what befalls the engine, each every so many steps.
        far: whether imports stand past position 2^31.
    """

    name: str
    world: World
    policy: Policy
    strided: bool = False
    alike: bool = False
    ids_dtype: torch.dtype = torch.int64
    engine: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    far: bool = False


def all_runs(world: World) -> list[Run]:
    """List the runs: each policy with all that may befall an engine, the slots under another pad token and tokens in
    disguise (law 9).
    """
    i32, every = torch.int32, tuple(Action)
    window = {"sliding_window": 64, "offload_blocks": 256}
    return [
        Run("stateless", world, Policy.STATELESS, True, ids_dtype=i32, engine={"lag": 2}, actions=every, far=True),
        Run("prompt only", world, Policy.PROMPT_ONLY, engine={"overcommit": True, "offload_blocks": 64}, actions=every),
        Run("known ids", world, Policy.KNOWN_IDS, ids_dtype=i32, engine={"other_group": 24}, actions=every),
        Run("lagging", world, Policy.LAGGING, True, engine={"lag": 2, "unruly": True}, actions=every),
        Run("slots only", world, Policy.SLOTS_ONLY, ids_dtype=i32, engine={"in_order": True, **window}, actions=every),
        Run("another pad", with_another_pad(world), Policy.LAGGING, engine={"overcommit": True}, actions=every),
        Run("tokens alike", world, Policy.SLOTS_ONLY, alike=True, engine={"unruly": True}),
        Run("one-token blocks", world, Policy.LAGGING, engine={"block_size": 1, "sliding_window": 4}, actions=every),
        Run("large blocks", world, Policy.SLOTS_ONLY, engine={"block_size": 256, "lag": 2}, actions=every),
    ]


def with_another_pad(world: World) -> World:
    """Give the world with a pad token whose compressed id differs from it.

    The published pad token, 2, compresses to 2: there, padding with the uncompressed id goes unseen.
    """
    moved = [token for token, compressed in enumerate(world.token_map.tolist()) if token != compressed]
    if not moved:
        raise ValueError("token_map: got a map that leaves every id as it is, expected one that compresses")
    config = replace(world.config, engram_pad_token_id=moved[len(moved) // 2])
    return replace(world, name=f"{world.name}, pad {config.engram_pad_token_id}", config=config)


def execute(
    one: Run,
    corpus: Corpus,
    implementations: Sequence[Implementation],
    device: torch.device,
    *,
    size: Size,
    rows: int,
    seed: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> Comparison:
    """Run one run until `rows` live rows were scheduled, and give what the judge saw."""
    judge, steps = prepare(one, corpus, implementations, device, size=size, rows=rows, seed=seed)
    return judge.run(one.name, steps, progress)


def prepare(
    one: Run,
    corpus: Corpus,
    implementations: Sequence[Implementation],
    device: torch.device,
    *,
    size: Size,
    rows: int,
    seed: int,
) -> tuple[Judge, Iterator[tuple[Session, Step]]]:
    """Give the judge of a run and its steps, which are the same whenever it is prepared alike."""
    workload = workload_of(one, corpus, size=size, rows=rows, seed=seed)
    judge = Judge(
        one.world,
        implementations,
        device,
        seed=seed,
        strided=one.strided,
        disguise=one.world.alike if one.alike else None,
    )
    return judge, run(workload, one.world.vocabulary)


def workload_of(one: Run, corpus: Corpus, *, size: Size, rows: int, seed: int) -> Workload:
    """Draw what the engine of a run is given to do, until `rows` live rows were scheduled."""
    rng = Rng(seed)
    block_size = one.engine.get("block_size", size.mix.block_size)
    mix = replace(size.mix, block_size=block_size, offset=2**31 if one.far else 0)
    blocks = size.num_blocks * size.mix.block_size // block_size
    if block_size < 8:
        rows, blocks = min(rows, size.small_block_rows), min(blocks, 8 * mix.longest)
    fields = {
        "policy": one.policy,
        "block_size": block_size,
        "num_blocks": max(blocks, 4 * size.max_requests),
        "token_budget": size.token_budget,
        "max_requests": size.max_requests,
        "lookback": one.world.config.lookback,
        "num_drafts": 3,
        "pad_tokens": size.pad_tokens,
        "pad_requests": size.pad_requests,
        "ids_dtype": one.ids_dtype,
        "max_model_length": mix.longest + mix.answer[1] // 2,
        "seed": seed,
    }
    engine = EngineConfig(**{**fields, **one.engine})
    budgets = tuple(_budgets(rng, size.token_budget))
    accepts = tuple(rng.below(4) for _ in range(61))
    actions = tuple(rng.pick(one.actions) for _ in range(97)) if one.actions else ()
    return Workload(engine, corpus.prompts(rng, mix), budgets, accepts, rows, actions)


def _budgets(rng: Rng, most: int) -> Iterator[int]:
    # Mostly whole budgets, now and then one that cuts a chunk short, down to a single token.
    for _ in range(61):
        yield 1 + rng.below(rng.pick((8, most))) if rng.chance(1, 4) else most
