"""Recorded runs, split, accompanied, reordered, placed, padded and shifted: no live row becomes another one."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity import metamorphosis
from parity.actions import Action
from parity.corpus import Corpus, encoder, read_texts
from parity.faults import CATALOGUE
from parity.metamorphosis import METAMORPHOSES, company, pad, place, reorder, shift, split
from parity.player import check_rows, constants, replay, world_of
from parity.protocol import Implementation, load_implementation
from parity.record import record, record_run
from parity.runs import all_runs
from parity.strategies import Shape, workloads
from parity.workload import Prompt, Workload, run
from parity.world import World, flash, toy
from reference.hash_state import HashState
from serving.config import EngineConfig
from serving.policy import Policy
from serving.rng import Rng
from serving.step import Piece, Step
from serving.trace import Trace, TracedStep, map_digest, pack_trace
from serving.trace_reader import unpack_trace

CPU = torch.device("cpu")
TOY = toy()
RUNS = tuple(one.name for one in all_runs(TOY))
LAWS = tuple(METAMORPHOSES)
Rows = dict[tuple[int, int], list[tuple[int, bytes]]]


@cache
def recorded(name: str) -> Trace:
    """A run of the main job over bytes, or `flash`: one of the published model."""
    world = flash() if name == "flash" else TOY
    (one,) = (one for one in all_runs(world) if one.name == ("lagging" if name == "flash" else name))
    rows = 300 if name == "flash" else 1200
    return record_run(one, Corpus(read_texts(), encoder(world, None), world), rows=rows, seed=5)


@cache
def world_named(name: str) -> World:
    """The world of a recorded run."""
    return world_of(recorded(name))


def right() -> Implementation:
    """The reference."""
    return load_implementation("reference")


def rows_by_owner(trace: Trace) -> Rows:
    """The expected rows of each request with their positions, in order of time, told from the tensors."""
    found: Rows = {}
    for one in trace.steps:
        starts, pieces = one.step.query_start_loc.tolist(), iter(one.step.pieces)
        assert one.rows is not None
        assert len(one.rows) == starts[-1] == one.step.num_tokens
        for begin, end in pairwise(starts):
            if begin == end:
                continue
            own = found.setdefault((one.engine, next(pieces).request_id), [])
            own += [(int(one.step.positions[at]), one.rows[at].tobytes()) for at in range(begin, end)]
        assert next(pieces, None) is None
    return found


def same_rows(original: Trace, changed: Trace) -> None:
    """Each request of the original has the same rows at the same positions in the same order of time."""
    before, after = rows_by_owner(original), rows_by_owner(changed)
    assert before
    assert {owner: after.get(owner) for owner in before} == before


def holds(original: Trace, changed: Trace, world: World) -> None:
    """The rows are the original's, they follow from the tokens, and the reference gives them from the changed steps."""
    same_rows(original, changed)
    check_rows(changed, world, CPU)
    assert replay(changed, world, right(), CPU).equal


def through_its_file(trace: Trace) -> Trace:
    """The trace as a reader has it, which is the same file again."""
    data = pack_trace(trace)
    again = unpack_trace(data)
    assert pack_trace(again) == data
    return again


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", [*RUNS, "flash"])
def test_no_metamorphosis_changes_a_row(name: str, law: str) -> None:
    """Every recorded run keeps every row of every request, also as it is written, and is itself left as it was."""
    original = recorded(name)
    before = pack_trace(original)
    changed = METAMORPHOSES[law](original, Rng(3))
    holds(original, through_its_file(changed), world_named(name))
    assert pack_trace(original) == before
    assert (pack_trace(changed) == before) == ((name, law) == ("stateless", "placement"))  # where there are no blocks
    assert [one.step.index for one in changed.steps] == list(range(len(changed.steps)))


@given(
    name=st.sampled_from(RUNS),
    laws=st.lists(st.sampled_from(LAWS), min_size=2, max_size=4).filter(lambda laws: laws.count("company") < 2),
    seed=st.integers(0, 2**32),
)
def test_metamorphoses_compose(name: str, laws: list[str], seed: int) -> None:
    """Several of them one after the other, between files and in memory, keep every row."""
    original = recorded(name)
    original = replace(original, steps=original.steps[: 4 + seed % 9])
    rng, changed = Rng(seed), original
    for law in laws:
        changed = METAMORPHOSES[law](through_its_file(changed) if rng.chance(1, 2) else changed, rng)
    holds(original, changed, world_named(name))


@given(
    workload=workloads(TOY, Shape(prompts=(1, 4), shared=True, actions=tuple(Action), features=True)),
    law=st.sampled_from(LAWS),
    seed=st.integers(0, 2**32),
)
def test_whatever_befell_an_engine_no_metamorphosis_changes_a_row(workload: Workload, law: str, seed: int) -> None:
    """Drawn runs, with all that an engine may do, keep every row."""
    original = record("drawn", TOY, run(workload, TOY.vocabulary))
    holds(original, METAMORPHOSES[law](original, Rng(seed)), TOY)


def test_company_of_another_run() -> None:
    """Two runs in the same batches keep the rows of both, the second's under request ids that count on."""
    one, two = recorded("slots only"), recorded("tokens alike")
    both = company(one, two)
    holds(one, both, world_named("slots only"))
    first, second, merged = (rows_by_owner(trace) for trace in (one, two, both))
    past = {engine: 1 + max((own for at, own in first if at == engine), default=-1) for engine in (0, 1)}
    moved = {(engine, past[engine] + request): rows for (engine, request), rows in second.items()}
    assert merged == first | moved
    shared = sum(len({piece.request_id < past[step.engine] for piece in step.step.pieces}) == 2 for step in both.steps)
    assert shared > 10


def test_a_seed_gives_the_same_trace() -> None:
    """The same seed gives the same bytes, another one other bytes."""
    for law, change in METAMORPHOSES.items():
        seven, again, eight = (pack_trace(change(recorded("lagging"), Rng(seed))) for seed in (7, 7, 8))
        assert seven == again
        assert (seven != eight) == (law != "company")


def test_the_recorded_runs_hold_what_could_go_wrong() -> None:
    """Rebinding, slot copies, two engines, same-step hits, drafts, padding and dead tokens are in the runs."""
    steps = [one for name in RUNS for one in recorded(name).steps]
    pieces = [piece for one in steps for piece in one.step.pieces]
    assert any(one.step.binding for one in steps)
    assert any(one.step.slot_copies for one in steps)
    assert any(one.engine for one in steps)
    assert any(len(one.step.input_ids) > one.step.num_tokens for one in steps)
    assert any("same-step hit" in piece.events for piece in pieces)
    assert any(piece.num_drafts for piece in pieces)
    assert any(piece.token_dead.any() for piece in pieces)


def test_the_metamorphoses_do_what_they_say() -> None:
    """Steps are cut inside pieces and drafts, rows move, blocks move, padding grows, and rows come later."""
    original = recorded("lagging")
    steps = original.steps
    halves = [piece for one in split(original, Rng(1)).steps for piece in one.step.pieces]
    assert len(halves) > sum(len(one.step.pieces) for one in steps) + len(steps) // 3
    assert any(piece.num_drafts and piece.num_drafts == len(piece.tokens) for piece in halves)
    moved = reorder(original, Rng(1)).steps
    assert (
        sum(
            [p.request_id for p in a.step.pieces] != [p.request_id for p in b.step.pieces]
            for a, b in zip(steps, moved, strict=True)
        )
        > len(steps) // 2
    )
    for one, other in zip(steps, place(original, Rng(1)).steps, strict=True):
        assert one.step.slot_mapping is not None
        assert other.step.slot_mapping is not None
        assert not one.step.num_tokens or not torch.equal(one.step.slot_mapping, other.step.slot_mapping)
    for one, other in zip(steps, pad(original, Rng(1)).steps, strict=True):
        assert len(other.step.input_ids) > len(one.step.input_ids)
        assert len(other.step.query_start_loc) > len(one.step.query_start_loc)
    late = shift(original, Rng(1)).steps
    assert sum(not one.step.num_tokens for one in late) > sum(not one.step.num_tokens for one in steps)
    assert len(rows_by_owner(shift(original, Rng(1)))) > len(rows_by_owner(original))


@pytest.mark.parametrize("name", ["lagging", "slots only"])
def test_each_bound_cache_is_placed_anew(name: str) -> None:
    """As long as a cache is bound each block has one number of its own; another cache has other numbers."""
    original = recorded(name)
    numbers: dict[tuple[int, int], dict[int, int]] = {}
    for one, other in zip(original.steps, place(original, Rng(1)).steps, strict=True):
        assert other.blocks >= one.blocks
        assert one.step.block_table is not None
        assert other.step.block_table is not None
        found = numbers.setdefault((one.engine, one.step.binding), {})
        for old, new in zip(
            one.step.block_table.ravel().tolist(), other.step.block_table.ravel().tolist(), strict=True
        ):
            assert found.setdefault(old, new) == new < other.blocks
    assert all(len({*found.values()}) == len(found) for found in numbers.values())
    first, second = numbers[0, 0], numbers[0, 1]
    assert any(second[block] != first[block] for block in first.keys() & second.keys())


def forgetting(trace: Trace, original: Trace, names: tuple[str, ...]) -> Trace:
    """The trace with some tensors as they were before it was changed."""
    steps = [
        replace(one, step=replace(one.step, **{name: getattr(old.step, name) for name in names}))
        for one, old in zip(trace.steps, original.steps, strict=True)
    ]
    return replace(trace, steps=steps)


def is_red(trace: Trace, world: World, implementation: Implementation | None = None) -> bool:
    """Whether a replay finds wrong rows; a reference that refuses the step finds them too."""
    try:
        return not replay(trace, world, implementation or right(), CPU).equal
    except ValueError:
        return True


@pytest.mark.parametrize(
    ("law", "name", "forgotten"),
    [
        ("order", "known ids", ("lookback_token_ids",)),
        ("order", "known ids", ("lookback_dead_mask",)),
        ("order", "slots only", ("block_table",)),
        ("order", "slots only", ("slot_mapping",)),
        ("order", "lagging", ("input_ids",)),
        ("order", "lagging", ("dead_mask",)),
        ("order", "lagging", ("query_start_loc",)),
        ("placement", "slots only", ("block_table",)),
        ("placement", "slots only", ("slot_mapping",)),
        ("placement", "slots only", ("slot_copies",)),
    ],
)
def test_what_a_metamorphosis_forgets_is_seen(law: str, name: str, forgotten: tuple[str, ...]) -> None:
    """A transformation that leaves one tensor behind gives a trace that a right state does not replay."""
    original = recorded(name)
    changed = METAMORPHOSES[law](original, Rng(2))
    assert not is_red(changed, world_named(name))
    assert is_red(forgetting(changed, original, forgotten), world_named(name))


def test_a_split_that_ignores_who_writes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves in any order read a same-step hit before it is written."""
    monkeypatch.setattr(
        metamorphosis, "_writers_first", lambda one, rng: rng.permutation(len(one.step.query_start_loc) - 1)
    )
    assert any(is_red(split(recorded("tokens alike"), Rng(seed)), TOY) for seed in range(12))


@pytest.mark.parametrize("change", [shift, lambda trace, rng: company(trace, recorded("slots only"))])
def test_strangers_in_the_same_blocks_are_seen(
    change: Callable[[Trace, Rng], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without blocks of their own, the others of a batch or a time write over the run's slots."""
    monkeypatch.setattr(metamorphosis, "_placed", lambda one, numbers, blocks: replace(one, blocks=blocks))
    assert any(is_red(change(recorded("tokens alike"), Rng(seed)), TOY) for seed in range(12))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("fault", ["H11", "H13", "H21", "H24", "H31"])
def test_a_wrong_state_stays_wrong(fault: str, law: str) -> None:
    """No metamorphosis hides a mistake that the run shows."""
    name = "known ids" if fault in ("H13", "H24") else "slots only"
    wrong, original = CATALOGUE[fault].implementation, recorded(name)
    assert is_red(original, TOY, wrong)
    assert is_red(METAMORPHOSES[law](original, Rng(4)), TOY, wrong)


def lonely(
    first: int = 40, policy: Policy = Policy.SLOTS_ONLY, words: int = 8, size: int = 4, blocks: int = 8
) -> Trace:
    """One request in one chunk that nobody stands beside, decoded without padding."""
    stream = np.arange(first, first + 12)
    prompt = Prompt(stream, np.zeros(12, np.bool_), np.arange(200, 200 + words))
    engine = EngineConfig(policy, block_size=size, num_blocks=blocks, token_budget=64, max_requests=1, lookback=2)
    return record("lonely", TOY, run(Workload(engine, (prompt,)), TOY.vocabulary))


class HistoryByRow(HashState):
    """Takes for the history of a row of the batch what was fed in that row before."""

    def forward(self, **step: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Hash with windows of its own."""
        fed = vars(self).setdefault("fed", {})
        for row, (begin, end) in enumerate(pairwise(step["query_start_loc"].tolist())):
            if begin < end:
                before = [*reversed(fed.get(row, [])), -1, -1][: self.lookback]
                step["lookback_token_ids"][row] = torch.tensor(before)
                fed[row] = fed.get(row, []) + step["input_ids"][begin:end].tolist()
        return super().forward(**step)


BY_ROW = Implementation("by row", SimpleNamespace(HashState=HistoryByRow))
TOLD = Policy.KNOWN_IDS


@pytest.mark.parametrize(
    ("original", "wrong", "change"),
    [
        (lonely(words=1), "H11", split),
        (lonely(words=1, policy=Policy.STATELESS), "H13", split),
        (lonely(policy=TOLD), "H15", lambda trace, _: company(trace, lonely(100, TOLD))),
        (lonely(), "H19", lambda trace, _: company(trace, lonely(100))),
        (company(lonely(), lonely(100)), "by row", reorder),
        (lonely(words=3, size=64, blocks=1), "H21", place),
        (lonely(), "H30", pad),
        (lonely(policy=TOLD), "by row", shift),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_metamorphosis_shows_what_the_run_hides(
    original: Trace, wrong: str, change: Callable[[Trace, Rng], Trace]
) -> None:
    """A mistake that the trace alone does not reach is reached by a change of it; a drawn one may be none by chance."""
    implementation = BY_ROW if wrong == "by row" else CATALOGUE[wrong].implementation
    assert not is_red(original, TOY, implementation)
    assert any(is_red(change(original, Rng(seed)), TOY, implementation) for seed in range(1, 5))


def test_what_cannot_be_changed_is_refused() -> None:
    """A trace without rows, another model, another block size, and rows that wait for each other are named."""
    original = recorded("slots only")
    bare = replace(original, steps=[replace(one, rows=None) for one in original.steps])
    for change in METAMORPHOSES.values():
        with pytest.raises(ValueError, match="rows: missing in trace 'slots only'"):
            change(bare, Rng(0))
    with pytest.raises(ValueError, match="rows: missing"):
        company(original, bare)
    with pytest.raises(ValueError, match="config: got"):
        company(original, recorded("another pad"))
    with pytest.raises(ValueError, match="token_map_sha256: got 'x'"):
        company(original, replace(original, token_map_sha256="x"))
    for name in ("stateless", "large blocks"):
        with pytest.raises(ValueError, match=r"block_size: got .* for engine 0, expected one size"):
            company(original, recorded(name))
    with pytest.raises(ValueError, match=r"step 0: got rows .* that read one another's slots, expected no ring"):
        split(ring(), Rng(0))


def ring() -> Trace:
    """Two requests, each of which reads the slot that the other one writes in the same step."""
    ids, flags = np.array([65, 66]), np.zeros(2, np.bool_)
    pieces = tuple(Piece(at, ids, flags, 1, ids[:1], flags[:1], 0, 1, frozenset()) for at in (0, 1))
    step = Step(
        index=0,
        input_ids=torch.tensor([65, 65]),
        positions=torch.tensor([1, 1]),
        query_start_loc=torch.tensor([0, 1, 2]),
        dead_mask=torch.zeros(2, dtype=torch.bool),
        lookback_token_ids=torch.full((2, 2), -1),
        lookback_dead_mask=torch.zeros((2, 2), dtype=torch.bool),
        slot_mapping=torch.tensor([2, 0]),
        block_table=torch.tensor([[0], [1]]),
        pieces=pieces,
        num_tokens=2,
    )
    rows = np.zeros((2, *constants(TOY)["primes"].shape), np.int32)
    config, digest = dataclasses.asdict(TOY.config), map_digest(TOY.token_map)
    steps = [TracedStep(0, 2, 2, step, rows)]
    return Trace("ring", config, [], TOY.token_map, None, digest, constants(TOY), steps)


@pytest.mark.parametrize("laws", [("split",), ("company", "order", "placement", "padding", "time-shift")])
def test_the_kernels_replay_a_changed_trace(laws: tuple[str, ...], device: torch.device) -> None:
    """The optimized state gives every row of a run with slots, cut and in all other ways."""
    original, rng = recorded("lagging"), Rng(6)
    changed = replace(original, steps=original.steps[:4])
    for law in laws:
        changed = METAMORPHOSES[law](changed, rng)
    assert replay(changed, TOY, load_implementation("optimized"), device).equal


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RUNS, "flash"])
def test_the_device_replays_every_changed_run(name: str, device: torch.device) -> None:
    """Kernels on the GPU give every row of every recorded run, changed in each way and in all of them."""
    state, changed = load_implementation("optimized"), recorded(name)
    for law, change in METAMORPHOSES.items():
        assert replay(change(recorded(name), Rng(8)), world_named(name), state, device).equal, law
        changed = change(changed, Rng(9))
    assert replay(changed, world_named(name), state, device).equal
