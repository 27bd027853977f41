"""The strategies reach the edges that ports go wrong at."""

from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from parity.actions import Action
from parity.strategies import Shape, workloads
from parity.workload import run
from parity.world import World
from serving.step import EVENTS


def test_workloads_reach_every_edge(worlds: dict[str, World]) -> None:
    """Some hundred cases contain every event, and chunks of 1, N-2, N-1, a block and its neighbours, and 1 + k."""
    world = worlds["flash"]
    depth = world.config.lookback
    seen: Counter[str] = Counter()
    top = world.vocabulary - 1

    @settings(
        max_examples=900,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.one_of(
            workloads(world, Shape()), workloads(world, Shape(prompts=(2, 5), features=True, actions=tuple(Action)))
        )
    )
    def look(workload: object) -> None:
        engine = workload.engine
        lengths = {
            "1": 1,
            "N-2": depth - 1,
            "N-1": depth,
            "block-1": engine.block_size - 1,
            "block": engine.block_size,
            "block+1": engine.block_size + 1,
        }
        for _, step in run(workload, world.vocabulary):
            seen.update(step.events)
            for piece in step.pieces:
                seen.update(piece.events)
                if "chunk" in piece.events:
                    seen.update(f"chunk of {name}" for name, length in lengths.items() if len(piece.tokens) == length)
                if piece.num_drafts and len(piece.tokens) == 1 + engine.num_drafts:
                    seen["1+k"] += 1
                if (piece.tokens == top).any():
                    seen["top of the vocabulary"] += 1

    look()
    wanted = [*EVENTS, *(f"chunk of {name}" for name in ("1", "N-2", "N-1", "block-1", "block", "block+1"))]
    missing = [name for name in (*wanted, "1+k", "top of the vocabulary") if not seen[name]]
    assert not missing, f"never reached: {missing}; reached: {dict(seen)}"
