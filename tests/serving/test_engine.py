"""The engine against a second bookkeeper that works from the definition (see witness.py)."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy
from serving.step import EVENT_MEANINGS, EVENTS, Step
from tests.serving.world import Add, Command, Move, Run, World, commands, configs, text


def play(config: EngineConfig, program: list[Command]) -> World:
    """Carry out a program, drain, and check what must hold at the end."""
    world = World(config)
    for command in program:
        world.do(command)
    world.drain()
    engine, pool = world.engine, world.engine._pool
    assert engine.finished
    assert engine.step() is None
    assert pool.num_free == config.num_blocks
    assert not world.witness.live
    assert not engine._runner._mirrors
    for request_id, book in world.witness.books.items():
        assert engine.stream(request_id).tolist() == [token for token, _ in book.stream]
    return world


def roomy(policy: Policy, seed: int = 3, **changes: object) -> EngineConfig:
    """A config in which every event can happen soon."""
    fields: dict = {"block_size": 4, "num_blocks": 60, "token_budget": 40, "max_requests": 6, "num_drafts": 3}
    fields |= {"pad_tokens": (16, 48), "pad_requests": (4, 8)}
    return EngineConfig(policy=policy, seed=seed, **(fields | changes))


def program(seed: int, requests: int = 40) -> list[Command]:
    """A long program drawn with the project's own generator."""
    rng = Rng(seed)
    out: list[Command] = []
    for _ in range(requests):
        dead = (rng.below(30), rng.below(9)) if rng.chance(1, 3) else (0, 0)
        imported = 1 + rng.below(30) if rng.chance(1, 4) else 0
        out.append(Add(rng.below(4), 1 + rng.below(50), dead, 1 + rng.below(15), imported))
        if rng.chance(1, 2):
            out.append(Run(1 + rng.below(5), 1 + rng.below(40) if rng.chance(1, 2) else None))
        if rng.chance(1, 5):
            out.append(Move(rng.below(5)))
    return out


@given(configs(), commands())
def test_every_step_is_what_the_definition_says(config: EngineConfig, commands: list[Command]) -> None:
    """Streams, positions, windows, blocks, events and padding of any run equal those of an independent bookkeeper,
    every block that a request reads holds exactly its own prefix, and at the end everything is free.
    """
    play(config, commands)


@pytest.mark.parametrize("policy", Policy)
def test_long_run_reaches_every_event(policy: Policy) -> None:
    """A seeded run of one engine that nothing befalls exercises every event that it can, and reads both windows and
    slots where the policy does.
    """
    world = play(roomy(policy), program(5, requests=120))
    assert world.witness.seen >= set(EVENTS[: EVENTS.index("padding") + 1])
    counters, lookbacks = world.engine.counters, world.witness.lookbacks
    befallen = {"preemptions", "loaded_blocks", "given_up", "forks", "aborts", "sleeps"}
    assert {name for name, count in vars(counters).items() if not count} == befallen
    assert lookbacks["window"] > 100
    assert (lookbacks["slot"] > 100) == (policy in (Policy.PROMPT_ONLY, Policy.LAGGING, Policy.SLOTS_ONLY))


def test_counters_count_what_happened() -> None:
    """Every counter equals what an observer of steps and streams counts."""
    world = play(roomy(Policy.LAGGING), program(11))
    pieces = [piece for step in world.steps for piece in step.pieces]
    counters = world.engine.counters
    books = world.witness.books.values()
    assert counters.steps == len(world.steps)
    assert counters.pieces == len(pieces)
    assert counters.tokens == sum(len(piece.tokens) for piece in pieces)
    assert counters.sampled == sum(len(book.stream) - book.prompt for book in books)
    assert counters.drafts == sum(piece.num_drafts for piece in pieces)
    assert counters.prefix_hits == sum("prefix hit" in piece.events for piece in pieces)
    assert counters.hit_tokens == sum(piece.start for piece in pieces if "prefix hit" in piece.events)
    assert counters.same_step_hits == sum("same-step hit" in piece.events for piece in pieces)
    assert counters.imports == sum("import" in piece.events for piece in pieces)
    assert counters.finished + counters.exports == len(books)
    assert counters.padded_steps == sum("padding" in step.pieces[0].events for step in world.steps)


@given(configs(), commands(), st.integers(0, 2**32))
def test_placement_changes_no_stream_and_no_window(config: EngineConfig, commands: list[Command], seed: int) -> None:
    """Another seed places blocks and turns batches differently; what each request is fed stays the same."""
    fed = []
    for chosen in (config.seed, seed):
        fields = vars(config) | {"seed": chosen}
        steps = play(EngineConfig(**fields), commands).steps
        fed.append([sorted(_fed(step)) for step in steps])
    assert fed[0] == fed[1]


def _fed(step: Step) -> list[tuple]:
    windows = step.lookback_token_ids.tolist()
    return [(p.request_id, p.start, p.tokens.tolist(), windows[row]) for row, p in enumerate(step.pieces)]


def digest(world: World) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor of every step."""
    total = hashlib.sha256()
    for step in world.steps:
        for name, tensor in step.arguments().items():
            if tensor is None:
                total.update(f"{name} None".encode())
                continue
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


PINNED = {
    Policy.STATELESS: "498808a1d416abf7ef21844d366d76c1a591b5ff1fa413de6c8e1daa38c80280",
    Policy.LAGGING: "167b8f1a5987b4e06cac1e29aac4b511936a06198fc70f9efa4a32dd22fb4c47",
}


@pytest.mark.parametrize("policy", PINNED)
def test_a_seed_is_one_run(policy: Policy) -> None:
    """Equal seed and calls give byte-equal tensors, today and on every machine."""
    runs = [digest(play(roomy(policy), program(5))) for _ in range(2)]
    assert runs[0] == runs[1] == PINNED[policy]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_64_requests_end(policy: Policy, dtype: torch.dtype) -> None:
    """Sixty-four requests at once through a pool that holds a few of them all come to their end."""
    config = roomy(policy, num_blocks=24, ids_dtype=dtype)
    world = play(config, [Add(i % 4, 1 + i * 7 % 60, (i % 20, i % 3), 1 + i % 12, 0) for i in range(64)])
    assert world.engine.counters.finished == 64
    assert {step.input_ids.dtype for step in world.steps} == {step.lookback_token_ids.dtype for step in world.steps}
    assert world.steps[0].input_ids.dtype == dtype


def test_steps_own_their_tensors() -> None:
    """A step's tensors and pieces stay as they were while later steps are made, and streams are never rewritten."""
    world = World(roomy(Policy.LAGGING))
    kept = []
    for command in program(5):
        world.do(command)
        for step in world.steps[len(kept) :]:
            kept.append(
                (step, {k: v.clone() for k, v in step.arguments().items()}, [p.stream.copy() for p in step.pieces])
            )
    world.drain()
    for step, tensors, streams in kept:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in step.arguments().items())
        for piece, stream in zip(step.pieces, streams, strict=True):
            assert np.array_equal(piece.stream, stream)
            assert not piece.stream.flags.writeable


def test_padding_hides_nothing_in_its_own_slot() -> None:
    """Writing the padded tail would destroy history: its stale slots carry other ids than the ones that they hold."""
    world, harmful = World(roomy(Policy.LAGGING)), 0
    held: dict[int, int] = {}
    for command in program(5):
        before = len(world.steps)
        world.do(command)
        for step in world.steps[before:]:
            pairs = list(zip(step.slot_mapping.tolist(), step.input_ids.tolist(), strict=True))
            held.update(pairs[: step.num_tokens])
            harmful += any(held.get(slot) != token for slot, token in pairs[step.num_tokens :])
    assert harmful > 30


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 30))
def test_tiny_budgets_still_end(length: int, budget: int, new: int) -> None:
    """Budgets that leave no room for drafts, and change from step to step, only take longer."""
    config = roomy(Policy.KNOWN_IDS)
    world = World(config)
    for which in range(3):
        world.do(Add(which, length, (0, 0), new, 0))
    while world.advance(1 + (len(world.steps) * budget) % 5):
        pass
    assert world.engine.counters.finished == 3


def test_second_turn_hits_the_first_answer() -> None:
    """A prompt that continues an earlier stream starts on all its computed full blocks, generated ones included."""
    world = World(roomy(Policy.SLOTS_ONLY))
    world.do(Add(0, 21, (0, 0), 14, 0))
    world.drain()
    turn = np.concatenate([world.engine.stream(0), text(1)[:5]])
    world.witness.added(world.engine.add(turn, max_new_tokens=1), turn, np.zeros(40, np.bool_), 1, 0)
    world.drain()
    assert world.steps[-1].pieces[0].start == 32  # 34 of 35 positions have their KV: 8 blocks of 4


def test_two_engines_pass_a_request_on() -> None:
    """A request that is prefilled here and decoded there gets the stream that one engine alone would give it."""
    alone = play(roomy(Policy.LAGGING), [Add(0, 30, (5, 4), 20, 0)]).engine.stream(0).tolist()
    there = World(roomy(Policy.LAGGING, seed=9))
    here = World(roomy(Policy.LAGGING))
    here.do(Add(0, 30, (5, 4), 20, 0))
    while not here.witness.decoding:
        here.advance()
    export = here.engine.export(0)
    assert here.engine.finished
    assert here.engine._pool.num_free == here.config.num_blocks
    assert (len(export.tokens), export.computed, export.max_new_tokens) == (31, 30, 19)
    new = there.engine.import_(export)
    there.witness.added(new, export.tokens, export.dead, export.max_new_tokens, export.computed)
    there.drain()
    assert there.engine.stream(new).tolist() == alone
    assert "import" in there.steps[0].pieces[0].events


def test_every_event_has_a_meaning() -> None:
    """EVENTS and their meanings are one list, and all meanings differ."""
    assert tuple(EVENT_MEANINGS) == EVENTS
    assert len(set(EVENT_MEANINGS.values())) == len(EVENTS)
