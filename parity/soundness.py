"""Search for the smallest schedules in which a correct hash state gives wrong rows: what a policy cannot bear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

from parity.workload import Prompt, Session
from parity.world import World
from reference.hash_state import HashState
from serving.engine import EngineConfig
from serving.parts import run_ahead, split
from serving.policy import Policy
from serving.step import Step

# What a schedule is made of. `step` runs the next step; every draft of it is wrong, but with `accept`, where all are
# right. The others happen between steps, to the request that was added last where not said otherwise.
STEPS = ("step", "accept", "one token", "ahead", "split")
BETWEEN = ("reload", "recompute", "fork", "again", "sleep")


@dataclass(frozen=True)
class Schedule:
    """Name a small run: how long the first prompt is, and what happens in turn.

    `step`; `accept`: a step whose drafts are right; `one token`: a step of one token; `ahead`: a draft model feeds its
    drafts first; `split`: the step runs as two microbatches, cut behind its first piece; `reload`, `recompute`: the
    oldest running request is preempted; `fork`: the oldest decoding one is forked; `again`: the first prompt comes once
    more, with one token behind it; `sleep`: the KV cache is lost and another one bound, all computes anew.
    """

    prompt: int
    happenings: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """Ask whether a policy bears something.

    Attributes:
        name: what could go wrong.
        policy: what windows hold.
        happenings: what schedules are made of.
        longest: happenings of a schedule, at most.
        prompts: lengths of the first prompt.
        engine: fields of the engine's configuration.
        imported: whether the KV of the first prompt comes from elsewhere, but for its last token.
    """

    name: str
    policy: Policy
    happenings: tuple[str, ...]
    longest: int = 5
    prompts: tuple[int, ...] = (1, 2, 3)
    engine: Mapping[str, Any] = field(default_factory=dict)
    imported: bool = False

    def schedules(self) -> Iterator[Schedule]:
        """All schedules, those of fewer happenings first, then those of a shorter prompt; they end with a step."""
        for length in range(1, self.longest + 1):
            for prompt in self.prompts:
                for happenings in product(self.happenings, repeat=length):
                    if happenings[-1] in STEPS:
                        yield Schedule(prompt, happenings)


_DRAFTS = {"num_drafts": 2}
_BLOCKS = {"block_size": 4}
_STORE = {"offload_blocks": 40}
SLOTS, PROMPT, KNOWN, LAGGING = Policy.SLOTS_ONLY, Policy.PROMPT_ONLY, Policy.KNOWN_IDS, Policy.LAGGING


def questions(lookback: int) -> list[Question]:
    """List what is asked; what was found stands in docs/soundness.md and its test."""
    behind = {"sliding_window": lookback + 1, **_DRAFTS}
    inside = {"sliding_window": lookback, **_DRAFTS}
    reload = "KV comes back after a preemption"
    early = "KV comes back before the host knows its tokens"
    stored = "generated blocks come back from the host"
    shared = "an imported block is shared"
    forked = "a fork's last block is copied without its slots"
    before = "a hit runs in the microbatch before the one that fills its block"
    ordered = "a hit runs behind the piece that fills its block"
    given_up = "a block inside the lookback is given up"
    at_edge = "a block just behind the lookback is given up"
    rejected = "a rejected draft's slot is read"
    fork = ("step", "fork")
    drafts = ("step", "accept")
    return [
        Question(reload, PROMPT, ("step", "reload")),
        Question(reload, KNOWN, ("step", "reload", "recompute", "fork"), 4),
        Question(reload, SLOTS, ("step", "reload", "recompute"), 4),
        Question(early, LAGGING, ("step", "accept", "reload"), engine=_DRAFTS),
        Question(stored, PROMPT, ("step", "sleep"), engine=_STORE),
        Question(stored, KNOWN, ("step", "sleep"), engine=_STORE),
        Question(shared, SLOTS, ("step", "again"), 4, imported=True),
        Question(shared, KNOWN, ("step", "again"), 4, imported=True),
        Question(forked, SLOTS, fork, engine=_BLOCKS),
        Question(forked, PROMPT, fork, engine=_BLOCKS),
        Question(forked, LAGGING, fork, engine={"lag": 2, **_BLOCKS}),
        Question(forked, KNOWN, fork, engine=_BLOCKS),
        Question(before, SLOTS, ("step", "split", "again"), 4),
        Question(ordered, SLOTS, ("step", "split", "again"), 4, engine={"in_order": True}),
        *(Question(given_up, policy, drafts, engine=inside) for policy in (SLOTS, PROMPT, KNOWN)),
        *(Question(at_edge, policy, drafts, engine=behind) for policy in (SLOTS, PROMPT)),
        Question(rejected, SLOTS, ("step", "accept", "one token", "ahead"), 4, (1, 3), _DRAFTS),
        Question(rejected, PROMPT, ("step", "accept", "again"), 4, (1, 3), _DRAFTS),
    ]


def search(world: World, question: Question) -> tuple[Schedule | None, int]:
    """Give the first schedule with a wrong row, or None, and how many were tried."""
    tried = 0
    for schedule in question.schedules():
        tried += 1
        if wrong_rows(world, question, schedule):
            return schedule, tried
    return None, tried


def wrong_rows(world: World, question: Question, schedule: Schedule) -> list[tuple[int, int]]:
    """Play a schedule on the reference's step model; give (request, position) of every wrong row."""
    fields: dict[str, Any] = {"block_size": 1, "num_blocks": 80, "token_budget": 12, "max_requests": 4}
    config = EngineConfig(
        **{**fields, "policy": question.policy, "lookback": world.config.lookback, "sound": False, **question.engine}
    )
    session = Session(config, world.vocabulary)
    slots = config.policy.slot_cache
    state = HashState(
        world.config, world.token_map, slot_cache=slots, block_size=config.block_size if slots else None, device="cpu"
    )
    state.ensure_cache(session.engine.kv_cache)
    first = np.arange(40, 40 + schedule.prompt)  # no token is another one, and none compresses to 0, an empty slot
    session.add(_prompt(first, 60, len(first) - 1 if question.imported else 0))
    wrong: list[tuple[int, int]] = []
    for happening in schedule.happenings:
        if happening in BETWEEN:
            _between(session, happening, first)
            state.ensure_cache(session.engine.kv_cache)
            continue
        step = session.step(1 if happening == "one token" else None, 9 if happening == "accept" else 0)
        if step is None:
            continue
        for part in _parts(step, happening, config):
            if part.slot_copies and state.cache is not None:
                source, target = torch.tensor(part.slot_copies).T
                state.cache[target] = state.cache[source]
            rows = state.forward(**part.arguments()).numpy()  # type: ignore[arg-type]
            wrong += _compare(world, part, rows)
        session.answer(step)
    return wrong


def _prompt(tokens: np.ndarray, answer: int, imported: int = 0) -> Prompt:
    return Prompt(tokens, np.zeros(len(tokens), bool), np.arange(answer, answer + 12), imported)


def _between(session: Session, happening: str, first: np.ndarray) -> None:
    engine = session.engine
    if happening == "again":
        session.add(_prompt(np.append(first, 90), 60))
    elif happening == "sleep":
        engine.sleep(reload=False)
        engine.wake()
    elif happening == "fork" and engine.decoding and len(engine.running) < 4:
        session.fork(engine.decoding[0])
    elif happening in ("reload", "recompute") and engine.running:
        engine.preempt(engine.running[0], reload=happening == "reload")


def _parts(step: Step, happening: str, config: EngineConfig) -> list[Step]:
    knows_fed = config.policy.knows_drafts
    if happening == "ahead":
        return run_ahead(step, knows_fed=knows_fed)
    cut = len(step.pieces[0].tokens)
    if happening == "split" and cut < step.num_tokens:
        return list(split(step, cut, knows_fed=knows_fed))
    return [step]


def _compare(world: World, step: Step, rows: np.ndarray) -> list[tuple[int, int]]:
    wrong, begin = [], 0
    for piece in step.pieces:
        stream = np.concatenate([piece.stream[: piece.start], piece.tokens])
        want = world.alone(stream, np.zeros(len(stream), bool))[piece.start :]
        bad = (want != rows[begin : begin + len(want)]).any((1, 2))
        wrong += [(piece.request_id, piece.start + int(index)) for index in np.flatnonzero(bad)]
        begin += len(want)
    return wrong
