"""Every bad call names the argument, what it got and what was expected, and changes nothing."""

import re

import numpy as np
import pytest
import torch

from serving.engine import Engine, EngineConfig
from serving.runner import Policy

GOOD = {"policy": Policy.LAGGING, "block_size": 4, "num_blocks": 8, "token_budget": 16, "max_requests": 2, "seed": 1}


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("policy", "lagging", TypeError),
        ("block_size", 0, ValueError),
        ("block_size", 257, ValueError),
        ("block_size", 4.0, TypeError),
        ("num_blocks", 0, ValueError),
        ("token_budget", 0, ValueError),
        ("max_requests", True, TypeError),
        ("lookback", 0, ValueError),
        ("num_drafts", -1, ValueError),
        ("pad_tokens", [8], TypeError),
        ("pad_tokens", (8, 8), ValueError),
        ("pad_tokens", (0,), ValueError),
        ("pad_requests", (4, 2), ValueError),
        ("pad_requests", ("4",), TypeError),
        ("ids_dtype", torch.int16, ValueError),
        ("share_prefixes", 1, TypeError),
        ("seed", -1, ValueError),
        ("seed", None, TypeError),
    ],
)
def test_config_refuses(field: str, value: object, error: type) -> None:
    """A field of the wrong type or out of range is refused."""
    with pytest.raises(error, match=rf"{field}.*: got .*, expected"):
        EngineConfig(**(GOOD | {field: value}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": []}, ValueError, "prompt length: got 0, expected at least 1"),
        ({"prompt": [[1]]}, ValueError, "prompt: got shape (1, 1), expected one axis"),
        ({"prompt": [1.0]}, TypeError, "prompt: got dtype float64, expected integers"),
        ({"prompt": [True]}, TypeError, "prompt: got dtype bool, expected integers"),
        ({"prompt": [3, -1]}, ValueError, "prompt: got ids -1 to 3, expected 0 to 9223372036854775807"),
        ({"dead": [True]}, ValueError, "dead: got shape (1,), expected [3]"),
        ({"dead": [0, 1, 0]}, TypeError, "dead: got dtype int64, expected bool"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0, expected at least 1"),
        ({"imported": 3}, ValueError, "imported: got 3, expected 0 to 2"),
        ({"imported": -1}, ValueError, "imported: got -1, expected 0 to 2"),
        ({"max_new_tokens": 30}, ValueError, "request: got a need of 9 blocks, expected at most 8"),
    ],
)
def test_add_refuses(changes: dict, error: type, message: str) -> None:
    """A request that cannot be served is refused at once, and leaves no trace."""
    engine = Engine(EngineConfig(**GOOD))
    arguments = {"prompt": [1, 2, 3], "max_new_tokens": 2} | changes
    with pytest.raises(error, match=re.escape(message)):
        engine.add(arguments.pop("prompt"), **arguments)
    assert engine.finished
    assert engine.add([1], max_new_tokens=1) == 0


def test_longest_request_fits() -> None:
    """A request that fills the pool to its last block is served."""
    engine = Engine(EngineConfig(**GOOD))
    engine.add([1, 2, 3], max_new_tokens=29)
    while (step := engine.step()) is not None:
        engine.update({piece.request_id: [5] for piece in step.pieces})
    assert len(engine.stream(0)) == 32


def test_narrow_ids_are_not_wrapped() -> None:
    """With int32 ids, an id past 2^31 - 1 is refused."""
    engine = Engine(EngineConfig(**GOOD, ids_dtype=torch.int32))
    with pytest.raises(ValueError, match="prompt: got ids 2147483648"):
        engine.add([2**31], max_new_tokens=1)


@pytest.mark.parametrize(
    ("sampled", "error", "message"),
    [
        ({}, ValueError, "sampled[0]: got 0 ids, expected 1"),
        ({0: [1, 2]}, ValueError, "sampled[0]: got 2 ids, expected 1"),
        ({0: [1], 1: [1]}, ValueError, "sampled[1]: got 1 ids, expected 0"),
        ({0: [1], 7: [1]}, ValueError, "sampled: got requests [7]"),
        ({0: [-1]}, ValueError, "sampled[0]: got ids -1 to -1"),
        ({0: [1.5]}, TypeError, "sampled[0]: got dtype float64"),
    ],
)
def test_update_refuses(sampled: dict, error: type, message: str) -> None:
    """An answer that does not fit the step is refused whole; the right one is still taken after it."""
    engine = Engine(EngineConfig(**GOOD))
    engine.add([1, 2], max_new_tokens=3)
    engine.add(np.arange(9, 29), max_new_tokens=1)
    assert sorted(piece.num_sampled for piece in engine.step().pieces) == [0, 1]
    with pytest.raises(error, match=re.escape(message)):
        engine.update(sampled)
    engine.update({0: [4], 1: []})
    assert engine.stream(0).tolist() == [1, 2, 4]


def test_step_and_update_alternate() -> None:
    """Neither can be called twice in a row, and nobody leaves in between."""
    engine = Engine(EngineConfig(**GOOD))
    engine.add([1, 2], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="update: got a call without a step"):
        engine.update({})
    engine.step()
    with pytest.raises(RuntimeError, match="step: got a call while a step is in flight"):
        engine.step()
    with pytest.raises(RuntimeError, match="export: got a call between step and update"):
        engine.export(0)


@pytest.mark.parametrize("budget", [0, 17, -1])
def test_budget_of_a_step_stays_in_the_config(budget: int) -> None:
    """A step's own budget is 1 to the config's."""
    with pytest.raises(ValueError, match=f"token_budget: got {budget}, expected 1 to 16"):
        Engine(EngineConfig(**GOOD)).step(budget)


def test_export_refuses_who_does_not_decode() -> None:
    """Waiting, prefilling, ended and unknown requests cannot be exported; living ones cannot be forgotten."""
    engine = Engine(EngineConfig(**(GOOD | {"token_budget": 2})))
    engine.add([1, 2, 3], max_new_tokens=1)
    for _ in range(2):  # waiting, then half prefilled
        with pytest.raises(RuntimeError, match="request 0: got one that does not decode"):
            engine.export(0)
        with pytest.raises(RuntimeError, match="request 0: got one that is alive"):
            engine.forget(0)
        engine.step()
        engine.update({} if len(engine.stream(0)) == 3 and engine.counters.steps == 1 else {0: [4]})
    assert engine.finished
    with pytest.raises(RuntimeError, match="request 0: got one that does not decode"):
        engine.export(0)
    engine.forget(0)
    for call in (engine.export, engine.stream, engine.forget):
        with pytest.raises(KeyError, match="request_id: got 0, expected a request of this engine"):
            call(0)
