"""Decide what a step computes: who runs, how far, on which blocks."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from serving.counters import Counters
from serving.placement import Placement
from serving.request import Request
from serving.rng import Rng
from serving.speculation import Drafter


@dataclass(slots=True, eq=False)
class Cut:
    """What one request computes in a step: positions start .. start + count - 1, the drafts last."""

    request: Request
    start: int
    count: int
    drafts: np.ndarray | None

    @property
    def true_end(self) -> int:
        """The position behind the last token that is no draft."""
        return self.start + self.count - (0 if self.drafts is None else len(self.drafts))

    @property
    def num_sampled(self) -> int:
        """Tokens that the model returns: none before the prompt's last chunk, else one more than drafts."""
        request, end = self.request, self.start + self.count
        return end - self.true_end + 1 if end >= request.target else 0


class Scheduler:
    """Keep the requests, share the token budget among them, and preempt where blocks run out.

    Decodes come first, then prompts that were begun, then waiting requests in order of arrival; those behind one that
    has no room wait as well. Without overcommit a request is admitted only if the pool holds its whole length beside
    all that running requests may still take, so that no admitted request ever lacks a block. With it, room for what is
    known now will do, and the request that was admitted last gives way where blocks run out.

    Args:
        placement: gives and takes blocks.
        drafter: gives the drafts of a decode.
        max_requests: requests that run at once.
        overcommit: whether requests may come to lack blocks.
        may_reload: whether a request can come back with its KV alone; every second one that gives way does.
        unruly: whether running requests are planned in a drawn order and passed over now and then; draws from it.
        longest: positions of a request, at most.
        counters: told of drafts and preemptions.
    """

    def __init__(
        self,
        placement: Placement,
        drafter: Drafter,
        *,
        max_requests: int,
        overcommit: bool,
        unruly: Rng | None,
        longest: int | None,
        counters: Counters,
    ) -> None:
        self.placement, self._drafter = placement, drafter
        self._max_requests, self._overcommit, self._unruly = max_requests, overcommit, unruly
        self._longest = longest
        self._counters = counters
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def schedule(self, budget: int, step: int) -> list[Cut]:
        """Plan one step of at most `budget` tokens; step is its index."""
        cuts: list[Cut] = []
        for request in self._order():
            if budget == 0:
                break
            cuts.append(self._cut(request, budget))
            budget -= cuts[-1].count
        # Blocks change hands only when every draft is in: a draft model that fails leaves nothing half done.
        gave_way = self._make_room(cuts)
        for cut in cuts:
            self._place(cut, step)
        while budget and not gave_way and self.waiting and len(self.running) < self._max_requests and self._admit(step):
            cuts.append(self._cut(next(reversed(self.running.values())), budget))
            self._place(cuts[-1], step)
            budget -= cuts[-1].count
        return cuts

    def preempt(self, request: Request, *, reload: bool) -> None:
        """Take a running request's blocks; it waits before all others, to be computed anew or loaded."""
        del self.running[request.id]
        self.placement.release(request)
        request.rewind(reload=reload)
        request.marks.add("preempted, reload" if reload else "preempted, recompute")
        self.waiting.appendleft(request)
        self._counters.preemptions += 1

    def end(self, request: Request, *, aborted: bool = False) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if self.running.pop(request.id, None) is None:
            self.waiting.remove(request)
        self.placement.release(request, aborted=aborted)

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks may be taken beside all that running requests are promised."""
        return self.placement.num_free - self._promised() >= blocks

    def _order(self) -> list[Request]:
        running = list(self.running.values())
        if self._unruly is not None and running:
            turn = self._unruly.below(len(running))
            running = running[turn:] + running[:turn]
            running = [one for at, one in enumerate(running) if at == 0 or not self._unruly.chance(1, 4)]
        decodes = [request for request in running if not request.prefills]
        return decodes + [request for request in running if request.prefills]

    def _cut(self, request: Request, budget: int) -> Cut:
        if request.prefills:
            return Cut(request, request.computed, min(request.target - request.computed, budget), None)
        room = budget - 1 if self._longest is None else min(budget - 1, self._longest - request.length)
        drafts = self._drafter.draft(request.id, request.stream[: request.length], room)
        return Cut(request, request.computed, 1 + (0 if drafts is None else len(drafts)), drafts)

    def _make_room(self, cuts: list[Cut]) -> bool:
        if not self._overcommit:
            return False
        gave_way = False
        while sum(self.placement.need(c.request, c.start + c.count) for c in cuts) > self.placement.num_free:
            victim = next(reversed(self.running.values()))
            cuts[:] = [cut for cut in cuts if cut.request is not victim]
            self.preempt(victim, reload=self._counters.preemptions % 2 == 1 and self.placement.may_reload(victim))
            gave_way = True
        return gave_way

    def _place(self, cut: Cut, step: int) -> None:
        self._counters.drafts += cut.start + cut.count - cut.true_end
        self.placement.grow(cut.request, cut.start, cut.start + cut.count)
        self.placement.publish(cut.request, cut.true_end, step)

    def _promised(self) -> int:
        if self._overcommit:
            return 0
        return sum(
            self.placement.most(other) - len(other.blocks) - len(other.others) for other in self.running.values()
        )

    def _admit(self, step: int) -> bool:
        request = self.waiting[0]
        hits = self.placement.find_hits(request)
        if not self.has_room(self.placement.price(request, hits, whole=not self._overcommit)):
            return False
        self.running[request.id] = self.waiting.popleft()
        self.placement.enter(request, hits, step)
        return True
