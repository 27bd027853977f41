"""Compare implementations on the steps of a workload, bit for bit, and keep the first row that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from parity.protocol import Implementation
from parity.truth import Truth
from parity.workload import Session
from parity.world import World
from serving.step import EVENTS, Piece, Step

SOURCES = ("batch", "window", "slot", "pad")
COMPANY = "company"


@dataclass
class Tally:
    """Count what one feature saw: pieces of requests, their rows, and the rows that were not equal."""

    cases: int = 0
    rows: int = 0
    unequal: int = 0


@dataclass(frozen=True, eq=False)
class Mismatch:
    """Hold one wrong row and all that is known about it; `index` is the token's place in its piece."""

    implementation: str
    run: str
    engine: int
    step: Step
    piece: Piece
    index: int
    expected: np.ndarray
    got: np.ndarray
    slot_cache: bool
    block_size: int


@dataclass
class Comparison:
    """Hold what a run compared.

    Attributes:
        name: of the run.
        steps: forward calls an implementation.
        rows: live rows of those calls.
        slots: slots whose content was compared at the end.
        features: by event of a piece, and `company`.
        sources: lookbacks (a row has D) by where they came from.
        first: by implementation, its first wrong row.
        stray: by implementation, the number of slots that hold what they must not.
        unequal: by implementation, its wrong rows.
        whole_rows, integer_rows: expected rows that were checked in plainer ways.
    """

    name: str
    steps: int = 0
    rows: int = 0
    slots: int = 0
    features: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in (*EVENTS, COMPANY)})
    sources: Counter[str] = field(default_factory=Counter)
    first: dict[str, Mismatch] = field(default_factory=dict)
    stray: Counter[str] = field(default_factory=Counter)
    unequal: Counter[str] = field(default_factory=Counter)
    whole_rows: int = 0
    integer_rows: int = 0

    @property
    def equal(self) -> bool:
        """Whether every row and every slot of every implementation was right."""
        return not self.first and not self.stray


class Judge:
    """Feed steps to implementations and compare their rows with those of each request alone.

    Args:
        world: configuration and token map.
        implementations: each must offer `hash_state.HashState`.
        device: where the step tensors go.
        seed: of the sample that checks the expected rows.
        strided: whether implementations see strided views instead of contiguous tensors.
        disguise: `[V]`, the token id that implementations see for each one; it must compress alike.
        batch_rows: rows that are gathered before they are compared.
        whole_rows: positions a batch whose expected rows are also computed by NumPy from whole requests.
    """

    def __init__(
        self,
        world: World,
        implementations: Iterable[Implementation],
        device: torch.device,
        *,
        seed: int = 0,
        strided: bool = False,
        disguise: np.ndarray | None = None,
        batch_rows: int = 1 << 18,
        whole_rows: int = 1 << 16,
    ) -> None:
        self.world = world
        self.device = device
        self.states = {one.name: one.require("hash_state.HashState") for one in implementations}
        self.seed = seed
        self._strided = strided
        self._disguise = None if disguise is None else torch.from_numpy(disguise).to(device)
        self.batch_rows = batch_rows
        self.whole_rows = whole_rows

    def run(
        self,
        name: str,
        steps: Iterable[tuple[Session, Step]],
        progress: Callable[[int], None] = lambda rows: None,
    ) -> Comparison:
        """Compare on every step of a run, and on the slots that are left at its end.

        Args:
            name: how the report calls it.
            steps: of one engine or several, each with its session; an implementation keeps one state an engine.
            progress: told the number of rows of each step.
        """
        trial = Trial(self, name)
        for session, step in steps:
            trial.feed(session, step)
            progress(step.num_tokens)
        return trial.finish()

    def present(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Give a step tensor as implementations are to see it: on the device, disguised, strided."""
        if tensor is None:
            return None
        tensor = tensor.to(self.device)
        if self._disguise is not None and name in ("input_ids", "lookback_token_ids"):
            seen = self._disguise[tensor.clamp(min=0).long()].to(tensor.dtype)
            tensor = torch.where(tensor < 0, tensor, seen)
        return strided(tensor) if self._strided else tensor


class Trial:
    """Feed the steps of one run to a judge's implementations, step by step.

    Args:
        judge: the world, the implementations and how they are shown a step.
        name: of the run.
    """

    def __init__(self, judge: Judge, name: str) -> None:
        self.result = Comparison(name)
        self._judge = judge
        self._truth = Truth(judge.world, judge.device, judge.seed)
        self._stands: dict[int, _Stand] = {}
        self._pending: list[_Pending] = []
        self._pending_rows = 0

    def feed(self, session: Session, step: Step) -> None:
        """Let every implementation hash a step; its rows are compared once enough are gathered."""
        stand = self._stands.get(id(session))
        if stand is None:
            stand = self._stands[id(session)] = _Stand(self._judge, session, len(self._stands))
        self._pending.append(stand.forward(step, self.result))
        self.result.steps += 1
        self.result.rows += step.num_tokens
        self.result.sources += lookback_sources(step, self._judge.world.config.lookback)
        self._pending_rows += step.num_tokens
        if self._pending_rows >= self._judge.batch_rows:
            self.settle()

    def settle(self) -> Comparison:
        """Compare the rows that are gathered; give the result so far."""
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if not pending:
            return self.result
        for one in pending:
            for name in one.step.events:
                self.result.features[name].cases += 1
                self.result.features[name].rows += one.step.num_tokens
        pending = [one for one in pending if one.step.num_tokens]
        if not pending:
            return self.result
        pieces = [piece for one in pending for piece in one.step.pieces]
        owners = [(one.stand.number, piece.request_id) for one in pending for piece in one.step.pieces]
        expected = self._truth.rows(pieces)
        self._truth.check_integers(pieces, expected, samples=min(64, 1 + len(expected) // 16))
        self._truth.check_whole(owners, pieces, expected, self._judge.whole_rows)
        self.result.whole_rows, self.result.integer_rows = self._truth.whole_rows, self._truth.integer_rows
        wrong = torch.zeros(len(expected), dtype=torch.bool, device=expected.device)
        for name in self._judge.states:
            actual = torch.cat([one.rows[name] for one in pending])
            unequal = (actual != expected).flatten(1).any(1)
            wrong |= unequal
            if not (count := int(unequal.sum())):
                continue
            self.result.unequal[name] += count
            if name not in self.result.first:
                first = int(unequal.nonzero()[0])
                self.result.first[name] = _locate(self.result.name, name, pending, first, expected, actual)
        _tally(self.result, pending, wrong.cpu().numpy())
        return self.result

    def finish(self) -> Comparison:
        """Compare what is gathered and the slots of every engine; give the result."""
        self.settle()
        for stand in self._stands.values():
            stand.compare_slots(self.result)
        return self.result


class _Stand:
    """One engine under comparison: each implementation's state, and the slots as the engine's writes leave them."""

    def __init__(self, judge: Judge, session: Session, number: int) -> None:
        engine = session.engine
        self.number = number
        self.session = session
        self._judge = judge
        config = engine.config
        self._states = {
            name: make(
                judge.world.config,
                judge.world.token_map,
                slot_cache=config.policy.slot_cache,
                block_size=config.block_size if config.policy.slot_cache else None,
                device=judge.device,
            )
            for name, make in judge.states.items()
        }
        self._bind(0)

    def _bind(self, binding: int) -> None:
        engine = self.session.engine
        self._binding = binding
        self._kv_cache = torch.zeros(engine.kv_cache.shape, device=self._judge.device)
        for name, state in self._states.items():
            # Between two KV caches there is none; even a new one of the same shape starts with zeros.
            if state.ensure_cache(self._kv_cache[:0]) or not state.ensure_cache(self._kv_cache):
                raise RuntimeError(f"{name}: ensure_cache says True without a KV cache, or False with one")
        self._slots = np.zeros(engine.num_slots if engine.config.policy.slot_cache else 0, np.int32)

    def forward(self, step: Step, result: Comparison) -> _Pending:
        rows: dict[str, torch.Tensor] = {}
        if step.binding != self._binding:
            self.compare_slots(result)
            self._bind(step.binding)
        if not step.num_tokens:
            self._check_dummy(step, result)
            return _Pending(self, step, rows)
        self._copy_slots(step)
        for name, state in self._states.items():
            tensors = {key: self._judge.present(key, value) for key, value in step.arguments().items()}
            rows[name] = state.forward(**tensors)[: step.num_tokens]
        if step.slot_mapping is not None:
            live = step.slot_mapping[: step.num_tokens].numpy()
            compressed = self._judge.world.token_map[step.input_ids[: step.num_tokens].numpy()]
            compressed[step.dead_mask[: step.num_tokens].numpy()] = -1
            self._slots[live[live >= 0]] = compressed[live >= 0]
        return _Pending(self, step, rows)

    def _check_dummy(self, step: Step, result: Comparison) -> None:
        for name, state in self._states.items():
            if not hasattr(state, "dummy_hashes"):
                continue
            hashes, keep = state.dummy_hashes(self._judge.present("input_ids", step.input_ids))
            if not bool((hashes == -1).all()) or bool(keep.any()) or len(hashes) != len(step.input_ids):
                result.stray[name] += 1
                result.features["dummy step"].unequal += 1

    def _copy_slots(self, step: Step) -> None:
        if not step.slot_copies or step.slot_mapping is None:
            return
        source, target = np.array(step.slot_copies).T
        self._slots[target] = self._slots[source]
        for name, state in self._states.items():
            if getattr(state, "cache", None) is None:
                raise AttributeError(f"{name}: offers no cache, in which a fork's slots could be copied")
            state.cache[torch.from_numpy(target)] = state.cache[torch.from_numpy(source)]

    def compare_slots(self, result: Comparison) -> None:
        if not len(self._slots):
            return
        result.slots += len(self._slots)
        for name, state in self._states.items():
            cache = getattr(state, "cache", None)
            if cache is None:
                continue  # a port may keep its slots to itself
            if stray := int((cache.cpu().numpy() != self._slots).sum()):
                result.stray[name] += stray


@dataclass(frozen=True, eq=False)
class _Pending:
    stand: _Stand
    step: Step
    rows: dict[str, torch.Tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Give a view of equal values whose strides are not those of a contiguous tensor, nor its storage's start."""
    room = tensor.new_zeros([2 * size + 3 for size in tensor.shape])
    view = room[tuple(slice(1, 1 + 2 * size, 2) for size in tensor.shape)]
    return view.copy_(tensor)


def lookback_sources(step: Step, depth: int) -> Counter[str]:
    """Count a step's lookbacks by source: `batch`, `window`, `slot` or `pad` (before position 0, or nothing known).

    A piece of n tokens looks back min(n, D - c) times at window column c; its other lookbacks stay in the batch.
    """
    if not step.pieces:
        return Counter()
    lengths = np.array([len(piece.tokens) for piece in step.pieces])
    starts = np.array([piece.start for piece in step.pieces])
    columns = np.arange(depth)
    times = np.minimum(lengths[:, None], depth - columns)
    kinds = piece_sources(step, starts)
    counts = Counter({source: int(times[kinds == source].sum()) for source in SOURCES[1:]})
    counts["batch"] = int(lengths.sum()) * depth - counts.total()
    return counts


def piece_sources(step: Step, starts: np.ndarray) -> np.ndarray:
    """Name the source of every piece's window columns, `[pieces, D]`: position start - 1 - c stands in column c."""
    window = step.lookback_token_ids[_rows_of_pieces(step)].numpy()
    inside = starts[:, None] - 1 - np.arange(window.shape[1]) >= 0
    unknown = "slot" if step.slot_mapping is not None else "pad"
    return np.where(~inside, "pad", np.where(window >= 0, "window", unknown))


def _rows_of_pieces(step: Step) -> torch.Tensor:
    return step.query_start_loc.diff().nonzero().flatten()


def _tally(result: Comparison, pending: list[_Pending], wrong: np.ndarray) -> None:
    begin = 0
    for one in pending:
        for piece in one.step.pieces:
            end = begin + len(piece.tokens)
            unequal = int(wrong[begin:end].sum())
            names = [*piece.events, COMPANY] if len(one.step.pieces) > 1 else piece.events
            for name in names:
                tally = result.features[name]
                tally.cases += 1
                tally.rows += end - begin
                tally.unequal += unequal
            begin = end


def _locate(
    run: str, name: str, pending: list[_Pending], at: int, expected: torch.Tensor, actual: torch.Tensor
) -> Mismatch:
    row = at
    for one in pending:
        if row < one.step.num_tokens:
            break
        row -= one.step.num_tokens
    for piece in one.step.pieces:
        if row < len(piece.tokens):
            break
        row -= len(piece.tokens)
    config = one.stand.session.config
    return Mismatch(
        name, run, one.stand.number, one.step, piece, row, expected[at].cpu().numpy(), actual[at].cpu().numpy(),
        config.policy.slot_cache, config.block_size,
    )  # fmt: skip
