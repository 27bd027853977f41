"""What blocks and their keys remember beside their content: an aborted owner, a missing slot, a copy on the host."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.block_pool import NULL_BLOCK, BlockPool
from serving.prefix_cache import HostStore, PrefixCache, chain_key


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 4))
def test_the_host_forgets_what_was_stored_longest_ago(saves: list[int], capacity: int) -> None:
    """As many keys as there is room for, the last ones saved; a key that is saved again counts as new."""
    store, last = HostStore(capacity), OrderedDict()
    for number in saves:
        key = bytes([number])
        store.save(key)
        last.pop(key, None)
        last[key] = None
        kept = list(last)[-capacity:] if capacity else []
        assert len(store) == len(kept)
        assert [key in store for key in last] == [key in kept for key in last]


def test_only_a_block_whose_last_holder_was_aborted_comes_from_an_abort() -> None:
    """The others, fresh ones and those of requests that finished, do not; and once handed out, it is forgotten."""
    pool = BlockPool([2, 1, 0])
    assert not any(pool.from_aborted(block) for block in range(3))
    fresh, shared, plain = (pool.take() for _ in range(3))
    assert not any(pool.from_aborted(block) for block in range(3))
    pool.share(shared)
    pool.release(shared, aborted=True)
    pool.release(shared)
    pool.release(fresh, aborted=True)
    pool.release(plain)
    assert [pool.take() for _ in range(3)] == [shared, fresh, plain]
    assert [pool.from_aborted(block) for block in (shared, fresh, plain)] == [False, True, False]
    pool.release(fresh)
    assert pool.take() == fresh
    assert not pool.from_aborted(fresh)


def test_the_null_block_is_block_0_and_is_never_handed_out() -> None:
    """A table may name it for a block that was given up: the first of the KV cache, as engines have it."""
    assert NULL_BLOCK == 0
    pool = BlockPool([3, 0, 1, 2], null_block=True)
    assert pool.num_usable == 3
    assert [pool.take() for _ in range(3)] == [3, 1, 2]
    assert pool.num_free == 0


def test_a_block_without_slots_is_remembered_as_such() -> None:
    """Published so, and not otherwise; its step and its key are those that it was published with."""
    cache = PrefixCache()
    cache.publish(b"a", 5, 3)
    cache.publish(b"b", 6, 0, slotless=True)
    assert [cache.slotless(block) for block in (5, 6)] == [False, True]
    assert [cache.filled_in(block) for block in (5, 6)] == [3, 0]
    assert cache.keys == [b"a", b"b"]
    assert cache.drop(5) == b"a"
    assert cache.drop(5) is None
    assert cache.keys == [b"b"]


def test_options_are_named() -> None:
    """Two numbers and a bare True would not say what is true."""
    for call in (
        lambda: BlockPool([0], True),
        lambda: BlockPool([0]).release(0, True),
        lambda: PrefixCache().publish(b"", 0, 0, True),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


def test_a_key_is_16_bytes_for_ever() -> None:
    """Stored prefixes are found by later runs: the key of a block is pinned."""
    tokens, dead = np.arange(4, dtype=np.int64), np.zeros(4, bool)
    first = chain_key(b"", tokens, dead)
    assert first.hex() == "fb6318911a6ef6718ecdd11f2b4ce4de"
    assert chain_key(first, tokens, dead).hex() == "5786d0dbf0fa4f28879d4f47b79dec70"
