"""One story, told under every policy, with the windows written out by hand."""

import pytest
import torch

from serving.engine import Engine, EngineConfig
from serving.runner import Policy
from serving.step import Step

# Prompt 10..15 (12 is dead), chunks of 4 and 2; then 20; a verify that accepts both drafts 21 22 and says 23; then 23.
STARTS = [0, 4, 6, 9]
EVERY = [[-1, -1, -1], [13, 12, 11], [15, 14, 13], [22, 21, 20]]
WINDOWS = {
    Policy.STATELESS: EVERY,
    Policy.KNOWN_IDS: EVERY,
    Policy.LAGGING: [*EVERY[:3], [-1, -1, 20]],
    Policy.PROMPT_ONLY: [*EVERY[:3], [-1, -1, -1]],
    Policy.SLOTS_ONLY: [[-1, -1, -1]] * 4,
}


def tell(policy: Policy) -> list[Step]:
    """Play the story."""
    config = EngineConfig(policy, 4, 8, 4, 2, num_drafts=2, seed=1)
    engine = Engine(config, lambda i, s: [21, 22] if len(s) == 7 else [])
    engine.add(range(10, 16), dead=[False, False, True, False, False, False], max_new_tokens=5)
    steps = []
    for sampled in ({}, {0: [20]}, {0: [21, 22, 23]}, {0: [24]}):
        steps.append(engine.step())
        engine.update(sampled)
    assert engine.finished
    assert engine.stream(0).tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24]
    return steps


@pytest.mark.parametrize("policy", Policy)
def test_window_holds_what_the_policy_knows(policy: Policy) -> None:
    """Newest first, -1 where the host does not know or no position is; a dead flag comes with a known id alone."""
    steps = tell(policy)
    assert [step.pieces[0].start for step in steps] == STARTS
    assert [step.lookback_token_ids[0].tolist() for step in steps] == WINDOWS[policy]
    for step in steps:
        assert step.lookback_dead_mask.tolist() == [[token == 12 for token in step.lookback_token_ids[0].tolist()]]


@pytest.mark.parametrize("policy", Policy)
def test_step_offers_the_eight_arguments(policy: Policy) -> None:
    """arguments() names the eight tensors; slots and table are there unless the way is stateless."""
    arguments = tell(policy)[2].arguments()
    assert list(arguments) == [
        "input_ids",
        "positions",
        "query_start_loc",
        "dead_mask",
        "lookback_token_ids",
        "lookback_dead_mask",
        "slot_mapping",
        "block_table",
    ]
    assert arguments["input_ids"].tolist() == [20, 21, 22]
    assert arguments["positions"].tolist() == [6, 7, 8]
    assert arguments["query_start_loc"].tolist() == [0, 3]
    absent = {name for name, tensor in arguments.items() if tensor is None}
    assert absent == (set() if policy.slot_cache else {"slot_mapping", "block_table"})
    dtypes = {name: tensor.dtype for name, tensor in arguments.items() if tensor is not None}
    expected = dict.fromkeys(dtypes, torch.int64)
    expected |= {"dead_mask": torch.bool, "lookback_dead_mask": torch.bool, "query_start_loc": torch.int32}
    assert dtypes == (expected | {"block_table": torch.int32} if policy.slot_cache else expected)


def test_lag_reaches_the_host_even_if_the_request_rests() -> None:
    """What an update appended is known one update later, also for a request that was not in the step between."""
    engine = Engine(EngineConfig(Policy.LAGGING, 4, 20, 8, 2, num_drafts=2, seed=1), lambda i, s: [7, 7])
    for prompt in ([1], [2]):
        engine.add(prompt, max_new_tokens=8)
    engine.step()
    engine.update({0: [3], 1: [3]})
    engine.step()
    engine.update({0: [9, 9, 9], 1: [7, 7, 5]})  # request 1 is at 2 3 7 7 5
    step = engine.step(token_budget=1)
    assert [piece.request_id for piece in step.pieces] == [0]
    engine.update({0: [9]})
    step = engine.step()
    windows = {piece.request_id: step.lookback_token_ids[row].tolist() for row, piece in enumerate(step.pieces)}
    assert windows == {0: [9, 3, 1], 1: [7, 7, 3]}


@pytest.mark.parametrize("policy", [Policy.SLOTS_ONLY, Policy.PROMPT_ONLY, Policy.LAGGING])
def test_import_is_covered_by_the_window(policy: Policy) -> None:
    """The first piece after an import finds every imported position in its window."""
    engine = Engine(EngineConfig(policy, 4, 20, 8, 2, seed=1))
    engine.add([1, 2, 3, 4, 5, 6], max_new_tokens=3, imported=4)
    step = engine.step()
    assert step.pieces[0].start == 4
    assert step.pieces[0].events == {"import", "import at block edge"}
    assert step.lookback_token_ids.tolist() == [[4, 3, 2]]
