"""Real steps of the serving engine for the parts of the main job that look rows up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from parity.corpus import Corpus
from parity.runs import Size
from parity.workload import Session, Workload, run
from parity.world import World
from serving.engine import EngineConfig
from serving.policy import Policy
from serving.rng import Rng
from serving.step import Step

DEAD = -1


def live_steps(
    world: World, corpus: Corpus, size: Size, *, tokens: int, seed: int, budget: int | None = None
) -> Iterator[tuple[Session, Step]]:
    """Yield steps of one engine, whose runner knows every id, until so many tokens were live, and one of them dead.

    Args:
        world: configuration and token map.
        corpus: where the prompts come from.
        size: of the engine.
        tokens: live tokens, at least.
        seed: the same steps everywhere.
        budget: tokens a step, at most; None: the size's.
    """
    rng = Rng(seed)
    lengths = size.mix.prompt
    mix = replace(size.mix, prompt=(lengths[0], min(lengths[1], max(tokens // 4, lengths[0]))))  # several, however few
    most = min(budget or size.token_budget, size.token_budget)
    config = EngineConfig(
        policy=Policy.KNOWN_IDS,
        block_size=size.mix.block_size,
        num_blocks=size.num_blocks,
        token_budget=most,
        max_requests=size.max_requests,
        lookback=world.config.lookback,
        num_drafts=3,
        pad_tokens=(*(bucket for bucket in size.pad_tokens if bucket < most), most),
        pad_requests=size.pad_requests,
        ids_dtype=torch.int32,
        seed=seed,
    )
    budgets = tuple(most if number % 4 else 1 + rng.below(most) for number in range(16))
    dead = False
    accepts = tuple(rng.below(4) for _ in range(61))
    for session, step in run(Workload(config, corpus.prompts(rng, mix), budgets, accepts), world.vocabulary):
        if step.num_tokens:
            yield session, step
            tokens -= step.num_tokens
            dead = dead or bool(step.dead_mask[: step.num_tokens].any())
        if tokens <= 0 and dead:
            return


class Hasher:
    """Hash the steps of several engines by one implementation, a state for each engine.

    Args:
        make: the implementation's `HashState`.
        world: configuration and token map.
        device: where the step tensors go.
    """

    def __init__(self, make: Callable[..., Any], world: World, device: torch.device) -> None:
        self._make, self._world, self._device = make, world, device
        self._states: dict[int, tuple[Any, torch.Tensor]] = {}

    def rows(self, session: Session, step: Step) -> torch.Tensor:
        """Give [T, L, C] of a step; what stands past its live tokens means nothing."""
        engine = session.engine
        if id(session) not in self._states:
            state = self._make(
                self._world.config, self._world.token_map,
                slot_cache=True, block_size=engine.config.block_size, device=self._device,
            )  # fmt: skip
            kv_cache = torch.zeros(engine.kv_cache.shape, device=self._device)
            state.ensure_cache(kv_cache)
            self._states[id(session)] = state, kv_cache
        arguments = {
            name: None if value is None else value.to(self._device) for name, value in step.arguments().items()
        }
        return self._states[id(session)][0].forward(**arguments)


def owner(step: Step, token: int) -> str:
    """Say whose token of a step it is."""
    for piece in step.pieces:
        if token < len(piece.tokens):
            return f"step {step.index}, request {piece.request_id}, position {piece.start + token}"
        token -= len(piece.tokens)
    return f"step {step.index}, padding"
