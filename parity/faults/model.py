"""A hash state of small parts, of which a fault replaces one; itself it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from reference.hash_state import DEAD, HashState

Step = dict[str, Any]


@dataclass
class View:
    """Hold what the lookbacks of a step go by; T counts its live tokens.

    Attributes:
        request: `[T]` the request of each token.
        positions, chunk_start: `[T]`.
        window, window_dead: `[R, D]`.
        table: `[R', blocks]` or None.
    """

    request: torch.Tensor
    positions: torch.Tensor
    chunk_start: torch.Tensor
    window: torch.Tensor
    window_dead: torch.Tensor
    table: torch.Tensor | None


class Model(HashState):
    """Hash as the reference does, unchecked: what is out of range is moved into it, as a careless kernel's memory is.

    A fault overrides one of the methods below. Several are mixed by inheriting from all of them.
    """

    def misread(self, step: Step) -> Step:
        """Give the step as this port reads it; every class of the family may do so, one after the other."""
        return step

    def forward(self, **step: Any) -> torch.Tensor:  # type: ignore[override]
        """Hash a step as this port understands it."""
        for kind in type(self).__mro__:
            if "misread" in vars(kind):
                step = kind.misread(self, step)  # type: ignore[attr-defined]
        rows = self.dummy_hashes(step["input_ids"])[0]
        starts = step["query_start_loc"].long()
        live = int(starts[-1])
        if live == 0:
            return rows
        request = torch.repeat_interleave(starts.diff())
        positions = step["positions"][:live].long()
        view = View(
            request, positions, positions[starts[request]], step["lookback_token_ids"].long(),
            step["lookback_dead_mask"], step["block_table"],
        )  # fmt: skip
        batch = self.compress(step["input_ids"][:live].long(), step["dead_mask"][:live])
        if self.cache is not None and step["slot_mapping"] is not None:
            self.write(step, batch)
        sources = torch.stack([self.source(view, batch, k) for k in range(self.lookback + 1)], 1)
        blocked = self.block(sources, positions[:, None] - torch.arange(self.lookback + 1))
        values = torch.where(blocked, self.pad_id, sources)
        rows[:live] = self.reduce(self.mix(values)).int()
        self.finish()
        return rows

    def note(self, step: Step) -> None:
        """Take a step's tokens into the slots, for whoever does not need its rows."""
        live = int(step["query_start_loc"][-1])
        if live and self.cache is not None and step["slot_mapping"] is not None:
            self.write(step, self.compress(step["input_ids"][:live].long(), step["dead_mask"][:live]))

    def compress(self, ids: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
        """Map token ids to compressed ids, DEAD where dead."""
        return torch.where(dead, DEAD, self.token_map[ids.clamp(0, len(self.token_map) - 1)])

    def write(self, step: Step, batch: torch.Tensor) -> None:
        """Write the live tokens `[T]` of a step to their slots."""
        slots = step["slot_mapping"][: len(batch)].long()
        self.put(slots, batch)

    def put(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store values in the slots that are in range."""
        assert self.cache is not None
        inside = (slots >= 0) & (slots < len(self.cache))
        self.cache[slots[inside]] = values[inside].int()

    def source(self, view: View, batch: torch.Tensor, k: int) -> torch.Tensor:
        """Look k tokens back from every token: `[T]` compressed ids or DEAD."""
        q = view.positions - k
        here = self.in_batch(view, q, k)
        if bool(here.all()):
            return batch[(torch.arange(len(q)) - k).clamp(min=0)]
        column = (view.chunk_start - 1 - q).clamp(0, self.lookback - 1)
        source, known = self.look_in_window(view, column)
        source = torch.where(known, source, self.behind_window(view, q))
        return torch.where(here, batch[(torch.arange(len(q)) - k).clamp(min=0)], source)

    def in_batch(self, view: View, q: torch.Tensor, k: int) -> torch.Tensor:
        """Say which tokens find the token at position q in this step."""
        return q >= view.chunk_start

    def look_in_window(self, view: View, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a window column of every token: `[T]` sources, and where the window knows them."""
        ids = view.window[view.request, column]
        return self.compress(ids, view.window_dead[view.request, column]), ids >= 0

    def behind_window(self, view: View, q: torch.Tensor) -> torch.Tensor:
        """Read what the window does not know: the slot of position q, or the pad."""
        if self.cache is None or view.table is None:
            return torch.full_like(q, self.pad_id)
        return self.read(view.table, view.request, q)

    def read(self, table: torch.Tensor, request: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Read the slots of positions q through the block table."""
        assert self.cache is not None
        size = self.block_size or 1
        block = table[request, (q // size).clamp(0, table.shape[1] - 1)].long()
        return self.cache[(block * size + q % size).clamp(0, len(self.cache) - 1)].long()

    def block(self, sources: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Say which lookbacks `[T, N]` are blocked: from the first dead source or position before 0 on."""
        return ((q < 0) | (sources == DEAD)).int().cummax(1).values.bool()

    def mix(self, values: torch.Tensor) -> torch.Tensor:
        """Mix values `[T, N]` to `[T, L, N-1]`, one mix an order."""
        products = values[:, None, :] * self.multipliers
        mixes = [products[:, :, 0]]
        for k in range(1, products.shape[2]):
            mixes.append(mixes[-1] ^ products[:, :, k])
        return torch.stack(mixes[1:], 2)

    def reduce(self, mixes: torch.Tensor) -> torch.Tensor:
        """Reduce mixes to rows `[T, L, C]`."""
        return (mixes[:, :, :, None] % self.primes).flatten(2) + self.offsets

    def finish(self) -> None:
        """Do what is left when the rows are there."""
