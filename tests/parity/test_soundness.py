"""What each window policy bears, found by search; docs/soundness.md tells the same in words."""

import pytest

from parity.soundness import KNOWN, LAGGING, PROMPT, SLOTS, Question, Schedule, questions, search, wrong_rows
from serving.config import EngineConfig
from serving.engine import Engine
from serving.policy import Policy

# The smallest schedule that gives a wrong row: length of the first prompt, what happens, how many were tried.
FOUND = {
    ("KV comes back after a preemption", PROMPT): (1, "step, step, reload, step", 23),
    ("KV comes back before the host knows its tokens", LAGGING): (1, "step, accept, reload, step", 89),
    ("generated blocks come back from the host", PROMPT): (1, "step, step, sleep, step", 23),
    ("an imported block is shared", SLOTS): (2, "again, step", 7),
    ("a fork's last block is copied without its slots", SLOTS): (1, "step, fork, step", 11),
    ("a fork's last block is copied without its slots", PROMPT): (1, "step, step, fork, step", 23),
    ("a fork's last block is copied without its slots", LAGGING): (1, "step, step, fork, step", 23),
    ("a hit runs in the microbatch before the one that fills its block", SLOTS): (1, "again, again, split", 42),
    ("a block inside the lookback is given up", SLOTS): (2, "step, step", 11),
    ("a block inside the lookback is given up", PROMPT): (1, "step, accept, step", 21),
}
NONE = {
    ("KV comes back after a preemption", KNOWN): 255,
    ("KV comes back after a preemption", SLOTS): 120,
    ("generated blocks come back from the host", KNOWN): 93,
    ("an imported block is shared", KNOWN): 45,
    ("a fork's last block is copied without its slots", KNOWN): 93,
    ("a hit runs behind the piece that fills its block", SLOTS): 240,
    ("a block inside the lookback is given up", KNOWN): 186,
    ("a block just behind the lookback is given up", SLOTS): 186,
    ("a block just behind the lookback is given up", PROMPT): 186,
    ("a rejected draft's slot is read", SLOTS): 680,
    ("a rejected draft's slot is read", PROMPT): 160,
}
ASKED = {(question.name, question.policy): question for question in questions(2)}  # the toy looks back two tokens


def test_every_question_has_an_answer() -> None:
    """What is asked is what is answered here."""
    assert ASKED.keys() == FOUND.keys() | NONE.keys()


@pytest.mark.parametrize("asked", FOUND, ids=" ".join)
def test_smallest_schedule_that_a_policy_cannot_bear(asked: tuple[str, Policy], worlds) -> None:
    """A correct hash state gives a wrong row in this schedule and in none before it."""
    prompt, happenings, tried = FOUND[asked]
    assert search(worlds["toy"], ASKED[asked]) == (Schedule(prompt, tuple(happenings.split(", "))), tried)


@pytest.mark.parametrize("asked", NONE, ids=" ".join)
def test_no_schedule_is_wrong_that_a_policy_bears(asked: tuple[str, Policy], worlds) -> None:
    """All schedules of the same space give right rows."""
    assert search(worlds["toy"], ASKED[asked]) == (None, NONE[asked])


def test_the_hole_of_prompt_only_windows(worlds) -> None:
    """One prompt token, one generated token that is computed, a reload: the next row looks back to a slot that nobody
    wrote. At production constants too; windows that hold every known id, and slots alone, bear it.
    """
    schedule = Schedule(1, ("step", "step", "reload", "step"))
    for world in (worlds["toy"], worlds["another_pad"]):
        wrong = {policy: wrong_rows(world, Question("", policy, ()), schedule) for policy in Policy}
        assert wrong.pop(PROMPT) == [(0, 2)]
        assert not any(wrong.values())


def test_what_a_policy_cannot_bear_is_refused() -> None:
    """Prompt-only windows with a reload of generated tokens, and a sliding window below the lookback, are errors."""
    engine = Engine(EngineConfig(PROMPT, 1, 20, 8, 2, seed=1))
    engine.add([1], max_new_tokens=5)
    for token in (2, 3):
        engine.step()
        engine.update({0: [token]})
    assert not engine.may_reload(0)
    with pytest.raises(RuntimeError, match="request 0: got a reload of generated KV, expected windows that cover it"):
        engine.preempt(0, reload=True)
    engine.preempt(0, reload=False)
    with pytest.raises(ValueError, match="sliding_window: got 3, expected at least 4"):
        EngineConfig(SLOTS, 1, 20, 8, 2, sliding_window=3)
