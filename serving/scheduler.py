"""Decide what a step computes: who runs, how far, on which blocks."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from serving.block_pool import BlockPool
from serving.counters import Counters
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.speculation import Drafter

NEVER = -1  # the step that wrote an imported block


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
        return end - self.true_end + 1 if end >= request.prompt_length else 0


class Scheduler:
    """Keep the requests, share the token budget among them, and give them blocks.

    Decodes come first, then prompts that were begun, then waiting requests in order of arrival. A waiting request is
    admitted only if the pool holds its whole length beside all that running requests may still take, so that no
    admitted request ever lacks a block; those behind it wait as well.

    Args:
        pool: the blocks.
        cache: the shared prefixes; None shares nothing.
        drafter: gives the drafts of a decode.
        block_size: B.
        max_requests: requests that run at once.
        share_imports: whether blocks with imported positions may be hit by other requests.
        counters: told of hits, drafts and evictions.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache | None,
        drafter: Drafter,
        *,
        block_size: int,
        max_requests: int,
        share_imports: bool,
        counters: Counters,
    ) -> None:
        self._pool, self._cache, self._drafter = pool, cache, drafter
        self._block_size, self._max_requests = block_size, max_requests
        self._share_imports = share_imports
        self._counters = counters
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def schedule(self, budget: int, step: int) -> list[Cut]:
        """Plan one step of at most `budget` tokens; step is its index."""
        cuts: list[Cut] = []
        decodes = [request for request in self.running.values() if not request.prefills]
        prompts = [request for request in self.running.values() if request.prefills]
        for request in decodes + prompts:
            if budget == 0:
                break
            cuts.append(self._cut(request, budget))
            budget -= cuts[-1].count
        # Blocks change hands only when every draft is in: a draft model that fails leaves nothing half done.
        for cut in cuts:
            self._place(cut, step)
        while budget and self.waiting and len(self.running) < self._max_requests and self._admit(step):
            cuts.append(self._cut(next(reversed(self.running.values())), budget))
            self._place(cuts[-1], step)
            budget -= cuts[-1].count
        return cuts

    def publish(self, request: Request, end: int, step: int) -> None:
        """Offer the request's full blocks below `end` to others; their tokens are true and written by this step."""
        if self._cache is None:
            return
        for index in range(request.published, end // self._block_size):
            filled = step if (index + 1) * self._block_size > request.imported else NEVER
            self._cache.publish(request.key(index), request.blocks[index], filled)
            request.published = index + 1

    def end(self, request: Request) -> None:
        """Take a request out and free its blocks, the last first: a prefix outlives what follows it."""
        del self.running[request.id]
        for block in reversed(request.blocks):
            self._pool.release(block)

    def _cut(self, request: Request, budget: int) -> Cut:
        if request.prefills:
            return Cut(request, request.computed, min(request.prompt_length - request.computed, budget), None)
        drafts = self._drafter.draft(request.id, request.stream[: request.length], budget - 1)
        return Cut(request, request.computed, 1 + (0 if drafts is None else len(drafts)), drafts)

    def _place(self, cut: Cut, step: int) -> None:
        request, end = cut.request, cut.start + cut.count
        while len(request.blocks) * self._block_size < end:
            block = self._pool.take()
            if self._cache is not None and self._cache.drop(block):
                self._counters.evictions += 1
            request.hold(block)
        self._counters.drafts += end - cut.true_end
        self.publish(request, cut.true_end, step)

    def _admit(self, step: int) -> bool:
        request = self.waiting[0]
        hits = self._hits(request)
        promised = sum(other.max_blocks - len(other.blocks) for other in self.running.values())
        living = sum(self._pool.references(block) > 0 for block in hits)
        if self._pool.num_free - promised < request.max_blocks - living:
            return False
        self.running[request.id] = self.waiting.popleft()
        for block in hits:
            self._pool.share(block)
            request.hold(block)
        request.published = len(hits)
        request.entry = request.computed = request.imported or len(hits) * self._block_size
        if request.imported and not self._share_imports:
            request.published = -(-request.imported // self._block_size)
        self._count_hits(request, hits, step)
        return True

    def _hits(self, request: Request) -> list[int]:
        # The last prompt token is always computed: its row is what the first sample comes from.
        hits: list[int] = []
        if self._cache is not None and not request.imported:
            for index in range((request.prompt_length - 1) // self._block_size):
                block = self._cache.find(request.key(index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _count_hits(self, request: Request, hits: list[int], step: int) -> None:
        if hits and self._cache is not None:
            request.hit_in_step = any(self._cache.filled_in(block) == step for block in hits)
            self._counters.prefix_hits += 1
            self._counters.hit_tokens += len(hits) * self._block_size
            self._counters.same_step_hits += request.hit_in_step
