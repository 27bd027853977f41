"""A state machine over the engine: any order of requests, steps and upheavals, with parity as what must never break."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from parity.actions import Action, in_flight, parts_of
from parity.compare import Judge, Trial
from parity.diagnose import describe
from parity.laws import Bench, LawBroken
from parity.workload import Prompt, Session
from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy

_BUDGET = 32
_LONGEST = 50
RARE = ("off-load reload", "beam reorder", "fork", "microbatch inside a request", "same-step hit", "window edge")


class EngineMachine(RuleBasedStateMachine):
    """Drive two engines that hand requests to each other; subclasses set `bench`.

    Attributes:
        uses: how often each rule did something, and each event was seen, over all programs.
        steering: whether programs that reach rare events are sought out.
    """

    bench: ClassVar[Bench]
    uses: ClassVar[Counter[str]] = Counter()
    steering: ClassVar[bool] = False
    streams: Bundle = Bundle("streams")  # (tokens, dead) of prompts, for later prompts to begin with

    @initialize(
        policy=st.sampled_from(list(Policy)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        drafts=st.integers(0, 3),
        padded=st.booleans(),
        seed=st.integers(0, 2**16),
        window=st.sampled_from([None, None, 1, 5]),
        features=st.fixed_dictionaries(
            {
                "lag": st.integers(1, 2),
                "other_group": st.sampled_from([None, 3]),
                "offload_blocks": st.sampled_from([0, 40]),
                "overcommit": st.booleans(),
                "unruly": st.booleans(),
                "in_order": st.booleans(),
            }
        ),
    )
    def build(
        self,
        policy: Policy,
        block_size: int,
        drafts: int,
        padded: bool,
        seed: int,
        window: int | None,
        features: dict[str, int],
    ) -> None:
        """Bind two engines and a trial."""
        lookback = self.bench.world.config.lookback
        config = EngineConfig(
            policy=policy,
            block_size=block_size,
            num_blocks=1 + -(-96 // block_size) + (32 if features["other_group"] else 0),
            token_budget=_BUDGET,
            max_requests=4,
            lookback=lookback,
            num_drafts=drafts,
            pad_tokens=(4, 16, 64) if padded else (),
            pad_requests=(3, 8) if padded else (),
            seed=seed,
            sliding_window=window and lookback + window,
            max_model_length=_LONGEST,
            **features,  # type: ignore[arg-type]
        )
        self.sessions = [Session(config, self.bench.world.vocabulary) for _ in range(2)]
        self.trial = Trial(
            Judge(self.bench.world, [self.bench.implementation], self.bench.device, seed=seed), "machine"
        )
        self.rng = Rng(seed)
        self.seen: Counter[str] = Counter()

    @rule(
        target=streams,
        engine=st.integers(0, 1),
        length=st.integers(1, 20),
        answer=st.integers(1, 5),
        images=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 4)), max_size=3),
        imported=st.integers(0, 8),
    )
    def add(self, engine: int, length: int, answer: int, images: list[tuple[int, int]], imported: int) -> object:
        """Add a fresh prompt, with image spans and an imported beginning where they fit."""
        tokens, dead = self._tokens(length), np.zeros(length, bool)
        for begin, count in images:
            tokens[begin : begin + count], dead[begin : begin + count] = self.bench.world.image_tokens[0], True
        return self._add("add", engine, Prompt(tokens, dead, self._tokens(answer), min(imported, length - 1)))

    @rule(
        target=streams,
        engine=st.integers(0, 1),
        before=streams,
        keep=st.integers(1, 40),
        length=st.integers(0, 6),
        answer=st.integers(1, 5),
    )
    def follow(self, engine: int, before: tuple[np.ndarray, np.ndarray], keep: int, length: int, answer: int) -> object:
        """Add a prompt that begins as an earlier stream does: its blocks may be hit in the step that fills them."""
        tokens = np.concatenate([before[0][:keep], self._tokens(length)])[:40]
        dead = np.concatenate([before[1][:keep], np.zeros(length, bool)])[:40]
        return self._add("follow", engine, Prompt(tokens, dead, self._tokens(answer)))

    @rule(target=streams, engine=st.integers(0, 1), lengths=st.lists(st.integers(1, 6), min_size=2, max_size=3))
    def pack(self, engine: int, lengths: list[int]) -> object:
        """Add the documents of one packed sequence."""
        first, *others = (self._tokens(length) for length in lengths)
        prompt = Prompt(first, np.zeros(len(first), bool), self._tokens(1), documents=tuple(others))
        return self._add("pack", engine, prompt)

    @rule(
        engine=st.integers(0, 1),
        budget=st.integers(1, _BUDGET),
        right=st.integers(0, 3),
        way=st.sampled_from([Action.NOTHING, Action.SPLIT, Action.AHEAD, Action.DUMMY, Action.ABORT_IN_FLIGHT]),
        times=st.integers(1, 5),
    )
    def step(self, engine: int, budget: int, right: int, way: Action, times: int) -> None:
        """Run some steps, the first one whole or in parts; `right` drafts of every request will be accepted."""
        session = self.sessions[engine if self.sessions[engine].alive else 1 - engine]
        for _ in range(times):
            self._step(session, budget, right, way)
            budget, way = _BUDGET, Action.NOTHING

    def _step(self, session: Session, budget: int, right: int, way: Action) -> None:
        step = session.step(budget, right)
        if step is None:
            return
        self._used(f"step, {way}")
        for part in parts_of(session, way, step):
            self.trial.feed(session, part)
            self.seen.update(part.events)
            for piece in part.pieces:
                self.seen.update(piece.events)
        for mismatch in self.trial.settle().first.values():
            raise LawBroken(describe(mismatch, self.bench.world, "the program below"))
        in_flight(session, way, step)
        session.answer(step)

    @precondition(lambda self: self._any("decoding"))
    @rule(pick=st.integers(0, 7))
    def move(self, pick: int) -> None:
        """Hand a decoding request over to the other engine: its KV arrives there, its slots do not."""
        engine, request = self._choose("decoding", pick)
        self.sessions[1 - engine].take_over(*self.sessions[engine].hand_over(request))
        self._used("move")

    @precondition(lambda self: self._any("running"))
    @rule(pick=st.integers(0, 7), reload=st.booleans())
    def preempt(self, pick: int, reload: bool) -> None:
        """Take a request's blocks; it computes all anew, or its KV comes back without slots."""
        number, request = self._choose("running", pick)
        engine = self.sessions[number].engine
        engine.preempt(request, reload=reload and engine.may_reload(request))
        self._used("preempt, reload" if reload else "preempt, recompute")

    @precondition(lambda self: self._any("decoding"))
    @rule(pick=st.integers(0, 7))
    def fork(self, pick: int) -> None:
        """Let a second request go on beside a decoding one, if there is room."""
        number, request = self._choose("decoding", pick)
        engine = self.sessions[number].engine
        if len(engine.running) < engine.config.max_requests and engine.can_fork(request):
            self.sessions[number].fork(request)
            self._used("fork")

    @precondition(lambda self: any(len(session.engine.decoding) > 1 for session in self.sessions))
    @rule(pick=st.integers(0, 7))
    def reorder(self, pick: int) -> None:
        """Let a beam go on from another one's history, if there is room."""
        session = next(session for session in self.sessions if len(session.engine.decoding) > 1)
        beams = session.engine.decoding
        parent = beams.pop(pick % len(beams))
        if session.engine.can_fork(parent):
            session.reorder(beams[pick % len(beams)], parent)
            self._used("reorder")

    @precondition(lambda self: self._any("running"))
    @rule(pick=st.integers(0, 7))
    def abort(self, pick: int) -> None:
        """End a request at once."""
        engine, request = self._choose("running", pick)
        self.sessions[engine].abort(request)
        self._used("abort")

    @precondition(lambda self: self._any("running"))
    @rule()
    def sleep(self) -> None:
        """Lose the KV cache and wake with another one."""
        next(session for session in self.sessions if session.engine.running).sleep()
        self._used("sleep")

    def teardown(self) -> None:
        """Let every request end, then compare the slots and count the blocks."""
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            while session.alive:
                self._step(session, _BUDGET, 0, Action.NOTHING)
            pool = session.engine._pool
            if pool.num_free != pool.num_usable:
                raise LawBroken(f"blocks: {pool.num_usable - pool.num_free} are held, though no request is left")
        result = self.trial.finish()
        if result.stray:
            raise LawBroken(f"slots that hold what no live token wrote there: {dict(result.stray)}")
        self.uses.update(self.seen.keys())
        if self.steering:
            for name in RARE:
                target(min(self.seen[name], 8), label=name)

    def _any(self, what: str) -> bool:
        return any(getattr(session.engine, what) for session in self.sessions)

    def _choose(self, what: str, pick: int) -> tuple[int, int]:
        engine = 0 if getattr(self.sessions[0].engine, what) else 1
        requests = sorted(getattr(self.sessions[engine].engine, what))
        return engine, requests[pick % len(requests)]

    def _used(self, name: str) -> None:
        self.uses[name] += 1

    def _tokens(self, length: int) -> np.ndarray:
        return np.array([self.rng.below(self.bench.world.vocabulary) for _ in range(length)], dtype=np.int64)

    def _add(self, name: str, engine: int, prompt: Prompt) -> object:
        self._used(name)
        self.sessions[engine].add(prompt)
        answer = prompt.answer
        return np.concatenate([prompt.tokens, answer]), np.concatenate([prompt.dead, np.zeros(len(answer), bool)])
