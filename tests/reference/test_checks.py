"""Laws of the shared refusals: name, got, expected; and what is checked on a device reads no value."""

from typing import Any

import numpy as np
import pytest
import torch

from parity.world import flash
from reference.checks import (
    INTEGERS,
    check_block_size,
    check_kv_cache,
    check_step,
    check_tensor,
    check_token_map,
)
from tests.reference.steps import Raw

CONFIG = flash().config
ZEROS = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(2, 3), ("T", 3), ("T", "C"), (2, "C")], ids=str)
def test_a_tensor_that_fits_passes(shape: tuple[int | str, ...]) -> None:
    """A letter stands for any size, a number for itself; strides do not matter."""
    check_tensor("x", ZEROS, shape, INTEGERS)
    check_tensor("x", torch.zeros(3, 2, dtype=torch.int64).T, shape, INTEGERS, torch.device("cpu"))


@pytest.mark.parametrize(
    ("value", "shape", "device", "error", "words"),
    [
        (None, (2, 3), "cpu", TypeError, "got NoneType, expected a torch.Tensor"),
        (np.zeros((2, 3), np.int32), (2, 3), "cpu", TypeError, "got ndarray, expected a torch.Tensor"),
        (ZEROS.float(), (2, 3), "cpu", TypeError, "got dtype torch.float32, expected torch.int32 or torch.int64"),
        (ZEROS.short(), (2, 3), "cpu", TypeError, "got dtype torch.int16, expected torch.int32 or torch.int64"),
        (ZEROS, ("T", 4), "cpu", ValueError, "got shape (2, 3), expected [T, 4]"),
        (ZEROS, (1, 3), "cpu", ValueError, "got shape (2, 3), expected [1, 3]"),
        (ZEROS, ("T",), "cpu", ValueError, "got shape (2, 3), expected [T]"),
        (ZEROS, ("A", "B", "C"), "cpu", ValueError, "got shape (2, 3), expected [A, B, C]"),
        (ZEROS, (2, 3), "meta", ValueError, "got device cpu, expected meta"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    value: Any, shape: tuple[int | str, ...], device: str, error: type[Exception], words: str
) -> None:
    """The whole message: name, what it is, what it must be; never a broadcast or a cast."""
    with pytest.raises(error) as caught:
        check_tensor("x", value, shape, INTEGERS, torch.device(device))
    assert str(caught.value) == f"x: {words}"


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint8])
def test_a_checked_token_map_is_the_caller_s_no_more(dtype: type) -> None:
    """Any integers become an int32 array of their own: later changes of the caller's map change nothing."""
    given = np.array([0, 5, 2, 7], dtype=dtype)
    checked = check_token_map(given, CONFIG)
    given[:] = 9
    assert (checked.dtype, checked.tolist()) == (np.int32, [0, 5, 2, 7])


def test_a_token_map_s_bounds_are_exact() -> None:
    """0 and W - 1 are compressed ids, -1 and W are not; the pad token must be the last id at the latest."""
    top = CONFIG.engram_compressed_vocab_size - 1
    assert check_token_map([0, 0, top], CONFIG).tolist() == [0, 0, top]
    for wrong in ([0, 0, top + 1], [0, 0, -1], [0, 0, 2**32], [0, 0]):
        with pytest.raises(ValueError, match=r"^token_map: got "):
            check_token_map(wrong, CONFIG)
    with pytest.raises(TypeError, match=r"^token_map: got float64 of shape \(0,\)"):
        check_token_map([], CONFIG)


def test_block_size_is_needed_with_a_slot_cache_alone() -> None:
    """None is for the stateless way, and 1 is the smallest block."""
    check_block_size(None, slot_cache=False)
    check_block_size(1, slot_cache=True)
    check_block_size(1, slot_cache=False)
    with pytest.raises(ValueError, match=r"^block_size: got None, expected an int >= 1"):
        check_block_size(None, slot_cache=True)


def test_an_empty_kv_cache_is_one() -> None:
    """Unbound means a tensor without elements, of any number of axes but none."""
    for shape in ((0,), (0, 4), (4, 0), (4, 2)):
        check_kv_cache(torch.empty(shape))


@pytest.mark.parametrize("slot_cache", [True, False])
def test_the_check_of_a_step_reads_no_value(slot_cache: bool) -> None:
    """It runs on tensors that have none, so it never waits for a device."""
    slots = {"slots": [1, 2], "table": [[0], [0]]} if slot_cache else {}
    step = Raw([5, 6], [0, 0], [0, 1, 2], **slots).tensors(torch.device("meta"))  # type: ignore[arg-type]
    check_step(torch.device("meta"), 3, slot_cache, **step)
    with pytest.raises(ValueError, match=r"^positions: got shape \(1,\), expected \[2\]$"):
        check_step(torch.device("meta"), 3, slot_cache, **step | {"positions": step["positions"][:1]})
