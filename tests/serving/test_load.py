"""Many requests for a long time: nothing piles up, and the engine is fast enough to feed a GPU."""

import resource
import time

import pytest
from hypothesis import settings

from serving.engine import Engine, EngineConfig
from serving.rng import Rng
from serving.runner import Policy

ALIVE = 1000


def test_a_long_run_leaks_nothing() -> None:
    """A thousand requests at a time for ten thousand steps (a hundred thousand in the nightly job), aborted, preempted
    and forked: what the engine keeps is bounded by what is alive, and its memory stays flat.
    """
    steps = 100_000 if settings().max_examples >= 1000 else 10_000
    config = EngineConfig(
        Policy.LAGGING, 4, 9000, 3000, ALIVE, offload_blocks=500, overcommit=True, sliding_window=32, seed=3
    )
    engine, rng, alive = Engine(config), Rng(5), set()
    half = 0
    for number in range(steps):
        while len(alive) < ALIVE:
            alive.add(engine.add([rng.below(9) for _ in range(1 + rng.below(12))], max_new_tokens=1 + rng.below(8)))
        _disturb(engine, rng, alive)
        step = engine.step(3000 if number % 100 == 0 else 10)
        engine.update({piece.request_id: [rng.below(9)] for piece in step.pieces if piece.num_sampled})
        running = set(engine.running)
        for piece in step.pieces:
            if piece.num_sampled and piece.request_id not in running:
                engine.forget(piece.request_id)
                alive.discard(piece.request_id)
        if number == steps // 2:
            half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - half < 20 * 1024  # in KiB
    assert engine.counters.finished > steps // 4
    assert min(engine.counters.preemptions, engine.counters.aborts, engine.counters.forks) > steps // 100
    for kept in (engine._requests, engine._runner._mirrors):
        assert len(kept) == len(alive)
    assert engine._next_handle <= ALIVE + 1
    assert sum(map(len, engine._runner._late)) <= ALIVE
    assert len(engine._placement._store) <= 500
    assert len(engine._placement._cache) <= 9000
    for request_id in list(alive):
        engine.abort(request_id)
    assert engine.finished
    assert engine._pool.num_free == engine._pool.num_usable


def _disturb(engine: Engine, rng: Rng, alive: set[int]) -> None:
    what = rng.below(40)
    if what == 0 and engine.running:
        engine.preempt(rng.pick(engine.running), reload=rng.chance(1, 2))
    elif what == 1 and engine.running:
        gone = rng.pick(engine.running)
        engine.abort(gone)
        engine.forget(gone)
        alive.discard(gone)
    elif what == 2 and engine.decoding and len(engine.running) < ALIVE and engine.can_fork(engine.decoding[0]):
        alive.add(engine.fork(engine.decoding[0]))


@pytest.mark.parametrize(("kind", "least"), [("prefill", 300_000), ("decode", 20_000)])
def test_the_engine_is_fast_enough(kind: str, least: int) -> None:
    """Scheduled tokens a second of one core, without hashing: large prefill batches, and 256 requests that decode."""
    best = 0.0
    for _ in range(3):
        engine = Engine(EngineConfig(Policy.LAGGING, 16, 16384, 16384, 256, seed=1))
        requests, length, new = (60, 4000, 1) if kind == "prefill" else (256, 16, 40)
        rng = Rng(2)
        for _ in range(requests):
            engine.add([rng.below(1000) for _ in range(length)], max_new_tokens=new)
        begun = time.process_time()
        while (step := engine.step()) is not None:
            engine.update({piece.request_id: [5] for piece in step.pieces if piece.num_sampled})
        best = max(best, engine.counters.tokens / (time.process_time() - begun))
    assert best > least, f"{best:,.0f} tokens a second"
