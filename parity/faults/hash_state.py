"""Mistakes in one step's lookbacks and in the slots between steps."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from parity.faults.fault import plant
from parity.faults.model import Model, Step, View
from reference.hash_state import DEAD


@plant("H11", "the history is dropped at the start of every chunk")
class HistoryDroppedAtChunkStart(Model):
    """Every chunk is hashed as if its request began with it.

    Law: chunks.
    """

    def look_in_window(self, view: View, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find what blocks."""
        return torch.full_like(column, DEAD), torch.ones_like(column, dtype=torch.bool)


@plant("H12", "only N - 2 tokens of history are kept")
class WindowOneTooShort(Model):
    """The history holds two tokens where the longest n-gram looks three back: only the highest order suffers.

    Law: chunks.
    """

    def misread(self, step: Step) -> Step:
        """Lose the oldest column."""
        dead = step["lookback_dead_mask"].clone()
        dead[:, -1] = True
        window = step["lookback_token_ids"].clone()
        window[:, -1] = 0
        return step | {"lookback_token_ids": window, "lookback_dead_mask": dead}


@plant("H13", "the window is read oldest token first")
class WindowReversed(Model):
    """The window's columns are taken in reading order, while column 0 is the newest token.

    Law: chunks.
    """

    def misread(self, step: Step) -> Step:
        """Turn the window round."""
        return step | {name: step[name].flip(1) for name in ("lookback_token_ids", "lookback_dead_mask")}


@plant("H15", "each request reads the window of the request beside it")
class NeighboursWindow(Model):
    """The window's row is off by one in the batch.

    Law: company.
    """

    def misread(self, step: Step) -> Step:
        """Shift the rows."""
        return step | {name: step[name].roll(1, 0) for name in ("lookback_token_ids", "lookback_dead_mask")}


@plant("H18", "a slot that holds a token is not written again when its block has a new owner")
class SlotsKeptOnBlockReuse(Model):
    """Slots are filled once; a block that is freed and handed out again keeps its first owner's tokens.

    Law: placement.
    """

    def write(self, step: Step, batch: torch.Tensor) -> None:
        """Write where nothing stands."""
        slots = step["slot_mapping"][: len(batch)].long()
        assert self.cache is not None
        used = self.cache[slots.clamp(0, len(self.cache) - 1)] != 0
        self.put(torch.where(used, -1, slots), batch)


@plant("H19", "the lookback in the batch crosses into the request that stands before")
class BatchLookbackCrossesRequests(Model):
    """Whatever stands before a token in the batch is taken for its history.

    Law: company.
    """

    def in_batch(self, view: View, q: torch.Tensor, k: int) -> torch.Tensor:
        """Go by the batch's beginning alone."""
        return (torch.arange(len(q)) - k >= 0) & (q >= 0)


@plant("H20", "the slots are read before this step's tokens are written to them")
class SlotsReadBeforeWritten(Model):
    """A request that hits a block which another one fills in this very step sees what stood there before.

    Law: prefix_hit.
    """

    def write(self, step: Step, batch: torch.Tensor) -> None:
        """Keep the writes for later."""
        self._late = step, batch

    def finish(self) -> None:
        """Write at last."""
        if self.cache is not None and (late := vars(self).pop("_late", None)):
            super().write(*late)


@plant("H21", "the slots are addressed with another block size than the engine's")
class SlotsAtTheWrongBlockSize(Model):
    """Blocks are 16 tokens in the kernel's defaults, whatever the engine has.

    Law: placement.
    """

    def read(self, table: torch.Tensor, request: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Read with blocks of 16 (17 where they are 16)."""
        assert self.cache is not None
        size = 16 if self.block_size != 16 else 17
        block = table[request, (q // size).clamp(0, table.shape[1] - 1)].long()
        return self.cache[(block * size + q % size).clamp(0, len(self.cache) - 1)].long()


@plant("H24", "dead tokens in the window count as alive")
class DeadInWindowCountsAsAlive(Model):
    """The window's dead flags are dropped: an image token before the chunk takes part in its n-grams.

    Law: agreement.
    """

    def misread(self, step: Step) -> Step:
        """Clear the flags."""
        return step | {"lookback_dead_mask": torch.zeros_like(step["lookback_dead_mask"])}


@plant("H25", "a dead token is padded over and the n-gram sees what stands before it")
class DeadDoesNotLatch(Model):
    """Each lookback is masked by itself, where the first dead one has to block all that are older.

    Law: dead_span.
    """

    def block(self, sources: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Block each lookback alone."""
        return (q < 0) | (sources == DEAD)


@plant("H26", "a dead token's slot holds its id, as if it were alive")
class DeadSlotHoldsItsId(Model):
    """The slots are written from the token ids, and the mask is applied in the batch alone.

    Law: agreement.
    """

    def write(self, step: Step, batch: torch.Tensor) -> None:
        """Write ids whatever the mask says."""
        ids = step["input_ids"][: len(batch)].long()
        super().write(step, self.compress(ids, torch.zeros_like(batch, dtype=torch.bool)))


@plant("H27", "the slots are kept when another KV cache of equal size is bound")
class CacheKeptOnRebind(Model):
    """The state looks at the size of the KV cache alone, and takes a new one for the old.

    Law: binding.
    """

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Bind anew only where the number of slots changes."""
        kept = self.cache if self.cache is not None else getattr(self, "_kept", None)
        bound = super().ensure_cache(kv_cache)
        self._kept = kept
        if self.cache is not None and kept is not None and len(kept) == len(self.cache):
            self.cache = kept
        return bound


@plant("H28", "the state keeps the old KV cache's memory alive")
class OldStorageKeptAlive(Model):
    """The bound tensor is remembered itself, to be compared with; its gigabytes are never freed. No id is wrong.

    Law: binding.
    """

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Remember every tensor."""
        self._tensors = [*getattr(self, "_tensors", ()), kv_cache]
        return super().ensure_cache(kv_cache)


@plant("H30", "tokens past the last boundary write their slots")
class PaddingWritesSlots(Model):
    """Padding repeats stale slots, and the kernel writes the whole padded step: somebody's history is destroyed.

    Law: padding.
    """

    def write(self, step: Step, batch: torch.Tensor) -> None:
        """Write the padding first, so that live tokens win."""
        tail = slice(len(batch), None)
        self.put(
            step["slot_mapping"][tail].long(), self.compress(step["input_ids"][tail].long(), step["dead_mask"][tail])
        )
        super().write(step, batch)


@plant("H31", "an id that the window does not know blocks the lookback, and the slot is never read")
class UnknownBlocks(Model):
    """The -1 of "not known" is taken for the -1 of "dead".

    Law: agreement.
    """

    def look_in_window(self, view: View, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give DEAD for what is not known."""
        source, known = super().look_in_window(view, column)
        return torch.where(known, source, DEAD), torch.ones_like(known)


@plant("H32", "a dead token that is read from a slot does not block")
class DeadSlotDoesNotBlock(Model):
    """The -1 in a slot is replaced by the pad id as it is read, so that the lookback goes on behind it.

    Law: agreement.
    """

    def read(self, table: torch.Tensor, request: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Give the pad for a dead slot."""
        found = super().read(table, request, q)
        return torch.where(found == DEAD, self.pad_id, found)


@plant("H33", "a slot is trusted although the window knows the token")
class SlotBeforeWindow(Model):
    """The slot is read first and the window only where there is no slot: an import's slots were never written.

    Law: import.
    """

    def look_in_window(self, view: View, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Know nothing where there are slots."""
        source, known = super().look_in_window(view, column)
        return source, known & (self.cache is None)


@plant("H34", "lookbacks before the first position of a request are not blocked")
class StartDoesNotBlock(Model):
    """Positions below 0 are clamped to 0: the first token of a request is seen several times.

    Law: agreement.
    """

    def source(self, view: View, batch: torch.Tensor, k: int) -> torch.Tensor:
        """Clamp the lookback to the request's beginning."""
        back = torch.minimum(torch.full_like(view.positions, k), view.positions)
        sources = torch.stack([super(StartDoesNotBlock, self).source(view, batch, j) for j in range(k + 1)], 1)
        return sources.gather(1, back[:, None])[:, 0]

    def block(self, sources: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Block for dead tokens alone."""
        return super().block(sources, q.clamp(min=0))


@plant("H29", "a captured graph gives the rows of the step that it was captured with")
class GraphReplaysItsCapture(Model):
    """The hashes are computed on the host, outside of the graph: a replay at the captured size repeats the first ones.

    Source: a report on the TensorRT-LLM port. Law: padding.
    """

    def forward(self, **step: Any) -> torch.Tensor:  # type: ignore[override]
        """Hash a size once, and replay the result for every later step of that size."""
        graphs = vars(self).setdefault("_graphs", {})
        rows = super().forward(**step)
        return graphs.setdefault(len(rows), rows).clone()


@plant("H9", "two engines share one history, because it lives on the model")
class HistoryOnTheModel(Model):
    """The slots belong to the model's object: two engines over one model write and read the same ones.

    Source: a llama.cpp fork, its issue 114. Law: import.
    """

    _of_the_model: ClassVar[dict[int, Any]] = {}

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Share the slots with whoever has as many."""
        bound = super().ensure_cache(kv_cache)
        if self.cache is not None:
            import weakref

            other = self._of_the_model.get(len(self.cache), lambda: None)()
            self._of_the_model[len(self.cache)] = weakref.ref(self)
            if other is not None and other is not self and other.cache is not None:
                self.cache = other.cache
        return bound
