"""Which known mistakes give a port's wrong rows: its steps are hashed again under every fault, and pairs of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from parity.faults import CATALOGUE, RUNNER, STATE, Fault
from parity.faults.model import Model
from parity.truth import Truth
from parity.workload import Session
from parity.world import World
from serving.step import Step
from serving.trace import TracedStep

CPU = torch.device("cpu")
ENOUGH = 40  # steps behind the first wrong row
_MOST = 150  # steps that are hashed again; of longer runs, those that the failing requests need
_PATIENCE = 10  # rows that a fault may get wrong and hardly any right, before it is given up
_LEADERS = 3  # single suspects that are tried together with every other


class Replay:
    """Feed steps to states of one kind, one state an engine, as an engine would.

    Args:
        world: configuration and token map.
        make: the class of the states.
        missteps: what changes the steps on their way, in order.
        device: where the step tensors go.
        present: gives a step tensor, by name, as the port is to see it.
    """

    def __init__(
        self,
        world: World,
        make: Callable[..., Any],
        missteps: Sequence[Any] = (),
        device: torch.device = CPU,
        present: Callable[[str, torch.Tensor | None], torch.Tensor | None] = lambda name, tensor: tensor,
    ) -> None:
        self._world, self._make, self._missteps, self._device, self._present = world, make, missteps, device, present
        self._states: dict[int, Any] = {}
        self._bound: dict[int, tuple[int, torch.Tensor]] = {}

    def play(self, one: TracedStep) -> np.ndarray:
        """Hash a step: `[live, L, C]`."""
        step, size = one.step, one.block_size or None
        if one.engine not in self._states:
            self._states[one.engine] = self._make(
                self._world.config, self._world.token_map, slot_cache=size is not None, block_size=size,
                device=self._device,
            )  # fmt: skip
        state = self._states[one.engine]
        if self._bound.get(one.engine, (None,))[0] != step.binding:
            kv_cache = torch.zeros(one.blocks, 1, device=self._device)
            state.ensure_cache(kv_cache[:0])
            state.ensure_cache(kv_cache)
            self._bound[one.engine] = step.binding, kv_cache
        if not step.num_tokens:
            return np.zeros((0, len(self._world.layout.primes), self._world.config.columns), np.int32)
        if step.slot_copies and size:
            source, target = torch.tensor(step.slot_copies, device=self._device).unbind(1)
            state.cache[target] = state.cache[source]
        for misstep in self._missteps:
            step = misstep.change(one.engine, step)
        tensors = {name: self._to_device(name, tensor) for name, tensor in step.arguments().items()}
        if step is one.step and self._missteps and type(state) is Model and one.rows is not None:
            state.note(tensors)  # a right state gives right rows for a right step
            return one.rows
        return state.forward(**tensors)[: step.num_tokens].cpu().numpy()

    def _to_device(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        shown = self._present(name, tensor)
        return None if shown is None else shown.to(self._device)


@dataclass(eq=False)
class Evidence:
    """Hold steps in order, the rows that a port gave for them and those that it should have given.

    Attributes:
        world: configuration and token map.
        steps: with their expected rows.
        got: by step `[live, L, C]`.
    """

    world: World
    steps: list[TracedStep] = field(default_factory=list)
    got: list[np.ndarray] = field(default_factory=list)

    def wrong(self, rows: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Say by step which rows, the port's or others, differ from the expected ones: `[live]` bool."""
        return [
            (mine != one.rows).any((1, 2))
            for mine, one in zip(self.got if rows is None else rows, self.steps, strict=True)
        ]

    @property
    def num_wrong(self) -> int:
        """Wrong rows of the port."""
        return sum(int(one.sum()) for one in self.wrong())

    def head(self, steps: int) -> Evidence:
        """Give the first steps alone."""
        return Evidence(self.world, self.steps[:steps], self.got[:steps])

    def narrowed(self) -> Evidence:
        """Give what the failing requests need, where there are many steps: theirs, and those that wrote their slots."""
        if len(self.steps) <= _MOST:
            return self
        failing: dict[tuple[int, int], None] = {}
        for one, wrong in zip(self.steps, self.wrong(), strict=True):
            begin = 0
            for piece in one.step.pieces:
                if wrong[begin : begin + len(piece.tokens)].any() and len(failing) < 8:
                    failing[one.engine, piece.request_id] = None
                begin += len(piece.tokens)
        own = [any((one.engine, p.request_id) in failing for p in one.step.pieces) for one in self.steps]
        read = {(one.engine, slot) for one, mine in zip(self.steps, own, strict=True) if mine for slot in _written(one)}
        kept = [
            at for at, one in enumerate(self.steps)
            if own[at] or any((one.engine, slot) in read for slot in _written(one))
        ]  # fmt: skip
        return Evidence(self.world, [self.steps[at] for at in kept][-_MOST:], [self.got[at] for at in kept][-_MOST:])


def gather(
    world: World,
    make: Callable[..., Any],
    steps: Iterable[tuple[Session, Step]],
    device: torch.device = CPU,
    present: Callable[[str, torch.Tensor | None], torch.Tensor | None] = lambda name, tensor: tensor,
    *,
    more: int = ENOUGH,
) -> Evidence:
    """Run a port again on the steps of a run, until some are behind its first wrong row.

    Args:
        world, make, device, present: as `Replay` has them.
        steps: the same as made it fail.
        more: how many steps are wanted behind the first wrong row.
    """
    evidence, engines, failed = Evidence(world), list[Session](), None
    port, truth = Replay(world, make, device=device, present=present), Truth(world, CPU)
    for number, (session, step) in enumerate(steps):
        if session not in engines:
            engines.append(session)
        config, blocks = session.config, len(session.engine.kv_cache)
        size = config.block_size if config.policy.slot_cache else 0
        one = TracedStep(engines.index(session), size, blocks, step, None)
        got = port.play(one)
        want = truth.rows(step.pieces).numpy() if step.pieces else got
        evidence.steps.append(replace(one, rows=want))
        evidence.got.append(got)
        if failed is None and not np.array_equal(got, want):
            failed = number
        if failed is not None and number >= failed + more:
            break
    return evidence


@dataclass(frozen=True, eq=False)
class Suspect:
    """Say how well one fault, or two together, explain a port's wrong rows.

    Attributes:
        faults: one or two.
        explained: wrong rows of the port that are exactly what the faults give.
        missed: rows that the faults spoil and the port does not, or spoils otherwise where it is wrong.
        wrong: wrong rows of the port.
    """

    faults: tuple[Fault, ...]
    explained: int
    missed: int
    wrong: int

    @property
    def score(self) -> float:
        """Explained rows as a share of all rows that the port or the faults spoil: 1 where they are the same."""
        return self.explained / max(1, self.explained + self.missed)


def suspects(evidence: Evidence, *, patience: float = 120.0) -> list[Suspect]:
    """Hash the evidence under every fault of a hash state or a runner; give those that explain a row, best first.

    Pairs are tried only where no single fault explains everything, and named only where they explain more than both
    of their parts.

    Args:
        evidence: with a wrong row.
        patience: seconds after which nothing more is tried.
    """
    end = time.monotonic() + patience
    evidence = evidence.narrowed()
    if not evidence.num_wrong:
        return []
    known = takewhile(lambda fault: time.monotonic() < end, _known(evidence))
    found = sorted(filter(None, (_judge(evidence, (one,)) for one in known)), key=_rank)
    if found and found[0].score == 1:
        return found
    leaders = found[:_LEADERS]
    tried: set[frozenset[str]] = set()
    for leader in leaders:
        for other in takewhile(lambda fault: time.monotonic() < end, _known(evidence)):
            pair = frozenset((leader.faults[0].id, other.id))
            if len(pair) < 2 or pair in tried or other.group == "kernel":
                continue
            tried.add(pair)
            both = _judge(evidence, (leader.faults[0], other))
            if both is not None and both.score > 1.02 * leaders[0].score:
                found.append(both)
    return sorted(found, key=_rank)


def _rank(suspect: Suspect) -> tuple[float, int]:
    return -suspect.score, len(suspect.faults)


def _known(evidence: Evidence) -> Iterator[Fault]:
    """Give the faults to try; kernels, which Triton's interpreter runs, only where their arithmetic can be it."""
    wrong = evidence.wrong()
    arithmetic = sum(int(one.sum()) for one in wrong) > 0.9 * sum(len(one) for one in wrong)
    for fault in CATALOGUE.values():
        if fault.level not in (STATE, RUNNER) or (fault.group == "kernel" and not (arithmetic and _interpreted())):
            continue
        if fault.group == "kernel" and fault.id.endswith("b"):
            continue  # the same rows as those of its namesake, which is fast
        yield fault


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _judge(evidence: Evidence, faults: tuple[Fault, ...]) -> Suspect | None:
    if any(fault.group == "kernel" for fault in faults):
        evidence = evidence.head(4)
    explained = missed = 0
    together = rows_under(evidence, faults)
    for mine, theirs, bad, one in zip(evidence.got, together, evidence.wrong(), evidence.steps, strict=True):
        same = (mine == theirs).all((1, 2))
        spoiled = bad | (theirs != one.rows).any((1, 2))
        explained += int((same & bad).sum())
        missed += int((spoiled & ~same).sum())
        if missed > _PATIENCE and explained * 10 < missed:
            return None
    return Suspect(faults, explained, missed, evidence.num_wrong) if explained else None


def rows_under(evidence: Evidence, faults: Sequence[Fault]) -> Iterator[np.ndarray]:
    """Hash the evidence under faults that act together, step by step: states are mixed, missteps follow one another."""
    states = [fault.make for fault in faults if fault.level == STATE]
    try:
        make = type("Together", (*states,), {}) if states else Model
    except TypeError:
        make = states[0]
    replay = Replay(evidence.world, make, [fault.make() for fault in faults if fault.level == RUNNER])
    return map(replay.play, evidence.steps)


def _written(one: TracedStep) -> list[int]:
    if one.step.slot_mapping is None:
        return []
    return one.step.slot_mapping[: one.step.num_tokens].tolist()
