"""The laws: what must hold however an engine cut, cached, drafted, rolled back, moved or padded. Tests call these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from parity.actions import Action
from parity.compare import Judge
from parity.diagnose import describe
from parity.protocol import Implementation
from parity.strategies import Shape, tokens, workloads
from parity.workload import Workload, run
from parity.world import World
from serving.runner import Policy

SLOT_POLICIES = tuple(policy for policy in Policy if policy.slot_cache)


class LawBroken(AssertionError):
    """Say which law an implementation breaks, and show the first row that is wrong."""


@dataclass(frozen=True)
class Bench:
    """Hold what a law is checked on: a world, an implementation and a device."""

    world: World
    implementation: Implementation
    device: torch.device

    def hash_once(self, ids: np.ndarray, dead: np.ndarray) -> np.ndarray:
        """Hash one whole request in one stateless step: `[T]` ids and flags to `[T, L, C]`."""
        state = self.implementation.require("hash_state.HashState")(
            self.world.config, self.world.token_map, slot_cache=False, block_size=None, device=self.device
        )
        depth = self.world.config.lookback
        rows = state.forward(
            input_ids=torch.from_numpy(ids).to(self.device),
            positions=torch.arange(len(ids), device=self.device),
            query_start_loc=torch.tensor([0, len(ids)], dtype=torch.int32, device=self.device),
            dead_mask=torch.from_numpy(dead).to(self.device),
            lookback_token_ids=torch.full((1, depth), -1, dtype=torch.int64, device=self.device),
            lookback_dead_mask=torch.zeros((1, depth), dtype=torch.bool, device=self.device),
            slot_mapping=None,
            block_table=None,
        )
        return rows.cpu().numpy()


@dataclass(frozen=True)
class Law:
    """Hold one law: its number and sentence, the cases it is tried on, and the check of one case.

    Attributes:
        number, name, sentence: what it is.
        cases: the strategy of its cases in a world.
        check: raises LawBroken where a case breaks it.
    """

    number: int
    name: str
    sentence: str
    cases: Callable[[World], st.SearchStrategy]
    check: Callable[[Bench, Any], None]


def equals_alone(bench: Bench, workload: Workload) -> None:
    """Run a workload; every live row must be that of its request alone, and every slot what its last token wrote."""
    judge = Judge(bench.world, [bench.implementation], bench.device, seed=workload.engine.seed)
    result = judge.run(workload.engine.policy.value, run(workload, bench.world.vocabulary))
    for mismatch in result.first.values():
        raise LawBroken(describe(mismatch, bench.world, f"{workload}"))
    for name, count in result.stray.items():
        raise LawBroken(f"{name}: {count} of {result.slots} slots hold what no live token wrote there: {workload}")


def _under_another_placement(bench: Bench, workload: Workload) -> None:
    equals_alone(bench, workload)
    engine = workload.engine
    # Another block size, and no fewer slots than before.
    size = engine.block_size + 1 if engine.block_size < 256 else 130
    other = replace(engine, seed=engine.seed + 1, block_size=size, num_blocks=2 * engine.num_blocks)
    equals_alone(bench, replace(workload, engine=other))


def _from_slots_alone_too(bench: Bench, workload: Workload) -> None:
    # A window that knows the prompt hides what a hit would have read from its slots.
    for policy in dict.fromkeys((workload.engine.policy, Policy.SLOTS_ONLY)):
        equals_alone(bench, replace(workload, engine=replace(workload.engine, policy=policy)))


def _in_another_time(bench: Bench, workload: Workload) -> None:
    # The same requests, cut, mixed, ordered, padded or placed in another way: which one, the seed says.
    told, true = rows_by_content(bench, workload)
    engine = workload.engine
    others = (
        replace(workload, budgets=(1, 2, 3)),
        replace(workload, prompts=tuple(replace(prompt, arrival=prompt.arrival + 3) for prompt in workload.prompts)),
        replace(workload, prompts=tuple(replace(prompt, arrival=0) for prompt in reversed(tuple(workload.prompts)))),
        replace(workload, engine=replace(engine, max_requests=1)),
        replace(workload, engine=replace(engine, pad_tokens=(5, 9, 64, 256), pad_requests=(2, 5, 9))),
        replace(workload, engine=replace(engine, seed=engine.seed + 9, num_blocks=2 * engine.num_blocks)),
    )
    other = others[engine.seed % len(others)]
    again, _ = rows_by_content(bench, other)
    for content in told.keys() & again.keys():
        _require_equal(bench, "when, where and beside whom it ran", told[content], again[content], other)
    if missing := true - again.keys():
        raise LawBroken(f"{len(missing)} of {len(true)} rows of true streams came no more: {other}")


def rows_by_content(bench: Bench, workload: Workload) -> tuple[dict[bytes, np.ndarray], set[bytes]]:
    """Run a workload without knowing any truth: its rows by the whole stream up to their token.

    Returns:
        The rows, those of drafts among them; and the streams whose last token was fed as a true one.
    """
    rows: dict[bytes, np.ndarray] = {}
    true: set[bytes] = set()
    states: dict[int, Any] = {}
    make = bench.implementation.require("hash_state.HashState")
    for session, step in run(workload, bench.world.vocabulary):
        config = session.config
        if id(session) not in states:
            slots = config.policy.slot_cache
            states[id(session)] = make(
                bench.world.config, bench.world.token_map, slot_cache=slots,
                block_size=config.block_size if slots else None, device=bench.device,
            )  # fmt: skip
            states[id(session)].ensure_cache(session.engine.kv_cache)
        arguments = {name: None if t is None else t.to(bench.device) for name, t in step.arguments().items()}
        got = states[id(session)].forward(**arguments)[: step.num_tokens].cpu().numpy()
        begin = 0
        for piece in step.pieces:
            stream = np.concatenate([piece.stream[: piece.start], piece.tokens])
            dead = np.concatenate([piece.dead[: piece.start], piece.token_dead])
            for index, row in enumerate(got[begin : begin + len(piece.tokens)]):
                end = piece.start + index + 1
                content = stream[:end].tobytes() + dead[:end].tobytes()
                _require_equal(
                    bench, "another request of the same stream", rows.setdefault(content, row), row, workload
                )
                if index < len(piece.tokens) - piece.num_drafts:
                    true.add(content)
            begin += len(piece.tokens)
    return rows, true


def _under_every_policy(bench: Bench, workload: Workload) -> None:
    for policy in Policy:
        equals_alone(bench, replace(workload, engine=replace(workload.engine, policy=policy)))


@st.composite
def _one_request(draw: st.DrawFn, world: World) -> tuple[np.ndarray, np.ndarray, int]:
    length = draw(st.integers(1, 12))
    dead = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    return tokens(draw, world, length), dead & draw(st.booleans()), draw(st.integers(0, length - 1))


def _dead_reaches_no_further(bench: Bench, case: tuple[np.ndarray, np.ndarray, int]) -> None:
    ids, dead, position = case
    config = bench.world.config
    alive = dead.copy()
    alive[position] = False
    killed = dead.copy()
    killed[position] = True
    before, after = bench.hash_once(ids, alive), bench.hash_once(ids, killed)
    may_change = np.zeros(before.shape, bool)
    for back in range(config.engram_max_ngram_size):
        if position + back < len(ids):
            # Orders that look back `back` tokens: back + 1 .. N, but there is no order 1.
            first = max(back - 1, 0) * config.engram_n_heads
            may_change[position + back, :, first:] = True
    _require_equal(bench, "a dead token", before[~may_change], after[~may_change], case)
    others = ids.copy()
    others[:position] = (others[:position] + 1) % bench.world.vocabulary
    behind = slice(position + 1, None)
    want = bench.hash_once(others, killed)[behind]
    _require_equal(bench, "what stands before a dead token", after[behind], want, case)


def _alike_hashes_alike(bench: Bench, case: tuple[np.ndarray, np.ndarray, int]) -> None:
    ids, dead, _ = case
    _require_equal(
        bench, "tokens alike", bench.hash_once(ids, dead), bench.hash_once(bench.world.alike[ids], dead), case
    )


def _require_equal(bench: Bench, what: str, left: np.ndarray, right: np.ndarray, case: object) -> None:
    if not np.array_equal(left, right):
        at = np.argwhere(left != right)[0].tolist()
        raise LawBroken(
            f"{bench.implementation.name}: {what} changed {(left != right).sum()} values that it must not, first "
            f"{at}: {left[tuple(at)]} became {right[tuple(at)]}; case {case}"
        )


def _shape(**wanted: object) -> Callable[[World], st.SearchStrategy]:
    return lambda world: workloads(world, Shape(**wanted))  # type: ignore[arg-type]


LAWS = (
    Law(1, "chunks", "Any cut of a prompt into chunks gives the rows of the request alone.",
        _shape(prompts=(1, 2), drafts=(0, 0)), equals_alone),
    Law(2, "company", "Any other requests in the batch, in any order, change nothing.",
        _shape(prompts=(2, 5)), equals_alone),
    Law(3, "prefix_hit", "A request that starts on cached blocks gives its own rows, also where the block is filled in "
        "the same step and where one token is left.", _shape(prompts=(2, 4), shared=True), _from_slots_alone_too),
    Law(4, "rollback", "After k drafts with a accepted the accepted stream gives its own rows, and so do the drafts.",
        _shape(prompts=(1, 3), drafts=(1, 4)), equals_alone),
    Law(5, "import", "Tokens after an import give their own rows, though no slot of the import was written.",
        _shape(imported=True), equals_alone),
    Law(6, "placement", "Physical block numbers, block size and slot reuse change nothing.",
        _shape(policies=SLOT_POLICIES, prompts=(2, 4)), _under_another_placement),
    Law(7, "padding", "Padded tokens, requests and repeated boundaries change no live row and write no slot.",
        _shape(padded=True), equals_alone),
    Law(8, "dead_span", "A dead token changes only the rows and orders that reach it, and hides what stands before it.",
        _one_request, _dead_reaches_no_further),
    Law(9, "compression", "Token ids that compress alike give the same rows.", _one_request, _alike_hashes_alike),
    Law(10, "agreement", "Stateless, and slots under every sound window policy, agree.", _shape(), _under_every_policy),
    Law(11, "upheaval", "Preemption and return, fork, beams, abort, id reuse, another KV cache, microbatches and draft "
        "models that run ahead change no row.",
        _shape(prompts=(2, 5), actions=tuple(Action), features=True), equals_alone),
    Law(11, "time", "Splitting, company, order, arrival, placement and padding of a whole run change nothing.",
        _shape(prompts=(1, 4), drafts=(0, 2)), _in_another_time),
)  # fmt: skip
