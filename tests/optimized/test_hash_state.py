"""Laws of the kernels' step: the reference's laws, its very rows on any legal step, and memory that stays its own."""

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized import hash_state as module
from optimized.hash_state import HashState
from parity.compare import strided
from parity.world import World
from reference.hash_state import HashState as ReferenceHashState
from tests.reference.steps import Case, D, Raw, raw_steps
from tests.reference.test_hash_state import BASE, WRONG_VALUES, StepLaws

KERNELS = ("_write_slots_kernel", "_hash_kernel")
WAYS = [True, False]


class TestOptimized(StepLaws):
    """The laws of one step, on the kernels."""

    HashState = HashState

    @pytest.mark.parametrize("name", WRONG_VALUES)
    def test_a_caller_s_error_in_the_values_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """On the host always, on a device with ENGRAM_DEBUG=1: the reference's words, and no slot is written."""
        monkeypatch.setenv("ENGRAM_DEBUG", "1")
        change, words = WRONG_VALUES[name]
        state = self.state(blocks=10)
        state.forward(**Raw(**BASE).tensors(self.device))
        state.cache.fill_(7)
        with pytest.raises(ValueError, match=f"^{words}"):
            state.forward(**Raw(**BASE | change).tensors(self.device))
        assert state.cache.tolist() == [7] * 40, "a refused step wrote slots"


@pytest.mark.parametrize("name", ["__init__", "ensure_cache", "dummy_hashes", "forward"])
def test_both_sides_have_one_signature(name: str) -> None:
    """A caller can put either state in the other's place."""
    assert inspect.signature(getattr(HashState, name)) == inspect.signature(getattr(ReferenceHashState, name))


def examples(device: torch.device) -> int:
    """As many cases as the profile says on a GPU; a quarter in the interpreter, where every launch costs."""
    return settings().max_examples if device.type == "cuda" else max(12, settings().max_examples // 4)


@pytest.mark.parametrize("world_name", ["flash", "another_pad"])
def test_any_step_gives_the_reference_s_rows_and_slots(
    world_name: str, worlds: dict[str, World], device: torch.device
) -> None:
    """Many requests a step, empty ones among them, any mix of dtypes and strides, garbage wherever nobody looks."""

    @settings(max_examples=examples(device))
    @given(raw_steps(worlds[world_name], requests=(0, 40), lengths=(0, 7)), st.booleans(), st.booleans())
    def holds(case: Case, with_strides: bool, on_host: bool) -> None:
        check_against_the_reference(case, with_strides, torch.device("cpu") if on_host else device, device)

    holds()


@pytest.mark.parametrize("with_strides", [False, True])
def test_a_step_of_many_boundaries_gives_the_reference_s_rows(
    with_strides: bool, worlds: dict[str, World], device: torch.device
) -> None:
    """More requests than one round of boundaries holds (256), most of them empty, with tokens on either side."""
    sizes = [2, *[0] * 250, 1, 1, 3, 1, 1, *[0] * 260, 4, 0, 1]
    starts = [0, *np.cumsum(sizes).tolist()]
    tokens = starts[-1]
    positions = [5 + at for size in sizes for at in range(size)]
    window = [[1000 + 3 * row + column if row % 3 else -1 for column in range(D)] for row in range(len(sizes))]
    for blocks in (None, 9):
        raw = Raw(list(range(500, 500 + tokens)), positions, starts, window=window)
        if blocks:
            raw.slots, raw.table = list(range(tokens)), [[row % 9, row % 7, 8] for row in range(len(sizes))]
        held = None if blocks is None else list(range(100, 136))
        case = Case(worlds["flash"], 4, held, [(raw, (torch.int64,) * 6)])
        check_against_the_reference(case, with_strides, torch.device("cpu"), device)


@pytest.mark.parametrize("tokens", [regime.tokens for regime in module._REGIMES])
def test_every_regime_gives_the_reference_s_rows(
    tokens: int, worlds: dict[str, World], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a step is spread, its rows and slots are the reference's; sizes choose among these variants alone."""
    chosen = next(regime for regime in module._REGIMES if regime.tokens == tokens)
    # In the interpreter a program costs whatever its block: fewer programs, and still several.
    regime = chosen if device.type == "cuda" else chosen._replace(block=64)
    monkeypatch.setattr(HashState, "_regime", lambda state, tokens: regime)
    for heads in (8, 3):  # 3: no power of two, so the last column blocks are partly stored
        world = worlds["another_pad"]
        world = replace(world, config=replace(world.config, engram_n_heads=heads))

        @settings(max_examples=max(2, examples(device) // 12) if device.type == "cpu" else settings().max_examples)
        @given(raw_steps(world, requests=(1, 40), lengths=(0, 7)), st.booleans())
        def holds(case: Case, with_strides: bool) -> None:
            check_against_the_reference(case, with_strides, torch.device("cpu"), device)

        holds()


def check_against_the_reference(
    case: Case, with_strides: bool, reference_device: torch.device, device: torch.device
) -> None:
    """Run a case on both sides: live rows and all slots must be equal to the bit."""
    expected, state = case.state(ReferenceHashState, reference_device), case.state(HashState, device)
    for raw, dtypes in case.steps:
        tensors = raw.tensors(device, dtypes)
        if with_strides:
            tensors = {name: None if tensor is None else strided(tensor) for name, tensor in tensors.items()}
        live = raw.starts[-1]
        want = expected.forward(**raw.tensors(reference_device, dtypes))[:live]
        poison(state)
        assert torch.equal(state.forward(**tensors)[:live].cpu(), want.cpu())
    if case.slots is not None:
        assert torch.equal(state.cache.cpu(), expected.cache.cpu())


def poison(state: HashState) -> None:
    """Let the state's next output come filled with a number that no row has."""
    empty = type(state)._empty_rows
    state._empty_rows = lambda tokens: empty(state, tokens).fill_(-99)  # type: ignore[method-assign]


def case_state(world: World, slot_cache: bool, device: torch.device, slots: int = 64) -> HashState:
    """Make a state with blocks of 4, its slots zeros."""
    return Case(world, 4, [0] * slots if slot_cache else None, []).state(HashState, device)


def big_step(
    tokens: int, requests: int, device: torch.device, slot_cache: bool, seed: int, dtypes: Any
) -> dict[str, Any]:
    """Give a step of exactly T tokens and R requests (the last takes what the others leave), 16 blocks of 4."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int, *shape: int) -> list[Any]:
        return torch.randint(0, high, shape, generator=generator).tolist()

    cuts = sorted(below(tokens + 1, requests - 1))
    starts = [0, *cuts, tokens]
    positions = [3 + token - first for first, end in pairwise(starts) for token in range(first, end)]
    window = [[value - 1 for value in row] for row in below(129280, requests, D)]
    raw = Raw(below(129280, tokens), positions, starts, below(2, tokens), window)
    if slot_cache:
        raw.slots = [token if token < 64 else -1 for token in range(tokens)]
        raw.table = below(16, requests, 80)
    return raw.tensors(device, dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize("slot_cache", WAYS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_no_size_stride_or_alignment_compiles_a_variant_of_its_own(
    slot_cache: bool, dtype: torch.dtype, worlds: dict[str, World], device: torch.device
) -> None:
    """One compiled variant a kernel and id dtype, over T and R in 1, 3, 16, 17, 32, 257 and strided, odd views."""
    sizes = (1, 3, 16, 17, 32, 257)
    kernels = [getattr(module, name) for name in (KERNELS if slot_cache else KERNELS[1:])]
    for kernel in kernels:
        kernel.device_caches.clear()
    for slots in (64, 68):
        state = case_state(worlds["flash"], slot_cache, device, slots)
        for tokens in sizes:
            for requests in sizes:
                tensors = big_step(tokens, requests, device, slot_cache, seed=tokens + requests, dtypes=(dtype,) * 6)
                state.forward(**tensors)
                state.forward(**{k: None if tensor is None else strided(tensor) for k, tensor in tensors.items()})
                state.forward(**{k: None if tensor is None else one_past(tensor) for k, tensor in tensors.items()})
    assert [len(kernel.device_caches[device.index or 0][0]) for kernel in kernels] == [1] * len(kernels)


def one_past(tensor: torch.Tensor) -> torch.Tensor:
    """Give a contiguous copy that starts one element behind an aligned address."""
    room = tensor.new_zeros(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("slot_cache", WAYS)
def test_a_captured_graph_hashes_what_stands_in_its_inputs_at_replay(
    slot_cache: bool, worlds: dict[str, World], device: torch.device
) -> None:
    """Captured once, replayed over other ids, cuts, windows and blocks: rows and slots are those of eager steps."""
    dtypes = (torch.int32, torch.int64, torch.int32, torch.int64, torch.int64, torch.int32)
    static = big_step(96, 7, device, slot_cache, seed=0, dtypes=dtypes)
    captured, eager = (case_state(worlds["another_pad"], slot_cache, device) for _ in range(2))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        captured.forward(**static)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = captured.forward(**static)
    if captured.cache is not None:
        captured.cache.zero_()
    for seed in range(1, 21):
        step = big_step(96, 7, device, slot_cache, seed=seed, dtypes=dtypes)
        for name, tensor in static.items():
            if tensor is not None:
                tensor.copy_(step[name])
        rows.fill_(-99)
        graph.replay()
        assert torch.equal(rows, eager.forward(**step))
    if captured.cache is not None:
        assert torch.equal(captured.cache, eager.cache)


@pytest.mark.gpu
@pytest.mark.parametrize("slot_cache", WAYS)
def test_a_step_never_waits_for_the_device(slot_cache: bool, worlds: dict[str, World], device: torch.device) -> None:
    """With torch made to raise at any synchronization, a step, dummy hashes and a rebind run through."""
    state = case_state(worlds["flash"], slot_cache, device)
    step = big_step(33, 5, device, slot_cache, seed=1, dtypes=(torch.int64,) * 6)
    kv_cache = torch.ones(16, 1, device=device)
    state.forward(**step)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.forward(**step)
        state.dummy_hashes(step["input_ids"])
        state.ensure_cache(kv_cache)
        state.forward(**step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


GUARD = 4096
# What is out of range for a live token: each is the caller's error.
STRAY: dict[str, dict[str, Any]] = {
    "slots": {"slots": [64, 65, 2**40, -2, -(2**40), 64 + 2**31, 2**62, 70]},
    "blocks": {"table": [[10**6, 16, 2**31 - 1], [-1, -(2**31), 17]]},
    "table rows": {"table": [[3, 2, 1]]},
    "table columns": {"table": [[3], [2]]},
    "no table": {"table": []},
    "ids": {"ids": [129280, -1, 2**31, 2**40, -(2**40), 129279, 2**62, 5]},
    "window ids": {"window": [[129280, 2**31, 2**40], [2**62, -1, 10**9]]},
    "positions": {"positions": [2**62, 2**62 + 1, 2**62 + 2, 2**62 + 3, -9, -8, -7, -6]},
}
LEGAL = {
    "ids": [50, 51, 52, 53, 54, 55, 56, 57], "positions": [9, 10, 11, 12, 6, 7, 8, 9], "starts": [0, 4, 8],
    "slots": [9, 10, 11, 12, 22, 23, 24, 25], "table": [[3, 2, 1, 0], [4, 5, 6, 7]],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRAY)
def test_values_out_of_range_never_touch_memory_that_is_not_the_state_s(
    name: str, worlds: dict[str, World], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the debug switch a stray write is dropped and a stray read stays in bounds: the guards are untouched."""
    monkeypatch.delenv("ENGRAM_DEBUG", raising=False)
    state = case_state(worlds["flash"], True, device)
    room = torch.full((2 * GUARD + 64,), -77, dtype=torch.int32, device=device)
    state.cache = room[GUARD : GUARD + 64]
    state.cache.zero_()
    raw = Raw(**LEGAL | STRAY[name])
    rows = state.forward(**raw.tensors(device))
    torch.cuda.synchronize(device)
    sizes = torch.from_numpy(worlds["flash"].layout.rows).to(device)
    assert ((rows >= 0) & (rows < sizes[None, :, None])).all(), "a row outside its layer's table"
    assert (room[:GUARD] == -77).all()
    assert (room[GUARD + 64 :] == -77).all()
    written = {slot for slot in raw.slots or [] if 0 <= slot < 64}
    untouched = [slot for slot in range(64) if slot not in written]
    assert (state.cache[untouched] == 0).all()


@pytest.mark.parametrize("name", sorted(set(STRAY) - {"positions"}))
def test_values_out_of_range_are_reported_with_the_debug_switch(
    name: str, worlds: dict[str, World], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ENGRAM_DEBUG=1, and on the host always, the same steps are refused by argument, and nothing is written."""
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    state = case_state(worlds["flash"], True, device)
    argument = {"slots": "slot_mapping", "ids": "input_ids", "window ids": "lookback_token_ids"}.get(
        name, "block_table"
    )
    with pytest.raises(ValueError, match=f"^{argument}.*: got .*, expected "):
        state.forward(**Raw(**LEGAL | STRAY[name]).tensors(device))
    assert (state.cache == 0).all()
