"""The serving engine: how many tokens a second does it plan and lay out, in prompts and in decodes?"""

from __future__ import annotations

import numpy as np

from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.results import Label
from serving.engine import Engine, EngineConfig
from serving.policy import Policy

BUDGETS = (512, 2048, 8192)  # tokens a step, nearly all of prompts
REQUESTS = (16, 64, 256)  # of one new token each
_PROMPT, _ANSWER, _BLOCK_SIZE = 2048, 4, 64
_DECODE_PROMPT, _DECODE_ANSWER = 16, 1024
_VOCABULARY = 129280


def ask(bench: Bench) -> None:
    """Time runs of prompts under growing budgets, then single steps of growing batches."""
    for budget in bench.sizes(BUDGETS):
        _measure(bench, "prefill", "T", budget, *prefill_contest(budget))
    for requests in bench.sizes(REQUESTS):
        _measure(bench, "decode", "R", requests, decode_contest(requests), requests)


def prefill_contest(budget: int) -> tuple[Contest, int]:
    """Serve prompts for four steps' worth of tokens, each with a few decodes; also give the tokens of a run."""
    count = max(4 * budget // _PROMPT, 1)
    rng = np.random.default_rng(budget)
    prompts = [rng.integers(0, _VOCABULARY, _PROMPT) for _ in range(count)]

    def run(number: int) -> tuple:
        engine = _engine(budget, max(count, 1), _PROMPT + _ANSWER, count)
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=_ANSWER)
        while not engine.finished:
            advance(engine)
        return ()

    return Contest(run, None, 1), count * (_PROMPT + _ANSWER - 1)


def decode_contest(requests: int) -> Contest:
    """Take one step of a batch that only decodes; it begins anew when its answers end."""
    engines: list[Engine] = []

    def begin() -> None:
        engine = _engine(requests * _DECODE_PROMPT, requests, _DECODE_PROMPT + _DECODE_ANSWER, requests)
        rng = np.random.default_rng(requests)
        for _ in range(requests):
            engine.add(rng.integers(0, _VOCABULARY, _DECODE_PROMPT), max_new_tokens=_DECODE_ANSWER)
        while len(engine.decoding) < requests:
            advance(engine)
        engines[:] = [engine]

    def refresh() -> None:
        if not engines or len(engines[0].stream(0)) > _DECODE_PROMPT + _DECODE_ANSWER // 2:
            begin()

    def run(number: int) -> tuple:
        advance(engines[0])
        return ()

    return Contest(run, None, 1, refresh=refresh)


def advance(engine: Engine) -> int:
    """Take one step and answer it with any token; give its tokens."""
    step = engine.step()
    assert step is not None
    sampled = {piece.request_id: [step.index % _VOCABULARY] for piece in step.pieces if piece.num_sampled}
    engine.update(sampled)
    return step.num_tokens


def _engine(budget: int, requests: int, length: int, count: int) -> Engine:
    return Engine(
        EngineConfig(
            policy=Policy.KNOWN_IDS,
            block_size=_BLOCK_SIZE,
            num_blocks=count * -(-length // _BLOCK_SIZE),
            token_budget=budget,
            max_requests=requests,
        )
    )


def _measure(bench: Bench, series: str, axis: str, size: int, contest: Contest, tokens: int) -> None:
    label = Label(
        question="engine", name=f"{series} {size}", series=series, axis=axis, size=size, amount=tokens, unit="tokens"
    )
    bench.contest(label, contest, ("wall",), rounds=min(7, bench.rounds))
