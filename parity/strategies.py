"""Hypothesis strategies: small workloads at production width, drawn toward the edges where ports go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from parity.actions import Action
from parity.workload import Prompt, Workload
from parity.world import World
from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy

BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 256)


@dataclass(frozen=True)
class Shape:
    """Say what a law's workloads contain.

    Attributes:
        policies: the window policies to draw from.
        prompts: least and most prompts.
        drafts: least and most drafts.
        shared: whether every prompt but the first begins as an earlier one's stream does.
        imported: whether every prompt's leading KV comes from elsewhere, or is handed over.
        dead: whether every prompt has a dead span.
        padded: whether every step is padded.
        actions: what may befall the engine, drawn a step.
        features: whether the engine may have a window, groups, a host store, overcommit, an unruly scheduler, a limit.
    """

    policies: Sequence[Policy] = tuple(Policy)
    prompts: tuple[int, int] = (1, 4)
    drafts: tuple[int, int] = (0, 4)
    shared: bool = False
    imported: bool = False
    dead: bool = False
    padded: bool = False
    actions: Sequence[Action] = ()
    features: bool = False


def edges(lookback: int, block_size: int, drafts: int) -> list[int]:
    """List the lengths at which a cut has gone wrong before: 1, N-2, N-1, N, a block and its neighbours, 1 + k."""
    near = (1, lookback - 1, lookback, lookback + 1, block_size - 1, block_size, block_size + 1, 1 + drafts)
    return sorted({length for length in near if length >= 1})


def tokens(draw: st.DrawFn, world: World, length: int) -> np.ndarray:
    """Draw token ids: of the whole vocabulary, of its top, or few different ones."""
    rng = Rng(draw(st.integers(0, 2**32 - 1)))
    low, width = draw(st.sampled_from([(0, world.vocabulary), (max(0, world.vocabulary - 8), 8), (0, 3)]))
    width = min(width, world.vocabulary - low)
    return np.array([low + rng.below(width) for _ in range(length)], dtype=np.int64)


@st.composite
def workloads(draw: st.DrawFn, world: World, shape: Shape) -> Workload:
    """Draw a workload of a few short requests that has what the shape asks for."""
    lookback = world.config.lookback
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    drafts = draw(st.integers(*shape.drafts))
    lengths = edges(lookback, block_size, drafts)
    prompts: list[Prompt] = []
    for number in range(draw(st.integers(*shape.prompts))):
        earlier = prompts if shape.shared or draw(st.booleans()) else []
        prompts.append(_prompt(draw, world, shape, lengths, block_size, earlier, arrival=draw(st.integers(0, number))))
    prompts.sort(key=lambda prompt: prompt.arrival)
    policy = draw(st.sampled_from(list(shape.policies)))
    if shape.features:
        prompts = [_outlying(draw, world, prompt, lookback, block_size, policy) for prompt in prompts]

    features = draw(_features(lookback, block_size)) if shape.features else {}
    other = features.get("other_group")

    def blocks(prompt: Prompt) -> int:
        own = -(-(len(prompt.tokens) + len(prompt.answer) + drafts) // block_size)
        return own + (-(-own * block_size // other) if other else 0)

    needs = [blocks(prompt) for prompt in prompts]
    longest = max(len(document) for prompt in prompts for document in (prompt.tokens, *prompt.documents))
    most = max(max(lengths), 24)
    engine = EngineConfig(
        **features,
        policy=policy,
        block_size=block_size,
        max_model_length=draw(st.sampled_from([None, longest + 1, longest + 4])) if shape.features else None,
        num_blocks=1 + draw(st.integers(max(needs), sum(needs) + 2)),
        token_budget=most,
        max_requests=draw(st.integers(1, 4)) if shape.prompts[0] == 1 else 4,
        lookback=lookback,
        num_drafts=drafts,
        pad_tokens=(2, 3, 8, 16, 64) if shape.padded or draw(st.booleans()) else (),
        pad_requests=(3, 8) if shape.padded or draw(st.booleans()) else (),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 2**16)),
    )
    budgets = draw(st.lists(st.sampled_from([*lengths, most]), max_size=4))
    accepts = draw(st.lists(st.integers(0, drafts), min_size=1, max_size=4))
    actions = draw(st.lists(st.sampled_from(list(shape.actions)), max_size=6)) if shape.actions else []
    return Workload(engine, tuple(prompts), tuple(budgets), tuple(accepts), actions=tuple(actions))


def _features(lookback: int, block_size: int) -> st.SearchStrategy[dict[str, Any]]:
    windows = st.sampled_from([None, lookback + 1, lookback + 2, block_size + lookback, 8])
    return st.fixed_dictionaries(
        {
            "lag": st.integers(1, 3),
            "sliding_window": windows.map(lambda window: window and max(window, lookback + 1)),
            "other_group": st.sampled_from([None, 1, 2, 5, 2 * block_size]),
            "offload_blocks": st.sampled_from([0, 2, 64]),
            "overcommit": st.booleans(),
            "unruly": st.booleans(),
            "in_order": st.booleans(),
        }
    )


def _outlying(draw: st.DrawFn, world: World, prompt: Prompt, lookback: int, block_size: int, policy: Policy) -> Prompt:
    """Draw whether a prompt has documents behind it, or stands at very long positions."""
    kind = draw(st.integers(0, 5))
    if kind == 0 and not prompt.handed_over and not prompt.imported and not prompt.dead.any():
        lengths = draw(st.lists(st.integers(1, min(9, max(1, len(prompt.tokens)))), min_size=1, max_size=3))
        return replace(prompt, documents=tuple(tokens(draw, world, length) for length in lengths))
    if kind == 1 and prompt.imported >= lookback:
        # Without slots there is no block table, which would have a column for every block before.
        far = 2**31 if policy is Policy.STATELESS else 300
        return replace(prompt, offset=-(-far // block_size) * block_size)
    return prompt


def _prompt(
    draw: st.DrawFn,
    world: World,
    shape: Shape,
    lengths: list[int],
    block_size: int,
    earlier: list[Prompt],
    arrival: int,
) -> Prompt:
    length = draw(st.one_of(st.sampled_from(lengths), st.integers(1, 24)))
    own = tokens(draw, world, length)
    dead = np.zeros(length, bool)
    if shape.dead or draw(st.integers(0, 3)) == 0:
        begin = draw(st.integers(0, length - 1))
        end = min(length, begin + draw(st.integers(1, 5)))
        spans = [slice(begin, end)]
        if end + 1 < length and draw(st.booleans()):
            spans.append(slice(end + 1, end + 2))
        for span in spans:
            own[span] = draw(st.sampled_from(world.image_tokens))
            dead[span] = True
    if earlier:
        source = draw(st.sampled_from(earlier))
        stream = np.concatenate([source.tokens, source.answer])
        whole_blocks = block_size * draw(st.integers(0, len(stream) // block_size))
        keep = max(0, min(whole_blocks + draw(st.sampled_from([-1, 0, 0, 1])), len(stream)))
        flags = np.concatenate([source.dead, np.zeros(len(source.answer), bool)])
        if draw(st.booleans()):  # nothing of its own but what is needed to be a prompt
            own, dead = own[: 1 if keep == whole_blocks else 0], dead[: 1 if keep == whole_blocks else 0]
        own, dead = np.concatenate([stream[:keep], own]), np.concatenate([flags[:keep], dead])
        if not len(own):
            own, dead = stream[:1], flags[:1]
    answer = tokens(draw, world, draw(st.integers(1, 6)))
    imported, handed_over = 0, False
    if len(own) > 1 and (shape.imported or draw(st.integers(0, 7)) == 0):
        imported = draw(st.sampled_from(sorted({1, len(own) - 1, *range(block_size, len(own), block_size)})))
        handed_over = draw(st.booleans())
    return Prompt(own, dead, answer, 0 if handed_over else imported, arrival, handed_over)
