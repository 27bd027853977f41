"""A model, a draft model and a way to play a list of commands against an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from serving.engine import Engine, EngineConfig
from serving.runner import Policy
from serving.step import Piece, Step
from tests.serving.witness import Witness

VOCABULARY = 50


def next_token(stream: Sequence[int]) -> int:
    """The model: a function of the stream, so that equal prompts go on alike and later turns hit generated blocks."""
    last = [int(t) for t in stream[-3:]]
    return (len(stream) * 7 + sum((i + 2) * t for i, t in enumerate(last))) % VOCABULARY


def propose_with(k: int):
    """A draft model that is right for a while: how long, and how many drafts there are, depends on the stream."""

    def propose(request_id: int, stream: np.ndarray) -> list[int]:
        known = [int(t) for t in stream]
        count, right = (len(known) * 5 + known[-1]) % (k + 1), (len(known) // 3 + known[-1]) % (k + 1)
        for i in range(count):
            known.append(next_token(known) if i < right else (next_token(known) + 1) % VOCABULARY)
        return known[len(stream) :]

    return propose


def answers(step: Step) -> dict[int, list[int]]:
    """What the model samples for every piece."""
    return {piece.request_id: _sample(piece) for piece in step.pieces if piece.num_sampled}


def _sample(piece: Piece) -> list[int]:
    known = [int(t) for t in piece.stream[: piece.start]] + [int(t) for t in piece.tokens]
    first = len(known) - piece.num_drafts
    return [next_token(known[:end]) for end in range(first, len(known) + 1)]


@dataclass(frozen=True)
class Add:
    """Add a request: a stretch of one of a few texts, so that prefixes are shared."""

    text: int
    length: int
    dead: tuple[int, int]
    new: int
    imported: int


@dataclass(frozen=True)
class Run:
    """Do some steps with this budget (None: the whole one)."""

    steps: int
    budget: int | None


@dataclass(frozen=True)
class Move:
    """Export the n-th request that decodes, and import it into the same engine."""

    which: int


Command = Add | Run | Move


@dataclass
class World:
    """An engine, the witness beside it, and what was seen."""

    config: EngineConfig
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = Engine(self.config, propose_with(self.config.num_drafts) if self.config.num_drafts else None)
        self.witness = Witness(self.config)

    def do(self, command: Command) -> None:
        """Carry out one command; one that does not fit the state is passed over."""
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Run):
            for _ in range(command.steps):
                self.advance(command.budget)
        elif self.witness.decoding:
            request_id = self.witness.decoding[command.which % len(self.witness.decoding)]
            export = self.engine.export(request_id)
            self.witness.left(request_id)
            new = self.engine.import_(export)
            self.witness.added(new, export.tokens, export.dead, export.max_new_tokens, export.computed)

    def advance(self, budget: int | None = None) -> bool:
        """Do one step; False when there was none to do."""
        step = self.engine.step(None if budget is None else min(budget, self.config.token_budget))
        if step is None:
            assert self.engine.finished
            return False
        self.steps.append(step)
        self.witness.stepped(step, budget)
        sampled = answers(step)
        self.engine.update(sampled)
        self.witness.updated(sampled)
        return True

    def drain(self) -> None:
        """Run until nothing is left; a fixed bound says that it ends."""
        for _ in range(20_000):
            if not self.advance():
                return
        raise AssertionError("the engine does not come to an end")

    def _add(self, command: Add) -> None:
        prompt = text(command.text)[: command.length]
        dead = np.zeros(command.length, np.bool_)
        dead[command.dead[0] : sum(command.dead)] = True
        imported = min(command.imported, command.length - 1)
        blocks = -(-(command.length + command.new + self.config.num_drafts) // self.config.block_size)
        if blocks <= self.config.num_blocks:
            new = self.engine.add(prompt, dead=dead, max_new_tokens=command.new, imported=imported)
            self.witness.added(new, prompt, dead, command.new, imported)


def text(which: int) -> np.ndarray:
    """Text 0, 1, 2, ...: 1 and up begin like 0 for a while, then go their own way."""
    position = np.arange(400)
    return np.where(position < 40 // max(1, which), position * 3, position * 5 + which) % VOCABULARY


def configs(policies: Sequence[Policy] = tuple(Policy)) -> st.SearchStrategy[EngineConfig]:
    """Engines from cramped to roomy."""
    buckets = st.sampled_from([(), (8, 16, 32), (64,)])
    return st.builds(
        EngineConfig,
        policy=st.sampled_from(policies),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16, 256]),
        num_blocks=st.integers(1, 60),
        token_budget=st.integers(1, 70),
        max_requests=st.integers(1, 6),
        lookback=st.sampled_from([3, 1, 2, 5]),
        num_drafts=st.integers(0, 4),
        pad_tokens=buckets,
        pad_requests=st.sampled_from([(), (2, 4, 8)]),
        share_prefixes=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 2**64),
    )


def commands() -> st.SearchStrategy[list[Command]]:
    """Lists of commands with many shared prefixes."""
    dead = st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 30), st.integers(0, 9)))
    imported = st.one_of(st.just(0), st.integers(1, 60))
    add = st.builds(Add, st.integers(0, 3), st.integers(1, 60), dead, st.integers(1, 20), imported)
    run = st.builds(Run, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 30)))
    return st.lists(st.one_of(add, run, st.builds(Move, st.integers(0, 5))), min_size=1, max_size=24)
