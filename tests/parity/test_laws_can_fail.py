"""The laws can fail: each mistake that people really made, planted in the step model, breaks the law that names it."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings

import reference.hash_state
from parity.laws import LAWS, Bench, LawBroken
from parity.protocol import Implementation
from parity.world import World
from reference.hash_state import DEAD, HashState
from tests.reference.test_hash_state import StepLaws

Step = dict[str, Any]
FAULTS: list[type["Fault"]] = []


class Fault(HashState):
    """Hash as the reference does, but for one mistake; a subclass's docstring tells its story.

    Attributes:
        law: the name of the law that it breaks.
    """

    law: ClassVar[str]

    def __init_subclass__(cls) -> None:
        FAULTS.append(cls)

    def forward(self, **step: Any) -> torch.Tensor:
        """Hash a step as this port understands it."""
        return super().forward(**self.misread(step))

    def misread(self, step: Step) -> Step:
        """Give the step as this port reads it."""
        return step


class HistoryDroppedAtChunkStart(Fault):
    """Every chunk is hashed as if the request began with it."""

    law = "chunks"

    def misread(self, step: Step) -> Step:
        starts = step["query_start_loc"].long()
        positions = step["positions"].clone()
        for first, end in pairwise(starts):
            positions[first:end] -= positions[first:end][:1].clone()
        return step | {"positions": positions}


class WindowOneTooShort(Fault):
    """The port keeps N - 2 tokens of history, enough for all orders but the longest."""

    law = "chunks"

    def misread(self, step: Step) -> Step:
        window = step["lookback_token_ids"].clone()
        window[:, -1] = -1
        return step | {"lookback_token_ids": window}


class WindowReversed(Fault):
    """The window is taken to hold the oldest token first."""

    law = "chunks"

    def misread(self, step: Step) -> Step:
        return step | {name: step[name].flip(1) for name in ("lookback_token_ids", "lookback_dead_mask")}


class NeighboursWindow(Fault):
    """Each request reads the window row of the request beside it in the batch."""

    law = "company"

    def misread(self, step: Step) -> Step:
        return step | {name: step[name].roll(1, 0) for name in ("lookback_token_ids", "lookback_dead_mask")}


class SlotsKeptOnBlockReuse(Fault):
    """A slot that once holds a token is never written again, though its block gets another owner."""

    law = "placement"

    def misread(self, step: Step) -> Step:
        if self.cache is None:
            return step
        slots = step["slot_mapping"]
        return step | {"slot_mapping": torch.where(self.cache[slots.clamp(min=0)] != 0, -1, slots)}


class BatchLookbackCrossesRequests(Fault):
    """A request's history is whatever stands before it in the batch: the tokens of another request."""

    law = "company"

    def misread(self, step: Step) -> Step:
        window, dead = step["lookback_token_ids"].clone(), step["lookback_dead_mask"].clone()
        for request, first in enumerate(step["query_start_loc"][:-1].tolist()):
            reach = min(first, self.lookback)
            window[request, :reach] = step["input_ids"][first - reach : first].flip(0)
            dead[request, :reach] = step["dead_mask"][first - reach : first].flip(0)
        return step | {"lookback_token_ids": window, "lookback_dead_mask": dead}


class SlotsReadBeforeWritten(Fault):
    """The reads of a step come before its writes: a block that is filled in this very step is still the old one."""

    law = "prefix_hit"

    def forward(self, **step: Any) -> torch.Tensor:
        if self.cache is None:
            return super().forward(**step)
        rows = super().forward(**step | {"slot_mapping": torch.full_like(step["slot_mapping"], -1)})
        super().forward(**step)
        return rows


class DeadInWindowCountsAsAlive(Fault):
    """The window's dead flags are dropped: an image token before the chunk takes part in its n-grams."""

    law = "agreement"

    def misread(self, step: Step) -> Step:
        return step | {"lookback_dead_mask": torch.zeros_like(step["lookback_dead_mask"])}


class DeadDoesNotLatch(Fault):
    """A dead token is padded over, and what stands before it is seen again (in a request that is run whole)."""

    law = "dead_span"

    def forward(self, **step: Any) -> torch.Tensor:
        source = torch.where(step["dead_mask"], DEAD, self.token_map[step["input_ids"].long()])
        padded = torch.cat([torch.full((self.lookback,), DEAD), source])
        values = padded.unfold(0, self.lookback + 1, 1).flip(1)
        values = torch.where(values == DEAD, self.pad_id, values)
        return reference.hash_state.hash_values(values, self.multipliers, self.primes, self.offsets).int()


class DeadSlotHoldsItsId(Fault):
    """A dead token writes its compressed id to its slot, as if it were alive."""

    law = "agreement"

    def forward(self, **step: Any) -> torch.Tensor:
        rows = super().forward(**step)
        if self.cache is not None:
            live = int(step["query_start_loc"][-1])
            ids, slots, dead = (step[name][:live] for name in ("input_ids", "slot_mapping", "dead_mask"))
            wrong = dead & (slots >= 0)
            self.cache[slots[wrong].long()] = self.token_map[ids[wrong].long()].int()
        return rows


class MultipliersOldestFirst(Fault):
    """The multipliers are paired with the tokens from the oldest on."""

    law = "agreement"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.multipliers = self.multipliers.flip(1)


class OneRowOfMultipliers(Fault):
    """All layers hash with the multipliers of the first."""

    law = "agreement"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.multipliers = self.multipliers[:1].expand_as(self.multipliers)


class AddedNotXored(Fault):
    """The products are added up where they should be combined by xor."""

    law = "agreement"

    def forward(self, **step: Any) -> torch.Tensor:
        with patch.object(reference.hash_state, "hash_values", self._added):
            return super().forward(**step)

    @staticmethod
    def _added(
        values: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        mixes = (values[:, None, :] * multipliers).cumsum(2)[:, :, 1:]
        return (mixes[:, :, :, None] % primes).flatten(2) + offsets


class OffsetsInclusive(Fault):
    """A column starts where it should end."""

    law = "agreement"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.offsets = self.offsets + self.primes.flatten(1)


class PadNotCompressed(Fault):
    """N-grams are padded with the pad token's own id, not with what it compresses to."""

    law = "agreement"

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.pad_id = config.engram_pad_token_id


class PadIsZero(Fault):
    """N-grams are padded with 0."""

    law = "agreement"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pad_id = 0


class UnknownIdIndexesFromTheEnd(Fault):
    """The -1 of an unknown id indexes the token map from its end, and counts as the last token."""

    law = "agreement"

    def misread(self, step: Step) -> Step:
        window = step["lookback_token_ids"]
        return step | {"lookback_token_ids": torch.where(window < 0, len(self.token_map) - 1, window)}


class NextHeadsPrime(Fault):
    """Each head reduces by the prime of the head after it."""

    law = "agreement"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.primes = self.primes.roll(-1, 2)


PLANTED = tuple(FAULTS)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_breaks_the_law_that_names_it(fault: type[Fault], worlds: dict[str, World]) -> None:
    """No more cases than a usual run has, and the law finds the mistake: a red that was seen."""
    law = next(law for law in LAWS if law.name == fault.law)
    port = Implementation(fault.__name__, SimpleNamespace(HashState=fault))
    bench = Bench(worlds["another_pad"], port, torch.device("cpu"))
    cases = min(200, settings().max_examples)

    @settings(max_examples=cases, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(law.cases(bench.world))
    def holds(case: object) -> None:
        law.check(bench, case)

    with pytest.raises(LawBroken):
        holds()


class CacheKeptOnRebind(HashState):
    """Another KV cache of equal shape is taken for the one that was bound before."""

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Bind anew only where the number of slots changes."""
        if self.cache is not None and self.block_size and len(self.cache) == len(kv_cache) * self.block_size:
            return True
        return super().ensure_cache(kv_cache)


def test_a_cache_kept_on_rebind_breaks_the_law_of_binding(worlds: dict[str, World]) -> None:
    """No workload binds a KV cache anew: the law of one step that does so must find it."""
    laws = type("Laws", (StepLaws,), {"HashState": CacheKeptOnRebind})()
    laws.world, laws.device = worlds["another_pad"], torch.device("cpu")
    laws.test_another_kv_cache_starts_with_zeros(3)
    with pytest.raises(AssertionError):
        laws.test_another_kv_cache_starts_with_zeros(5)


def test_every_fault_tells_its_story() -> None:
    """One sentence each, and a law that exists."""
    names = {law.name for law in LAWS}
    for fault in PLANTED:
        assert fault.law in names
        assert fault.__doc__
        assert fault.__doc__ != Fault.__doc__
