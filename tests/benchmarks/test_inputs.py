"""Laws of what is timed: steps are legal and read what they say, the table holds numbers, long requests are right."""

import numpy as np
import pytest
import torch

from benchmarks import memory
from benchmarks.hash import MIXED, SHAPES
from benchmarks.host_table import host_table
from benchmarks.inputs import BLOCK_SIZE, draw_step
from parity.world import flash
from reference.checks import check_step, check_step_values

CPU = torch.device("cpu")
LENGTHS = [[tokens // requests] * requests for tokens, requests in SHAPES if tokens <= 8192] + [list(MIXED)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{sum(lengths)}/{len(lengths)}")
@pytest.mark.parametrize("slot_cache", [False, True])
def test_a_drawn_step_is_one_that_an_engine_may_send(lengths: list[int], slot_cache: bool) -> None:
    """It passes every check of a caller's values, has the tokens asked for, and is another one for another seed."""
    step, other = (
        draw_step(lengths, 129280, 3, slot_cache=slot_cache, seed=seed, device=CPU) for seed in (0, 1)
    )  # fmt: skip
    check_step(CPU, 3, slot_cache, *step.arguments)
    check_step_values(129280, BLOCK_SIZE if slot_cache else None, step.slots, *step.arguments)
    assert step.tokens == sum(lengths)
    assert torch.equal(step.arguments[2].diff(), torch.tensor(lengths, dtype=torch.int32))  # type: ignore[union-attr]
    assert not torch.equal(step.arguments[1], other.arguments[1])  # type: ignore[arg-type]


def test_lookbacks_leave_the_batch_for_the_window_or_for_slots() -> None:
    """All starts have three tokens behind them: stateless the windows know them, with slots nobody but the slots."""
    for slot_cache in (False, True):
        step = draw_step([1] * 256, 129280, 3, slot_cache=slot_cache, seed=0, device=CPU)
        assert step.arguments[1].min() >= 3  # type: ignore[union-attr]
        assert bool(((step.arguments[4] < 0) == slot_cache).all())  # type: ignore[operator]


def test_requests_share_no_slot() -> None:
    """A slot is written once a step, so the order of writes cannot matter."""
    slots = draw_step(MIXED, 129280, 3, slot_cache=True, seed=0, device=CPU).arguments[6]
    assert slots is not None
    assert len(slots.unique()) == len(slots)


def test_a_random_table_holds_numbers_of_all_kinds(device: torch.device) -> None:
    """No NaN, every other code, every scale byte of the range; all products are normal bfloat16."""
    weight, scales = memory.random_table(1024, 256, device)
    codes = weight.view(torch.uint8).flatten().long().bincount(minlength=256)
    assert codes[[0x7F, 0xFF]].tolist() == [0, 0]
    assert (codes > 0).sum() == 254
    # 0x7E and 0xFE take the place of the NaN next to them
    rest = codes[[code for code in range(256) if code & 0x7F < 0x7E]]
    assert rest.max() < 1.3 * rest.min(), "a random byte is as likely as another"
    assert scales.unique().tolist() == list(range(112, 144))


@pytest.mark.parametrize("rows", [64, 100])
def test_a_table_filled_in_parts_is_the_one_filled_at_once(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's table is cut into parts, also where the last is shorter; the bytes are those of one fill."""
    monkeypatch.setattr("benchmarks.host_table._PART", 32)
    parts = host_table(rows, device)
    whole = memory.random_table(rows, 256, device)
    for part, all_of_it in zip(parts, whole, strict=True):
        assert torch.equal(part.view(torch.uint8), all_of_it.cpu().view(torch.uint8))


@pytest.mark.parametrize("tokens", [8191, 8192, 8193, 16387])
def test_long_requests_are_hashed_right_across_parts(tokens: int) -> None:
    """NumPy takes long requests part by part; the rows around every edge are those of the plain integers."""
    world = flash()
    rng = np.random.default_rng(tokens)
    ids, dead = rng.integers(0, world.vocabulary, tokens), rng.random(tokens) < 0.1
    rows = world.alone(ids, dead)
    edges = {0, 3, tokens - 1} | {edge + i for edge in (8192, 16384) for i in range(-4, 5) if edge + i < tokens}
    for p in edges:
        assert rows[p].tolist() == world.oracle.row(ids.tolist(), dead.tolist(), p), p
    on_torch = {
        name: torch.from_numpy(value)
        for name, value in (
            ("multipliers", world.multipliers), ("primes", world.layout.primes), ("offsets", world.layout.offsets),
        )
    }  # fmt: skip
    from reference.ngram_hash import ngram_hash

    tensors = ngram_hash(
        torch.from_numpy(world.token_map[ids]), torch.from_numpy(dead), pad_id=world.pad_id, **on_torch
    )
    assert np.array_equal(tensors.numpy(), rows)
