"""What an engine is given to do: prompts, and a model that follows a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np

from parity.actions import Action, before_step, in_flight, parts_of
from serving.engine import Engine, EngineConfig
from serving.rng import Rng
from serving.step import Step
from serving.transfer import Export


@dataclass(frozen=True, eq=False)
class Prompt:
    """Hold one request and the words that the scripted model answers.

    Attributes:
        tokens: `[n]` int64 token ids.
        dead: `[n]` bool.
        answer: `[m]` int64, what the model says, m = max_new_tokens.
        imported: leading tokens whose KV arrives from elsewhere.
        arrival: the step before which it is added.
        handed_over: whether another engine prefills it and this one imports the result.
        offset: positions before it, whose ids nobody kept.
        documents: prompts that stand behind this one in one packed sequence, each with positions from 0.
    """

    tokens: np.ndarray
    dead: np.ndarray
    answer: np.ndarray
    imported: int = 0
    arrival: int = 0
    handed_over: bool = False
    offset: int = 0
    documents: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, eq=False)
class Workload:
    """Hold a run: an engine, prompts in order of arrival, and what changes from step to step (each cycled).

    Attributes:
        engine: how the engine runs.
        prompts: in order of arrival.
        budgets: token budgets; empty: the engine's own.
        accepts: how many leading drafts of each request's next verify are right.
        rows: no prompt is added any more once so many rows were scheduled; None: all are added.
        actions: what befalls the engines, step by step; cycled while `rows` are still to come, else gone through once.
    """

    engine: EngineConfig
    prompts: Iterable[Prompt]
    budgets: Sequence[int] = ()
    accepts: Sequence[int] = (0,)
    rows: int | None = None
    actions: Sequence[Action] = ()


@dataclass
class Session:
    """Drive one engine with a scripted model.

    Attributes:
        config: how the engine runs.
        vocabulary: V; a wrong draft is another id below it.
        right: how many leading drafts the next proposals get right.
    """

    config: EngineConfig
    vocabulary: int
    right: int = 0
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.config, self._propose)
        self._rng = Rng(self.config.seed + 1)
        self.dice = Rng(self.config.seed + 3)
        self._scripts: dict[int, np.ndarray] = {}

    @property
    def alive(self) -> int:
        """Requests that wait or run."""
        return len(self._scripts)

    def add(self, prompt: Prompt) -> int:
        """Queue a prompt; give its request id."""
        if prompt.documents:
            documents = (prompt.tokens, *prompt.documents)
            added = self.engine.add_packed(documents, max_new_tokens=len(prompt.answer))
            for request, tokens in zip(added, documents, strict=True):
                self._scripts[request] = np.concatenate([tokens, prompt.answer])
            return added[0]
        request = self.engine.add(
            prompt.tokens,
            dead=prompt.dead,
            max_new_tokens=len(prompt.answer),
            imported=prompt.imported,
            offset=prompt.offset,
        )
        return self._remember(request, np.concatenate([prompt.tokens, prompt.answer]))

    def take_over(self, export: Export, answer: np.ndarray) -> int:
        """Import what another engine exported; `answer` is what is still to be said."""
        return self._remember(self.engine.import_(export), np.concatenate([export.tokens, answer]))

    def hand_over(self, request: int) -> tuple[Export, np.ndarray]:
        """Export a request; give it with what its model has yet to say."""
        export = self.engine.export(request)
        self.engine.forget(request)
        return export, self._scripts.pop(request)[len(export.tokens) :]

    def script(self, request: int) -> np.ndarray:
        """Give the whole stream that a live request is going to have."""
        return self._scripts[request]

    def abort(self, request: int) -> None:
        """End a request at once."""
        self.engine.abort(request)
        self._drop(request)

    def fork(self, request: int) -> int:
        """Fork a decoding request; the fork's newest token and all its later ones are its own."""
        length, script = len(self.engine.stream(request)), self._other_words(request)
        return self._remember(self.engine.fork(request, int(script[length - 1])), script)

    def reorder(self, beam: int, parent: int) -> int:
        """Let a beam go on from another one's history; give its follower."""
        length, script = len(self.engine.stream(parent)), self._other_words(parent)
        follower = self.engine.reorder({beam: parent}, {beam: int(script[length - 1])})[beam]
        self._drop(beam)
        return self._remember(follower, script)

    def sleep(self) -> None:
        """Lose the KV cache, with or without a copy of what stood in it, and wake with another one."""
        self.engine.sleep(reload=self.dice.chance(1, 2))
        self.engine.wake(self.config.num_blocks + self.dice.below(3))

    def step(self, budget: int | None = None, right: int = 0) -> Step | None:
        """Plan the next step, in which the first `right` drafts of every request are right."""
        self.right = right
        return self.engine.step(budget)

    def answer(self, step: Step) -> list[int]:
        """Let the model answer a step; give the requests that ended with it."""
        sampled = {}
        for piece in step.pieces:
            if piece.num_sampled and piece.request_id in self._scripts:
                first = piece.end - piece.num_drafts
                sampled[piece.request_id] = self._words(piece.request_id, first, piece.num_sampled).tolist()
        self.engine.update(sampled)
        running = set(self.engine.running)
        ended = [request for request in sampled if request not in running]
        for request in ended:
            self._drop(request)
        return ended

    def _remember(self, request: int, script: np.ndarray) -> int:
        self._scripts[request] = script
        return request

    def _drop(self, request: int) -> None:
        self.engine.forget(request)
        del self._scripts[request]

    def _other_words(self, request: int) -> np.ndarray:
        script, length = self._scripts[request].copy(), len(self.engine.stream(request))
        script[: length - 1] = self.engine.stream(request)[: length - 1]
        script[length - 1 :] = (script[length - 1 :] + 1 + self.dice.below(7)) % self.vocabulary
        return script

    def _words(self, request: int, first: int, count: int) -> np.ndarray:
        script = self._scripts[request]
        return script[np.minimum(np.arange(first, first + count), len(script) - 1)]  # past the end nothing counts

    def _propose(self, request: int, stream: np.ndarray) -> list[int]:
        most = self.config.num_drafts
        count = most if self._rng.chance(3, 4) else self._rng.below(most + 1)
        drafts = self._words(request, len(stream), count)
        for index in range(min(self.right, len(drafts)), len(drafts)):
            drafts[index] = (drafts[index] + 1 + self._rng.below(self.vocabulary - 1)) % self.vocabulary
        return drafts.tolist()


def run(workload: Workload, vocabulary: int) -> Iterator[tuple[Session, Step]]:
    """Yield every forward call of a workload with the session whose engine made it; the model answers behind its step.

    Prompts that are handed over run on a second engine first, of the same configuration but for its seed.
    """
    config = workload.engine
    main = Session(config, vocabulary)
    prefill = Session(replace(config, seed=config.seed + 2), vocabulary)
    plans = {id(one): zip(cycle(workload.budgets or [None]), cycle(workload.accepts)) for one in (prefill, main)}
    actions = {id(one): iter(workload.actions) for one in (prefill, main)}
    prompts = iter(workload.prompts)
    waiting = next(prompts, None)
    clock = rows = 0
    while waiting or main.alive or prefill.alive:
        while waiting and waiting.arrival <= clock and main.alive + prefill.alive < 2 * config.max_requests:
            (prefill if waiting.handed_over else main).add(waiting)
            waiting = next(prompts, None) if workload.rows is None or rows < workload.rows else None
        for session in (prefill, main):
            if not session.alive:
                continue
            budget, right = next(plans[id(session)])
            action = next(actions[id(session)], None)
            if action is None:
                action = Action.NOTHING
                if workload.rows is not None and rows < workload.rows:
                    actions[id(session)] = iter(workload.actions)
            before_step(session, action)
            step = session.step(budget, right)
            if step is None:
                continue
            for part in parts_of(session, action, step):
                yield session, part
                rows += part.num_tokens
            in_flight(session, action, step)
            session.answer(step)
            if session is prefill:
                decoding = set(prefill.engine.decoding)
                for piece in step.pieces:
                    if piece.request_id in decoding:
                        main.take_over(*prefill.hand_over(piece.request_id))
        clock += 1
