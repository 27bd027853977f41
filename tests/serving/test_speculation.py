"""Greedy verification and what a draft model may say."""

import itertools

import numpy as np
import pytest

from serving.speculation import Drafter, check_sampled, count_accepted


def test_accepted_is_the_longest_agreeing_prefix() -> None:
    """For all drafts and samples over two ids up to k = 4, a is the largest count whose drafts the model repeats."""
    for k in range(5):
        for drafts in itertools.product([0, 1], repeat=k):
            for sampled in itertools.product([0, 1], repeat=k + 1):
                longest = max(a for a in range(k + 1) if drafts[:a] == sampled[:a])
                assert count_accepted(drafts, sampled) == longest


def test_drafts_are_cut_to_the_room() -> None:
    """The budget may cut drafts, down to none; without room the draft model is not asked."""
    asked = []
    drafter = Drafter(lambda i, s: asked.append(i) or [4, 5, 6], 3, 99)
    assert [None if (d := drafter.draft(0, np.zeros(1), room)) is None else d.tolist() for room in (0, 1, 2, 9)] == [
        None,
        [4],
        [4, 5],
        [4, 5, 6],
    ]
    assert len(asked) == 3
    assert Drafter(lambda i, s: [], 3, 99).draft(0, np.zeros(1), 9) is None
    assert Drafter(None, 0, 99).draft(0, np.zeros(1), 9) is None


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        ([1, 2, 3], ValueError, "drafts: got 3 of request 5, expected at most 2"),
        ([-1], ValueError, "drafts: got ids -1 to -1, expected 0 to 99"),
        ([100], ValueError, "expected 0 to 99"),
        ([0.5], TypeError, "drafts: got dtype float64, expected integers"),
        ([[1]], ValueError, "drafts: got shape"),
    ],
)
def test_bad_drafts_are_refused(drafts: list, error: type, message: str) -> None:
    """Too many, out of range or no ids at all: an error, not a cut."""
    with pytest.raises(error, match=message):
        Drafter(lambda i, s: drafts, 2, 99).draft(5, np.zeros(1), 9)


def test_drafts_need_a_draft_model() -> None:
    """num_drafts without propose is refused."""
    with pytest.raises(ValueError, match="propose: got None with num_drafts 2"):
        Drafter(None, 2, 99)


def test_sampled_has_one_more_than_drafts() -> None:
    """Any other number of ids is refused by name."""
    assert check_sampled({3: 2, 4: 0}, {3: [1, 2], 9: [7]}, 99) == [[1, 2], []]
    assert check_sampled({3: 0}, {3: []}, 99) == [[]]
    with pytest.raises(ValueError, match=r"sampled\[3\]: got 1 ids, expected 2"):
        check_sampled({3: 2}, {3: [1]}, 99)
    with pytest.raises(ValueError, match=r"sampled\[3\]: got ids 1 to 100, expected 0 to 99"):
        check_sampled({3: 2}, {3: [1, 100]}, 99)
