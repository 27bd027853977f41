"""Whatever befalls an engine, each lookback finds its own token: a bookkeeper of slots that knows only steps."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from parity.actions import Action, parts_of
from parity.strategies import Shape, workloads
from parity.workload import Prompt, Session, Workload, run
from parity.world import flash
from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy
from serving.step import Piece, Step

Token = tuple[int, bool]


class Bookkeeper:
    """Keep what every slot was written with, from the tensors of steps alone, and look back from every piece.

    A slot holds the token itself and its place, `(position, token, dead)`; slots that nobody wrote hold None.
    """

    def __init__(self, session: Session) -> None:
        self.config = session.config
        self.slots: dict[int, tuple[int, Token] | None] = {}
        self.binding = 0
        self.lookbacks: Counter[str] = Counter()

    def watch(self, step: Step) -> None:
        """Let a step copy and write, then check every piece of it."""
        if step.binding != self.binding:
            assert step.binding == self.binding + 1
            self.slots, self.binding = {}, step.binding
        before = dict(self.slots)
        for source, target in step.slot_copies:
            self.slots[target] = before.get(source)  # None: a loaded block, whose slots nobody wrote
        bounds = step.query_start_loc.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == step.num_tokens == sum(len(piece.tokens) for piece in step.pieces)
        owners = [row for row in range(len(bounds) - 1) if bounds[row] < bounds[row + 1]]
        assert len(owners) == len(step.pieces)
        if step.slot_mapping is not None:
            self._write(step)
        for row, piece in zip(owners, step.pieces, strict=True):
            tokens = slice(bounds[row], bounds[row + 1])
            assert step.input_ids[tokens].tolist() == piece.tokens.tolist()
            assert step.dead_mask[tokens].tolist() == piece.token_dead.tolist()
            first = piece.offset + piece.start
            assert step.positions[tokens].tolist() == list(range(first, first + len(piece.tokens)))
            self._look_back(step, row, piece)

    def _write(self, step: Step) -> None:
        live = slice(0, step.num_tokens)
        written: dict[int, tuple[int, Token]] = {}
        for slot, position, token, dead in zip(
            step.slot_mapping[live].tolist(), step.positions[live].tolist(),
            step.input_ids[live].tolist(), step.dead_mask[live].tolist(), strict=True,
        ):  # fmt: skip
            assert written.setdefault(slot, (position, (token, dead))) == (position, (token, dead))
            if self.config.sliding_window is not None:
                assert slot >= self.config.block_size, "the null block is written"
        self.slots |= written

    def _look_back(self, step: Step, row: int, piece: Piece) -> None:
        for column in range(self.config.lookback):
            local = piece.start - 1 - column
            seen = int(step.lookback_token_ids[row, column]), bool(step.lookback_dead_mask[row, column])
            if local < 0:
                assert seen == (-1, False)
                continue
            true = int(piece.stream[local]), bool(piece.dead[local])
            if seen[0] >= 0:
                self.lookbacks["window"] += 1
                assert seen == true
                continue
            assert step.block_table is not None, "the stateless way does not know a token"
            self.lookbacks["slot"] += 1
            block, offset = divmod(piece.offset + local, self.config.block_size)
            slot = int(step.block_table[row, block]) * self.config.block_size + offset
            assert self.slots.get(slot) == (piece.offset + local, true), f"position {local}: another token's slot"


def keep_books(workload: Workload) -> tuple[Counter[str], Counter[str], str]:
    """Run a workload under the bookkeeper; give lookbacks and events, and a digest of all steps."""
    books: dict[int, tuple[Session, Bookkeeper]] = {}
    lookbacks: Counter[str] = Counter()
    events: Counter[str] = Counter()
    digest = hashlib.sha256()
    for session, step in run(workload, flash().vocabulary):
        _, book = books.setdefault(id(session), (session, Bookkeeper(session)))
        book.watch(step)
        events.update(step.events)
        for piece in step.pieces:
            events.update(piece.events)
            digest.update(f"{piece.request_id} {piece.handle} {sorted(piece.events)}".encode())
        digest.update(f"{step.binding} {step.slot_copies}".encode())
        for tensor in step.arguments().values():
            digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    for session, book in books.values():
        lookbacks += book.lookbacks
        pool = session.engine._pool
        assert pool.num_free == pool.num_usable, "blocks are held though no request is left"
        assert not session.engine._runner._mirrors
    return lookbacks, events, digest.hexdigest()[:16]


@given(workloads(flash(), Shape(prompts=(2, 6), actions=tuple(Action), features=True)))
@settings(max_examples=4 * settings.default.max_examples)
def test_every_lookback_finds_its_own_token(workload: Workload) -> None:
    """Windows tell the truth, and where they are silent the slot holds the very token of that position."""
    keep_books(workload)


def eventful(policy: Policy, seed: int, **fields: object) -> Workload:
    """A workload drawn with the project's own generator, with all that may befall an engine."""
    rng = Rng(seed)

    def words(length: int) -> np.ndarray:
        return np.array([rng.below(9) for _ in range(length)], np.int64)

    prompts = []
    for number in range(60):
        tokens = words(1 + rng.below(40))
        if prompts and rng.chance(1, 2):
            before = rng.pick(prompts)
            tokens = np.concatenate([before.tokens, before.answer, tokens])[:60]
        dead = np.array([rng.chance(1, 12) for _ in tokens])
        imported = rng.below(len(tokens)) if rng.chance(1, 4) else 0
        handed_over = not imported and rng.chance(1, 6)
        prompts.append(Prompt(tokens, dead, words(1 + rng.below(12)), imported, number, handed_over))
    config = EngineConfig(
        policy, 4, 120, 48, 6, num_drafts=3, pad_tokens=(8, 32, 64), pad_requests=(3, 8), seed=seed, **fields
    )
    budgets = tuple(1 + rng.below(48) for _ in range(17))
    actions = tuple(rng.pick(tuple(Action)) for _ in range(240))
    return Workload(config, tuple(prompts), budgets, (0, 3, 1, 2), None, actions)


PINNED = {
    "stateless": (eventful(Policy.STATELESS, 1, lag=2, other_group=6), "1b4f676991610ba5"),
    "prompt only": (eventful(Policy.PROMPT_ONLY, 2, overcommit=True, offload_blocks=50), "dc33baf90a9b6d49"),
    "known ids": (eventful(Policy.KNOWN_IDS, 3, sliding_window=9, unruly=True), "7e42ba7ff526ecac"),
    "lagging": (eventful(Policy.LAGGING, 4, lag=2, unruly=True), "dd03a78f73061713"),
    "slots only": (
        eventful(Policy.SLOTS_ONLY, 5, in_order=True, sliding_window=4, offload_blocks=50),
        "8499ba6b4a2f3d10",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_seed_is_one_run_whatever_befalls(name: str) -> None:
    """Equal seeds give byte-equal steps on every machine; the long run finds every lookback, too."""
    workload, pinned = PINNED[name]
    lookbacks, _, digest = keep_books(workload)
    assert digest == pinned
    if name != "known ids":
        assert (lookbacks["slot"] > 100) == workload.engine.policy.slot_cache


def test_whatever_may_befall_befalls() -> None:
    """The pinned runs reach all that actions and features can bring about."""
    seen: Counter[str] = Counter()
    for workload, _ in PINNED.values():
        seen += keep_books(workload)[1]
    wanted = (
        "draft runs ahead", "ragged verify", "host lags", "host lags by two", "starved", "reordered", "budget change",
        "several images", "preempted, recompute", "preempted, reload", "off-load reload", "fork", "copy on write",
        "beam reorder", "after abort", "id reuse", "sleep and wake", "sliding window", "window edge", "hybrid groups",
        "microbatch", "microbatch inside a request", "dummy step",
    )  # fmt: skip
    assert all(seen[name] for name in wanted), seen


@pytest.mark.parametrize("in_order", [False, True])
def test_a_hit_is_never_cut_off_from_what_fills_it(in_order: bool) -> None:
    """A step with a same-step hit runs as microbatches only where whoever fills the block stands before."""
    for seed in range(8):
        session = Session(EngineConfig(Policy.SLOTS_ONLY, 2, 40, 60, 4, seed=seed, in_order=in_order), 99)
        for end in (7, 8, 9):
            session.add(Prompt(np.array([1, 2, 3, 4, 5, 6, end]), np.zeros(7, bool), np.array([3])))
        step, book = session.step(), Bookkeeper(session)
        parts = parts_of(session, Action.SPLIT, step)
        assert len(parts) == 1 + in_order
        for part in parts:
            book.watch(part)
