"""Laws of single moves of an engine, each of which the law of upheaval draws among all others; and of binding."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from parity.actions import Action
from parity.laws import Bench, Law, LawBroken, equals_alone
from parity.strategies import Shape, tokens, workloads
from parity.workload import Workload
from parity.world import World


def _often(*actions: Action, latest: int = 1, **wanted: object) -> Callable[[World], st.SearchStrategy]:
    """Draw workloads in which every step meets one of the actions, answers being long enough for it."""

    @st.composite
    def draw_one(draw: st.DrawFn, world: World) -> Workload:
        workload = draw(workloads(world, Shape(**wanted)))  # type: ignore[arg-type]
        prompts = tuple(
            replace(prompt, arrival=number * latest // 3, answer=tokens(draw, world, draw(st.integers(4, 8))))
            for number, prompt in enumerate(workload.prompts)
        )
        longest = max(len(prompt.tokens) for prompt in prompts) + 8 + workload.engine.num_drafts
        blocks = 2 + (len(prompts) + 4) * -(-longest // workload.engine.block_size)
        engine = replace(workload.engine, num_blocks=blocks, max_requests=6)
        several = tuple(draw(st.lists(st.sampled_from(actions), min_size=6, max_size=12)))
        return replace(workload, prompts=prompts, engine=engine, actions=several)

    return draw_one


@st.composite
def _packed(draw: st.DrawFn, world: World) -> Workload:
    workload = draw(workloads(world, Shape(prompts=(1, 3))))
    prompts = []
    for prompt in workload.prompts:
        short = prompt.tokens[: draw(st.integers(1, 9))]
        documents = tuple(tokens(draw, world, draw(st.integers(1, 9))) for _ in range(draw(st.integers(1, 3))))
        prompt = replace(prompt, tokens=short, dead=np.zeros(len(short), bool), imported=0, handed_over=False)
        prompts.append(replace(prompt, documents=documents))
    blocks = 2 + 24 * (2 + 24 // workload.engine.block_size)
    return replace(workload, prompts=tuple(prompts), engine=replace(workload.engine, num_blocks=blocks, max_requests=8))


def _binds_anew(bench: Bench, case: tuple[int, int, int]) -> None:
    blocks, others, size = case
    state = bench.implementation.require("hash_state.HashState")(
        bench.world.config, bench.world.token_map, slot_cache=True, block_size=size, device=bench.device
    )
    old, new = (torch.zeros(count, 1, device=bench.device) for count in (blocks, others))
    alive = weakref.ref(old)
    state.ensure_cache(old)
    depth, ids = bench.world.config.lookback, torch.arange(1, 1 + min(blocks * size, 8), device=bench.device)
    state.forward(
        input_ids=ids,
        positions=torch.arange(len(ids), device=bench.device),
        query_start_loc=torch.tensor([0, len(ids)], dtype=torch.int32, device=bench.device),
        dead_mask=torch.zeros(len(ids), dtype=torch.bool, device=bench.device),
        lookback_token_ids=torch.full((1, depth), -1, device=bench.device),
        lookback_dead_mask=torch.zeros((1, depth), dtype=torch.bool, device=bench.device),
        slot_mapping=torch.arange(len(ids), device=bench.device),
        block_table=torch.arange(blocks, dtype=torch.int32, device=bench.device)[None],
    )
    state.ensure_cache(new)
    if len(state.cache) != others * size or bool(state.cache.any()):
        raise LawBroken(f"{bench.implementation.name}: another KV cache does not start with zeros: {case}")
    del old
    if alive() is not None and gc.collect() >= 0 and alive() is not None:
        raise LawBroken(f"{bench.implementation.name}: the old KV cache is kept alive: {case}")


def _binding_cases(world: World) -> st.SearchStrategy:
    count = st.integers(1, 4)
    return st.tuples(count, count | st.none(), st.sampled_from([1, 2, 16])).map(
        lambda case: (case[0], case[1] or case[0], case[2])
    )


ENGINE_LAWS = (
    Law(11, "microbatches", "A step that runs as two microbatches gives the rows of one.",
        _often(Action.SPLIT), equals_alone),
    Law(11, "reload", "A request that was preempted and gets its KV back, without slots, gives its own rows.",
        _often(Action.RELOAD), equals_alone),
    Law(11, "beams", "A beam that goes on from another one's history gives the rows of that history.",
        _often(Action.REORDER, Action.NOTHING, prompts=(2, 4)), equals_alone),
    Law(11, "reuse", "A request with the id of one that is gone gives its own rows, also where it starts on a hit.",
        _often(Action.ABORT, Action.NOTHING, latest=12, prompts=(2, 5), shared=True), equals_alone),
    Law(11, "documents", "A packed document gives the rows that it has alone.", _packed, equals_alone),
    Law(11, "binding", "Another KV cache, of whatever size, starts with zeros, and the old one is let go.",
        _binding_cases, _binds_anew),
)  # fmt: skip
