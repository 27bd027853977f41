"""Steps in plain lists: what one must give by the definition, and random ones that no engine need make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from parity.world import World
from serving.rng import Rng

D = 3  # lookback of the worlds here


def plain_row(world: World, values: Sequence[int]) -> list[list[int]]:
    """Hash one n-gram of compressed ids, newest first, in plain integers: `[L][C]`."""
    rows = []
    for multipliers, orders in zip(world.oracle.multipliers, world.oracle.primes, strict=True):
        row, start = [], 0
        for order, primes in enumerate(orders, start=2):
            mix = 0
            for back in range(order):
                mix ^= values[back] * multipliers[back]
            for prime in primes:
                row.append(start + mix % prime)
                start += prime
        rows.append(row)
    return rows


@dataclass
class Raw:
    """Hold one step in plain lists; what a test leaves out is harmless: alive, unknown, not written."""

    ids: list[int]
    positions: list[int]
    starts: list[int]
    dead: list[bool] = field(default_factory=list)
    window: list[list[int]] = field(default_factory=list)
    window_dead: list[list[bool]] = field(default_factory=list)
    slots: list[int] | None = None
    table: list[list[int]] | None = None

    def __post_init__(self) -> None:
        requests = len(self.starts) - 1
        self.dead = self.dead or [False] * len(self.ids)
        self.window = self.window or [[-1] * D] * requests
        self.window_dead = self.window_dead or [[False] * D] * requests

    def tensors(self, device: torch.device, dtypes: Sequence[torch.dtype] = (torch.int64,) * 6) -> dict[str, Any]:
        """Give the eight arguments of `forward`; the six integer ones have these dtypes, in order."""
        requests = len(self.starts) - 1
        integers: dict[str, tuple[Any, tuple[int, ...]]] = {
            "input_ids": (self.ids, (len(self.ids),)),
            "positions": (self.positions, (len(self.ids),)),
            "query_start_loc": (self.starts, (requests + 1,)),
            "lookback_token_ids": (self.window, (requests, D)),
            "slot_mapping": (self.slots, (len(self.ids),)),
            "block_table": (self.table, (len(self.table or []), len((self.table or [[]])[0]))),
        }
        given: dict[str, Any] = {
            name: None if values is None else torch.tensor(values, dtype=dtype, device=device).reshape(shape)
            for (name, (values, shape)), dtype in zip(integers.items(), dtypes, strict=True)
        }
        given["dead_mask"] = torch.tensor(self.dead, dtype=torch.bool, device=device)
        flags = torch.tensor(self.window_dead, dtype=torch.bool, device=device)
        return given | {"lookback_dead_mask": flags.reshape(requests, D)}


class PlainStep:
    """Define one step in plain Python: a list of slots, and for every token the sentence of the definition.

    Args:
        world: configuration and token map.
        block_size: B.
        slots: the cache before the step; None in the stateless way.
    """

    def __init__(self, world: World, block_size: int, slots: list[int] | None) -> None:
        self.world, self.block_size, self.slots = world, block_size, slots

    def rows(self, raw: Raw) -> list[list[list[int]]]:
        """Write the step's slots, then hash its live tokens."""
        compress = self.world.token_map.tolist()
        own = [-1 if dead else compress[token] for token, dead in zip(*self._live(raw), strict=True)]
        if self.slots is not None and raw.slots is not None:
            for source, slot in zip(own, raw.slots, strict=False):
                if slot != -1:
                    self.slots[slot] = source
        rows = []
        for request, (first, end) in enumerate(zip(raw.starts, raw.starts[1:], strict=False)):
            for token in range(first, end):
                sources = [self._source(raw, own, request, first, token, back) for back in range(D + 1)]
                alive = next((back for back, source in enumerate(sources) if source is None), D + 1)
                values = [*sources[:alive], *[self.world.pad_id] * (D + 1 - alive)]
                rows.append(plain_row(self.world, values))  # type: ignore[arg-type]
        return rows

    def _live(self, raw: Raw) -> tuple[list[int], list[bool]]:
        return raw.ids[: raw.starts[-1]], raw.dead[: raw.starts[-1]]

    def _source(self, raw: Raw, own: list[int], request: int, first: int, token: int, back: int) -> int | None:
        position = raw.positions[token] - back
        if position < 0:
            return None
        if token - back >= first:
            source = own[token - back]
        elif (known := raw.window[request][raw.positions[first] - position - 1]) >= 0:
            dead = raw.window_dead[request][raw.positions[first] - position - 1]
            source = -1 if dead else int(self.world.token_map[known])
        elif self.slots is not None and raw.table is not None:
            block, offset = divmod(position, self.block_size)
            source = self.slots[raw.table[request][block] * self.block_size + offset]
        else:
            source = self.world.pad_id
        return None if source == -1 else source


@dataclass(frozen=True)
class Case:
    """Hold steps for one state: its slots before them (None: stateless), and each step with its six dtypes."""

    world: World
    block_size: int
    slots: list[int] | None
    steps: list[tuple[Raw, tuple[torch.dtype, ...]]]

    def state(self, make: Any, device: torch.device) -> Any:
        """Make a side's state that holds the case's slots."""
        way = {"slot_cache": self.slots is not None, "block_size": None if self.slots is None else self.block_size}
        state = make(self.world.config, self.world.token_map, **way, device=device)
        if self.slots is not None:
            state.ensure_cache(torch.ones(len(self.slots) // self.block_size, 1))
            state.cache.copy_(torch.tensor(self.slots, dtype=torch.int32))
        return state


@st.composite
def raw_steps(draw: st.DrawFn, world: World, *, requests: tuple[int, int], lengths: tuple[int, int]) -> Case:
    """Draw steps that an engine need not make: any slots and blocks, any window, garbage wherever nobody looks."""
    rng = Rng(draw(st.integers(0, 2**32 - 1)))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16, 17]))
    blocks = draw(st.integers(1, 7)) if draw(st.booleans()) else None
    vocabulary = draw(st.sampled_from([world.vocabulary, 3]))
    slots = None
    if blocks is not None:
        slots = [rng.below(world.config.engram_compressed_vocab_size + 1) - 1 for _ in range(blocks * block_size)]
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(*lengths), min_size=requests[0], max_size=requests[1]))
        tail = draw(st.sampled_from([0, 0, 1, 5]))
        far = draw(st.booleans())
        raw = _raw_step(rng, world, sizes, tail, far, vocabulary, block_size, blocks)
        wide = [torch.int64 if rng.chance(1, 2) else torch.int32 for _ in range(6)]
        for argument, values in ((0, raw.ids), (1, raw.positions), (4, raw.slots or [])):
            if any(not -(2**31) <= value < 2**31 for value in values):
                wide[argument] = torch.int64
        steps.append((raw, tuple(wide)))
    return Case(world, block_size, slots, steps)


def _raw_step(
    rng: Rng, world: World, sizes: list[int], tail: int, far: bool, vocabulary: int, block_size: int, blocks: int | None
) -> Raw:
    starts = [0, *np.cumsum(sizes, dtype=int).tolist()]
    live = starts[-1]
    garbage = (-(2**31), -1, world.vocabulary, 2**31 - 1, 2**40)
    positions: list[int] = []
    window, window_dead = [], []
    for size in sizes:
        away = far and rng.chance(1, 2)
        first = 2**31 - 3 + rng.below(6) if away else rng.below(3 * block_size + 5)
        positions += range(first, first + size)
        known = 1 if away else rng.below(3)  # all known, some, none; far positions have no block in a small table
        row = [-1 if known != 1 and rng.chance(known, 2) else rng.below(vocabulary) for _ in range(D)]
        window.append(row if size else [garbage[rng.below(4)] for _ in range(D)])
        window_dead.append([rng.chance(1, 5) for _ in range(D)])
    ids = [rng.below(vocabulary) for _ in range(live)] + [garbage[rng.below(5)] for _ in range(tail)]
    positions += [garbage[rng.below(5)] for _ in range(tail)]
    dead = [rng.chance(1, 6) for _ in ids]
    raw = Raw(ids, positions, starts, dead, window, window_dead)
    if blocks is None:
        return raw
    raw.slots = []
    written: dict[int, tuple[int, bool]] = {}
    for token, held in enumerate(zip(ids, dead, strict=True)):
        slot = rng.below(blocks * block_size + 1) - 1
        if token < live and slot >= 0 and written.setdefault(slot, held) != held:
            slot = -1
        raw.slots.append(slot)
    columns = 5 // block_size + 4
    last = max([request for request, size in enumerate(sizes) if size], default=-1)
    rows = last + 1 + rng.below(len(sizes) - last)
    raw.table = [
        [rng.below(blocks) if sizes[row] else -(2**31) + rng.below(2**32) for _ in range(columns)]
        for row in range(rows)
    ]
    return raw
