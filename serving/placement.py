"""Where requests lie: which blocks a request is given, hits, loads, shares and gives up."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from serving.block_pool import NULL_BLOCK, BlockPool
from serving.config import EngineConfig
from serving.counters import Counters
from serving.policy import Policy
from serving.prefix_cache import HostStore, PrefixCache
from serving.request import Request

NEVER = -1  # the step that wrote a block which was loaded


LOAD = -1  # in the place of a block that only the host has


@dataclass(frozen=True)
class Hits:
    """Name the blocks that a request starts on, by index: a cached one, LOAD, or the null block."""

    blocks: tuple[int, ...] = ()


class Placement:
    """Give requests blocks of the pool and take them back.

    Args:
        config: how the engine runs.
        pool: the blocks.
        counters: told of hits, loads and evictions.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters) -> None:
        self._config, self._size = config, config.block_size
        self._counters = counters
        self._store = HostStore(config.offload_blocks)
        self._slot_copies: dict[int, tuple[int, int]] = {}
        self._cache: PrefixCache | None = None
        self.bind(pool)

    def bind(self, pool: BlockPool) -> None:
        """Use another pool; of the one before, only what the host has room to store is left."""
        if self._cache is not None:
            for key in self._cache.keys:
                self._store.save(key)
        self.pool = pool
        self._cache = PrefixCache() if self._config.share_prefixes else None
        self._slot_copies.clear()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.num_free

    def most(self, request: Request) -> int:
        """Blocks of all groups that a request may come to hold."""
        return request.max_blocks + self._of_other_group(request.max_blocks * self._size)

    def need(self, request: Request, end: int) -> int:
        """Blocks that a request lacks for its positions below `end`."""
        own = max(0, -(-end // self._size) - len(request.blocks))
        return own + max(0, self._of_other_group(end) - len(request.others))

    def may_reload(self, request: Request) -> bool:
        """Whether windows cover what is loaded: with prompt-only windows no generated token may be in it."""
        prompt_only = self._config.policy is Policy.PROMPT_ONLY and self._config.sound
        return not prompt_only or request.computed <= request.prompt_length

    def find_hits(self, request: Request) -> Hits:
        """Find the blocks that a waiting request could start on.

        The last of its known tokens is always computed: its row is what the next sample comes from. Without a sliding
        window these are the longest run of blocks from the first on; with one, the window's blocks are enough.
        """
        if self._cache is None or request.imported or request.offset:
            return Hits()
        found: list[int] = []
        best = run = 0
        for index in range((request.target - 1) // self._size):
            block = self._find(request, index)
            run = run + 1 if block is not None else 0
            found.append(NULL_BLOCK if block is None else block)
            end = (index + 1) * self._size
            if run >= index + 1 - self._first_kept(end) and end % self._stride == 0:
                best = index + 1
            if run == 0 and self._config.sliding_window is None:
                break
        keep = self._first_kept(best * self._size)
        return Hits(tuple(NULL_BLOCK if index < keep else block for index, block in enumerate(found[:best])))

    def price(self, request: Request, hits: Hits, *, whole: bool) -> int:
        """Blocks that an admission takes from the free ones, for the request's whole length or for what is known."""
        keep = self._first_kept(len(hits.blocks) * self._size)
        living = sum(block != LOAD and self.pool.references(block) > 0 for block in hits.blocks[keep:])
        if whole:
            return self.most(request) - living - keep
        return self.need(request, request.target) - living - keep

    def enter(self, request: Request, hits: Hits, step: int) -> None:
        """Give an admitted request the blocks of its hits; those that the host has are loaded into fresh ones."""
        size, keep = self._size, self._first_kept(len(hits.blocks) * self._size)
        for block in hits.blocks[keep:]:
            if block != LOAD:
                self.pool.share(block)
        for index, block in enumerate(hits.blocks):
            request.hold(self._load(request, index) if block == LOAD else block)
        request.published, request.evicted = len(hits.blocks), keep
        request.entry = request.computed = request.imported or len(hits.blocks) * size
        while len(request.others) < self._of_other_group(request.computed):
            request.others.append(self._take())
        if hits.blocks and self._cache is not None:
            shared = [block for block in hits.blocks[keep:] if block != LOAD]
            request.hit_in_step = any(self._cache.filled_in(block) == step for block in shared)
            self._counters.prefix_hits += 1
            self._counters.hit_tokens += len(hits.blocks) * size
            self._counters.same_step_hits += request.hit_in_step

    def grow(self, request: Request, start: int, end: int) -> None:
        """Give a request the blocks for positions start .. end - 1; those far behind its window are given up first."""
        keep = self._first_kept(start)
        for index in range(request.evicted, min(keep, len(request.blocks))):
            self.pool.release(request.give_up(index))
            self._counters.given_up += 1
        while len(request.blocks) * self._size < end:
            if len(request.blocks) >= keep:
                request.hold(self._take())
            else:
                request.hold(NULL_BLOCK)
                request.evicted = len(request.blocks)
        if self._config.other_group:
            while len(request.others) < self._of_other_group(end):
                request.others.append(self._take())

    def publish(self, request: Request, end: int, step: int) -> None:
        """Offer the request's full blocks below `end` to others; their tokens are true and written by this step."""
        if self._cache is None or request.published >= end // self._size:
            return
        for index in range(request.published, end // self._size):
            request.published = index + 1
            if index < request.evicted:
                continue
            begin, block_end = index * self._size, (index + 1) * self._size
            slotless = begin < request.imported or any(begin < r.stop and r.start < block_end for r in request.slotless)
            if slotless and self._config.policy is Policy.SLOTS_ONLY and self._config.sound:
                continue
            filled = step if block_end > request.imported else NEVER
            self._cache.publish(request.key(index), request.blocks[index], filled, slotless=slotless)

    def fork(self, parent: Request, child: Request, *, copy_slots: bool) -> None:
        """Let a child share its parent's computed blocks; the one that both will write is copied."""
        whole, rest = divmod(parent.computed, self._size)
        for index in range(whole):
            if index >= parent.evicted:
                self.pool.share(parent.blocks[index])
            child.hold(parent.blocks[index])
        child.published, child.evicted = min(parent.published, whole), min(parent.evicted, whole)
        while len(child.others) < self._of_other_group(parent.computed):
            child.others.append(self._take())
        if rest == 0:
            return
        child.hold(self._take())
        child.marks.add("copy on write")
        if copy_slots:
            self._copy_slots(parent.blocks[whole] * self._size, child.blocks[whole] * self._size, rest)
        else:
            child.slotless.append(range(whole * self._size, parent.computed))

    def fork_price(self, parent: Request) -> int:
        """Blocks that a fork may come to take."""
        return self.most(parent) - parent.computed // self._size

    def copies(self) -> tuple[tuple[int, int], ...]:
        """Hand out the slot copies of forks since the last step: all sources are to be read before any is written."""
        pairs = tuple((source, target) for target, (source, _) in self._slot_copies.items())
        self._slot_copies.clear()
        return pairs

    def release(self, request: Request, *, aborted: bool = False) -> None:
        """Free a request's blocks, the last first: a prefix outlives what follows it."""
        for block in reversed(request.others):
            self.pool.release(block)
        for block in reversed(request.blocks[request.evicted :]):
            self.pool.release(block, aborted=aborted)

    @property
    def _stride(self) -> int:
        return lcm(self._size, self._config.other_group or 1)

    def _of_other_group(self, end: int) -> int:
        return -(-end // self._config.other_group) if self._config.other_group else 0

    def _first_kept(self, start: int) -> int:
        # Attention at position `start` reads the window's positions start - W + 1 .. start.
        window = self._config.sliding_window
        return 0 if window is None else max(0, start - window + 1) // self._size

    def _find(self, request: Request, index: int) -> int | None:
        assert self._cache is not None
        key, known = request.key(index), (index + 1) * self._size <= request.prompt_length
        covered = known or self._config.policy is not Policy.PROMPT_ONLY or not self._config.sound
        block = self._cache.find(key)
        if block is not None:
            return block if covered or not self._cache.slotless(block) else None
        return LOAD if covered and key in self._store else None

    def _load(self, request: Request, index: int) -> int:
        block, key = self._take(), request.key(index)
        self._store.save(key)
        request.slotless.append(range(index * self._size, (index + 1) * self._size))
        request.marks.add("off-load reload")
        self._counters.loaded_blocks += 1
        if self._cache is not None and (self._config.policy is not Policy.SLOTS_ONLY or not self._config.sound):
            self._cache.publish(key, block, NEVER, slotless=True)
        return block

    def _take(self) -> int:
        block = self.pool.take()
        key = self._cache.drop(block) if self._cache is not None else None
        if key is not None:
            self._counters.evictions += 1
            self._store.save(key)
        return block

    def _copy_slots(self, source: int, target: int, count: int) -> None:
        roots = [self._slot_copies.get(slot, (slot, slot))[0] for slot in range(source, source + count)]
        for offset, root in enumerate(roots):
            self._slot_copies[target + offset] = root, target + offset
