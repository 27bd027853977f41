"""Name what a piece exercises."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.block_pool import BlockPool
from serving.config import EngineConfig
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Cut


@dataclass
class Observer:
    """Watch an engine's steps and name what each piece of them exercises.

    Args:
        config: how the engine runs.
    """

    config: EngineConfig
    _ranks: dict[int, int] = field(default_factory=dict)
    _budget: int | None = None

    def __post_init__(self) -> None:
        config = self.config
        sizes = {1: "one-token blocks", 256: "large blocks"}
        always = [sizes.get(config.block_size, "")] if config.policy.slot_cache else []
        self._always = [*filter(None, always), *(["hybrid groups"] if config.other_group else [])]

    def watch(
        self, cuts: Sequence[Cut], pool: BlockPool, *, index: int, budget: int, padded: bool, late: Mapping[int, int]
    ) -> list[frozenset[str]]:
        """Return the keys of `step.EVENT_MEANINGS` that hold for each piece.

        Args:
            cuts: the pieces as planned, in batch order, their blocks already given.
            pool: knows which blocks had an owner before.
            index: of the step.
            budget: tokens that the step might have had.
            padded: whether the step has padding.
            late: by row whose window lacks tokens, the updates that brought them: 1, or 2 for more.
        """
        common = list(self._always)
        if padded:
            common.append("padding")
        if self._budget is not None and budget != self._budget:
            common.append("budget change")
        self._budget = budget
        ragged = len({len(cut.drafts) for cut in cuts if cut.drafts is not None}) > 1
        reordered = self._reordered(cuts)
        events = []
        before: Cut | None = None
        for row, cut in enumerate(cuts):
            request = cut.request
            names = [*common, *request.marks] if request.marks else common.copy()
            if row in late:
                names += ("host lags", "host lags by two")[: late[row]]
            if reordered[row]:
                names.append("reordered")
            if ragged and cut.drafts is not None:
                names.append("ragged verify")
            self._of_request(names, cut, before, index)
            self._of_blocks(names, request, cut.start, pool)
            self._of_tokens(names, cut)
            events.append(frozenset(names))
            before = cut
        for cut in cuts:
            cut.request.marks.clear()
            cut.request.last_step = index
        return events

    def _reordered(self, cuts: Sequence[Cut]) -> list[bool]:
        ranks = {cut.request.id: row for row, cut in enumerate(cuts)}
        least, found = len(self._ranks), [False] * len(cuts)
        for row in range(len(cuts) - 1, -1, -1):
            rank = self._ranks.get(cuts[row].request.id)
            if rank is not None:
                found[row], least = rank > least, min(rank, least)
        self._ranks = ranks
        return found

    def _of_request(self, names: list[str], cut: Cut, before: Cut | None, index: int) -> None:
        request = cut.request
        if cut.start != request.entry and request.last_step < index - 1:
            names.append("starved")
        packed = request.pack is not None and before is not None and before.request.pack == request.pack
        if packed and before is not None and cut.start == before.start == 0:
            names.append("packed documents")
        if request.offset + cut.start > 2**31:
            names.append("long position")
        if self.config.max_model_length is not None and cut.start + cut.count >= self.config.max_model_length - 1:
            names.append("model's limit")

    def _of_blocks(self, names: list[str], request: Request, start: int, pool: BlockPool) -> None:
        size = self.config.block_size
        block = request.blocks[start // size]
        if pool.owners(block) > 1:
            names.append("block reuse")
        if pool.from_aborted(block):
            names.append("after abort")
        if request.evicted and self.config.policy.slot_cache:
            names.append("sliding window")
            if max(0, start - self.config.lookback) // size == request.evicted:
                names.append("window edge")

    def _of_tokens(self, names: list[str], cut: Cut) -> None:
        request, start, end = cut.request, cut.start, cut.start + cut.count
        names += _decode_events(cut) if start >= request.target else _prompt_events(cut, self.config.block_size)
        reach = max(0, start - self.config.lookback)
        if request.dead_end > reach and request.dead[reach:end].any():
            names.append("dead span")
            if "chunk" in names and (request.dead[start] or request.dead[end - 1]):
                names.append("dead at chunk edge")
            if bisect_left(request.span_starts, end) >= 2:
                names.append("several images")


def _decode_events(cut: Cut) -> list[str]:
    request = cut.request
    names = ["decode"]
    if cut.drafts is not None:
        names += ["verify", "several drafts"] if len(cut.drafts) > 1 else ["verify"]
    if request.accepted < request.drafted:
        names.append("after rejection")
        if request.accepted == 0:
            names.append("all rejected")
    return names


def _prompt_events(cut: Cut, block_size: int) -> list[str]:
    request, start = cut.request, cut.start
    first, last = start == request.entry, start + cut.count == request.target
    names = []
    if not (first and last):
        names.append("chunk")
    elif start == 0:
        names.append("prompt whole")
    if first and request.imported:
        names += ["import", "import at block edge"] if start % block_size == 0 else ["import"]
    elif first and start > 0:
        names.append("prefix hit")
        if request.hit_in_step:
            names.append("same-step hit")
        if start == request.target - 1:
            names.append("one token left")
    return names
