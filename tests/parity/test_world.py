"""Laws of the worlds: a ring of tokens alike, pads that differ from their ids, constants that belong to the config."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.runs import with_another_pad
from parity.world import World, flash, toy

NAMES = ["flash", "another_pad", "toy"]


def ring_of(token_map: list[int]) -> list[int]:
    """Give the ring of tokens alike of a map."""
    return World("any", flash().config, np.array(token_map, dtype=np.int32), ()).alike.tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_tokens_alike_form_one_ring_a_class(token_map: list[int]) -> None:
    """From any token on, the ring passes every token of its class, no other, and comes back."""
    ring = ring_of(token_map)
    for token, kind in enumerate(token_map):
        passed, at = [token], ring[token]
        while at != token:
            passed.append(at)
            assert len(passed) <= len(token_map)
            at = ring[at]
        assert sorted(passed) == [other for other, its in enumerate(token_map) if its == kind]


def test_only_a_token_without_another_stays_itself() -> None:
    """By hand: 0 and 3 are alike, so are 1, 2 and 5; 4 is alone."""
    assert ring_of([7, 5, 5, 7, 9, 5]) == [3, 2, 5, 0, 4, 1]


@pytest.mark.parametrize("name", NAMES)
def test_the_ring_of_a_world_is_a_permutation_within_classes(name: str, worlds: dict[str, World]) -> None:
    """A disguise changes tokens and no compressed id, on the real map too."""
    world = worlds[name]
    assert np.array_equal(np.sort(world.alike), np.arange(world.vocabulary))
    assert np.array_equal(world.token_map[world.alike], world.token_map)
    classes = np.bincount(world.token_map)
    assert np.array_equal(world.alike == np.arange(world.vocabulary), classes[world.token_map] == 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_world_hashes_by_its_own_oracle(name: str, worlds: dict[str, World]) -> None:
    """Whole requests by NumPy and rows in plain integers agree, with the world's own pad."""
    world = worlds[name]
    tokens, dead = np.array([world.vocabulary - 1, 0, 65, 97, 65]), np.array([False, False, True, False, False])
    rows = world.alone(tokens, dead)
    assert rows.tolist() == [world.oracle.row(tokens.tolist(), dead.tolist(), at) for at in range(5)]


def test_the_other_pad_compresses_to_another_id(worlds: dict[str, World]) -> None:
    """The published pad is 2 under both names, which hides a mistake; the other one is not."""
    assert worlds["flash"].pad_id == worlds["flash"].config.engram_pad_token_id == 2
    for world in (worlds["another_pad"], toy()):
        assert world.pad_id != world.config.engram_pad_token_id
        assert world.pad_id != 0, "a pad of zero would go unseen as well"
    with pytest.raises(ValueError, match=r"^token_map: got a map that leaves every id as it is"):
        with_another_pad(World("identity", flash().config, np.arange(8, dtype=np.int32), ()))


@pytest.mark.parametrize("name", NAMES)
def test_image_tokens_are_tokens(name: str, worlds: dict[str, World]) -> None:
    """Two ids at the top of the vocabulary, inside the map."""
    world = worlds[name]
    assert all(0 <= token < world.vocabulary for token in world.image_tokens)
    assert len(set(world.image_tokens)) == 2
