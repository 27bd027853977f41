"""The token budget and the pool are shared out as promised."""

from hypothesis import given
from hypothesis import strategies as st

from serving.engine import Engine, EngineConfig
from serving.runner import Policy
from tests.serving.world import Add, World, answers, commands, next_token, propose_with


@given(commands(), st.integers(1, 60), st.integers(1, 6), st.integers(0, 4))
def test_budget_goes_to_decodes_then_prompts_then_waiting(program: list, budget: int, most: int, k: int) -> None:
    """Each step is the greedy plan: decodes in order of admission with what drafts fit, then begun prompts, then
    waiting requests in order of arrival while fewer than max_requests run.
    """
    config = EngineConfig(Policy.KNOWN_IDS, 4, 4000, budget, most, num_drafts=k, share_prefixes=False, seed=2)
    world, running = World(config), []
    waiting: list[int] = []
    for command in program:
        if isinstance(command, Add):
            world.do(command)
            waiting.append(len(world.witness.books) - 1)
    while not world.engine.finished:
        plan, left = [], budget
        running = [i for i in running if i in world.witness.live]
        decodes = [i for i in running if i in world.witness.decoding]
        for i in decodes + [i for i in running if i not in decodes]:
            book = world.witness.books[i]
            wanted = book.prompt - book.computed
            if i in decodes:
                wanted = 1 + len(propose_with(k)(i, [token for token, _ in book.stream]))
            plan.append((i, min(wanted, left)))
            left -= plan[-1][1]
        while left and waiting and len(running) < most:
            running.append(waiting.pop(0))
            book = world.witness.books[running[-1]]
            plan.append((running[-1], min(book.prompt - book.imported, left)))
            left -= plan[-1][1]
        world.advance()
        got = {(piece.request_id, len(piece.tokens)) for piece in world.steps[-1].pieces}
        assert got == {(i, count) for i, count in plan if count}


def test_admission_keeps_room_for_those_that_run() -> None:
    """With 6 blocks of 4, a request that may grow to 5 blocks lets only a one-block request in beside it."""
    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 4, 6, 100, 4, share_prefixes=False, seed=0))
    engine.add([1] * 4, max_new_tokens=16)
    engine.add([2] * 4, max_new_tokens=4)  # two blocks: waits, though five are free now
    engine.add([3] * 2, max_new_tokens=2)  # would fit, but waits its turn
    assert [piece.request_id for piece in engine.step().pieces] == [0]


def test_shared_blocks_count_once() -> None:
    """A request whose prefix stands in blocks that a running one holds needs only the rest of the pool."""
    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 4, 6, 100, 4, seed=0))
    engine.add([1] * 16, max_new_tokens=4)  # 5 blocks of 6
    engine.add([1] * 15, max_new_tokens=1)  # 4 blocks, 3 of them shared
    assert {piece.request_id: piece.start for piece in engine.step().pieces} == {0: 0, 1: 12}


def test_failing_draft_model_leaves_the_engine_as_it_was() -> None:
    """After an error in propose the same step can be made again, and the run goes on as if nothing had been."""
    broken = [True]

    def propose(request_id: int, stream) -> list[int]:
        if broken[0] and request_id == 1:
            raise OSError("draft model is away")
        return [next_token(stream)]

    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 1, 60, 100, 4, num_drafts=1, seed=0), propose)
    for start in (1, 2):
        engine.add([start] * 4, max_new_tokens=5)
    engine.update(answers(engine.step()))
    before = engine._pool.free_blocks, vars(engine.counters).copy()
    for _ in range(2):
        try:
            engine.step()
        except OSError:
            assert (engine._pool.free_blocks, vars(engine.counters)) == before
    broken[0] = False
    while (step := engine.step()) is not None:
        engine.update(answers(step))
    assert engine.counters.finished == 2
    for i in range(2):
        stream = engine.stream(i).tolist()
        assert all(stream[end] == next_token(stream[:end]) for end in range(4, 9))
