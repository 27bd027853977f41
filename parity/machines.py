"""A state machine over the engine: any order of requests, steps and moves, with parity as what must never break."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from parity.compare import Judge, Trial
from parity.diagnose import describe
from parity.laws import Bench, LawBroken
from parity.workload import Prompt, Session
from serving.engine import EngineConfig
from serving.rng import Rng
from serving.runner import Policy

_BUDGET = 32


class EngineMachine(RuleBasedStateMachine):
    """Drive two engines that hand requests to each other; subclasses set `bench`."""

    bench: ClassVar[Bench]
    streams: Bundle = Bundle("streams")  # (tokens, dead) of prompts, for later prompts to begin with

    @initialize(
        policy=st.sampled_from(list(Policy)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        drafts=st.integers(0, 3),
        padded=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def build(self, policy: Policy, block_size: int, drafts: int, padded: bool, seed: int) -> None:
        """Bind two engines and a trial."""
        config = EngineConfig(
            policy=policy,
            block_size=block_size,
            num_blocks=-(-96 // block_size),
            token_budget=_BUDGET,
            max_requests=4,
            lookback=self.bench.world.config.lookback,
            num_drafts=drafts,
            pad_tokens=(4, 16, 64) if padded else (),
            pad_requests=(3, 8) if padded else (),
            seed=seed,
        )
        self.sessions = [Session(config, self.bench.world.vocabulary) for _ in range(2)]
        self.decoding: list[set[int]] = [set(), set()]
        self.trial = Trial(
            Judge(self.bench.world, [self.bench.implementation], self.bench.device, seed=seed), "machine"
        )
        self.rng = Rng(seed)

    @rule(
        target=streams,
        engine=st.integers(0, 1),
        length=st.integers(1, 20),
        answer=st.integers(1, 5),
        image=st.tuples(st.integers(0, 19), st.integers(0, 4)),
        imported=st.integers(0, 8),
    )
    def add(self, engine: int, length: int, answer: int, image: tuple[int, int], imported: int) -> object:
        """Add a fresh prompt, with an image span and an imported beginning where they fit."""
        tokens, dead = self._tokens(length), np.zeros(length, bool)
        begin, end = image[0], min(image[0] + image[1], length)
        if begin < end:
            tokens[begin:end], dead[begin:end] = self.bench.world.image_tokens[0], True
        return self._add(engine, tokens, dead, answer, min(imported, length - 1))

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
        return self._add(engine, tokens, dead, answer, 0)

    @rule(engine=st.integers(0, 1), budget=st.integers(1, _BUDGET), right=st.integers(0, 3))
    def step(self, engine: int, budget: int, right: int) -> None:
        """Run one step; `right` drafts of every request will be accepted."""
        session = self.sessions[engine]
        step = session.step(budget, right)
        if step is None:
            return
        self.trial.feed(session, step)
        result = self.trial.settle()
        for mismatch in result.first.values():
            raise LawBroken(describe(mismatch, self.bench.world, "the program below"))
        ended = session.answer(step)
        self.decoding[engine] |= {piece.request_id for piece in step.pieces if piece.num_sampled}
        self.decoding[engine] -= set(ended)

    @precondition(lambda self: any(self.decoding))
    @rule(pick=st.integers(0, 7))
    def move(self, pick: int) -> None:
        """Hand a decoding request over to the other engine: its KV arrives there, its slots do not."""
        engine = 0 if self.decoding[0] else 1
        request = sorted(self.decoding[engine])[pick % len(self.decoding[engine])]
        self.decoding[engine].discard(request)
        self.sessions[1 - engine].take_over(*self.sessions[engine].hand_over(request))

    def teardown(self) -> None:
        """Let every request end, then compare the slots."""
        if not hasattr(self, "sessions"):
            return
        for engine, session in enumerate(self.sessions):
            while session.alive:
                self.step(engine, _BUDGET, 0)
        result = self.trial.finish()
        if result.stray:
            raise LawBroken(f"slots that hold what no live token wrote there: {dict(result.stray)}")

    def _tokens(self, length: int) -> np.ndarray:
        return np.array([self.rng.below(self.bench.world.vocabulary) for _ in range(length)], dtype=np.int64)

    def _add(self, engine: int, tokens: np.ndarray, dead: np.ndarray, answer: int, imported: int) -> object:
        words = self._tokens(answer)
        self.sessions[engine].add(Prompt(tokens, dead, words, imported))
        return np.concatenate([tokens, words]), np.concatenate([dead, np.zeros(answer, bool)])
