"""A prefix is found by content, whole blocks, and nothing else."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import Engine, EngineConfig
from serving.prefix_cache import PrefixCache, chain_key
from serving.runner import Policy
from tests.serving.world import World, commands


def test_equal_keys_mean_equal_content() -> None:
    """Over all streams of two blocks of two (token, dead) pairs, the chained key tells any two prefixes apart."""
    pairs = list(itertools.product([0, 1, 256], [False, True]))
    keys: dict[bytes, tuple] = {}
    for stream in itertools.product(pairs, repeat=4):
        key = b""
        for block in (stream[:2], stream[2:]):
            tokens, dead = (np.array(column) for column in zip(*block, strict=True))
            key = chain_key(key, tokens, dead)
        assert keys.setdefault(key, stream) == stream
    assert len(keys) == len(pairs) ** 4


def test_first_block_keeps_a_key() -> None:
    """A second copy is not entered; dropping the first makes room for a later one."""
    cache = PrefixCache()
    cache.publish(b"a", 3, step=7)
    cache.publish(b"a", 4, step=8)
    assert (cache.find(b"a"), cache.filled_in(3), len(cache)) == (3, 7, 1)
    assert not cache.drop(4)
    assert cache.drop(3)
    assert cache.find(b"a") is None
    cache.publish(b"a", 4, step=9)
    assert (cache.find(b"a"), cache.find(b"b")) == (4, None)


def test_a_block_holds_one_content() -> None:
    """Publishing a block that still has an entry is a bug, and says so."""
    cache = PrefixCache()
    cache.publish(b"a", 3, step=0)
    with pytest.raises(RuntimeError, match="block 3: got a second entry"):
        cache.publish(b"b", 3, step=0)


@given(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 3), commands())
def test_hit_is_the_longest_there_is(size: int, drafts: int, program: list) -> None:
    """Where nothing is evicted, a request starts behind the longest run of full blocks that any request had scheduled
    with true tokens before it, less the block of its last prompt token; same-step ones count.
    """
    config = EngineConfig(Policy.KNOWN_IDS, size, 3000, 64, 6, num_drafts=drafts, seed=1)
    world, scheduled = World(config), set()
    done = 0

    def enter(request_id: int, end: int) -> None:
        content = world.witness.books[request_id].stream
        scheduled.update(tuple(content[:cut]) for cut in range(size, end + 1, size))

    def first(piece) -> bool:
        return piece.start == world.witness.books[piece.request_id].entry

    for command in program:
        world.do(command)
    world.drain()
    assert world.engine.counters.evictions == 0
    computed: dict[int, int] = {}
    for step in world.steps:
        for request_id, end in computed.items():
            enter(request_id, end)
        for piece in sorted(step.pieces, key=lambda piece: (first(piece), piece.request_id)):
            book = world.witness.books[piece.request_id]
            if first(piece) and not book.imported:
                cuts = [cut for cut in range(size, book.prompt, size) if tuple(book.stream[:cut]) in scheduled]
                assert piece.start == max(cuts, default=0)
            enter(piece.request_id, piece.end - piece.num_drafts)
            done += 1
        for piece in step.pieces:
            book = world.witness.books[piece.request_id]
            later = [
                p.start for s in world.steps[step.index + 1 :] for p in s.pieces if p.request_id == piece.request_id
            ]
            computed[piece.request_id] = later[0] if later else len(world.engine.stream(piece.request_id)) - 1
    assert done == world.engine.counters.pieces


@pytest.mark.parametrize(("policy", "start"), [(Policy.SLOTS_ONLY, 0), (Policy.KNOWN_IDS, 16), (Policy.STATELESS, 16)])
def test_blocks_from_elsewhere_are_shared_where_windows_cover_them(policy: Policy, start: int) -> None:
    """An imported block may be hit, unless the policy reads the slots that nobody wrote."""
    engine = Engine(EngineConfig(policy, 4, 40, 100, 4, seed=1))
    prompt = list(range(20))
    engine.add(prompt, max_new_tokens=2, imported=18)
    engine.add(prompt, max_new_tokens=2)
    pieces = {piece.request_id: piece for piece in engine.step().pieces}
    assert pieces[1].start == start
    assert "same-step hit" not in pieces[1].events


def test_dead_flags_are_content() -> None:
    """The same ids alive do not hit a masked span."""
    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 4, 40, 100, 4, seed=1))
    dead = [False] * 5 + [True] * 2 + [False] * 5
    for flags in (dead, None, dead):
        engine.add([7] * 12, dead=flags, max_new_tokens=1)
    assert {piece.request_id: piece.start for piece in engine.step().pieces} == {0: 0, 1: 4, 2: 8}


def test_rejected_draft_is_never_shared() -> None:
    """A block that a rejected draft filled cannot be hit by a prompt that happens to hold those ids."""
    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 4, 40, 100, 4, num_drafts=3, seed=1), lambda i, s: [8, 8, 8])
    engine.add([1, 2, 3, 4], max_new_tokens=9)
    engine.step()
    engine.update({0: [5]})
    engine.step()  # feeds 5 8 8 8: a whole block
    engine.add([1, 2, 3, 4, 5, 8, 8, 8, 9], max_new_tokens=1)
    engine.update({0: [6, 7, 7, 7]})
    assert {piece.request_id: piece.start for piece in engine.step().pieces} == {0: 5, 1: 4}


@pytest.mark.parametrize(("new", "starts"), [(9, {0: 8, 1: 8}), (5, {1: 8})])
def test_accepted_drafts_are_shared_after_update(new: int, starts: dict[int, int]) -> None:
    """A block that accepted drafts filled is hit from the next step on, also where its request ended with them."""
    engine = Engine(EngineConfig(Policy.KNOWN_IDS, 4, 40, 100, 4, num_drafts=3, seed=1), lambda i, s: [8, 8, 8])
    engine.add([1, 2, 3, 4], max_new_tokens=new)
    engine.step()
    engine.update({0: [5]})
    engine.step()
    engine.add([1, 2, 3, 4, 5, 8, 8, 8, 9], max_new_tokens=1)
    engine.update({0: [8, 8, 8, 9]})
    pieces = engine.step().pieces
    assert {piece.request_id: piece.start for piece in pieces} == starts
    assert not any("same-step hit" in piece.events for piece in pieces)
