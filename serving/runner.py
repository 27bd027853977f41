"""What the host knows, and the tensors that it builds from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from serving.block_pool import BlockPool
from serving.config import EngineConfig
from serving.events import Observer
from serving.policy import Policy
from serving.request import Request
from serving.rng import Rng
from serving.scheduler import Cut
from serving.step import Piece, Step

__all__ = ["HostMirror", "Policy", "Runner"]


class HostMirror:
    """Keep the host's copy of one stream, -1 where it does not know, with D unknown positions before position 0."""

    def __init__(self, request: Request, lookback: int) -> None:
        self._request = request
        self._lookback = lookback
        self._tokens = np.full(lookback + request.max_length, -1, np.int64)
        self._dead = np.zeros(lookback + request.max_length, np.bool_)

    def learn(self, begin: int, end: int) -> None:
        """Copy positions begin .. end - 1 of the true stream."""
        here = slice(self._lookback + begin, self._lookback + end)
        self._tokens[here] = self._request.stream[begin:end]
        self._dead[here] = self._request.dead[begin:end]

    def copy(self, other: HostMirror, end: int) -> None:
        """Take over what another mirror knows of the positions below `end`."""
        here = slice(0, self._lookback + end)
        self._tokens[here], self._dead[here] = other._tokens[here], other._dead[here]

    def window(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and flags of positions start - D .. start - 1, oldest first."""
        return self._tokens[start : start + self._lookback], self._dead[start : start + self._lookback]


class Runner:
    """Own the host mirrors and turn a plan into a step.

    Args:
        config: how the engine runs.
        rng: draws the stale data.
    """

    def __init__(self, config: EngineConfig, rng: Rng) -> None:
        self._config, self._rng = config, rng
        self._policy, self._block_size, self._ids_dtype = config.policy, config.block_size, config.ids_dtype
        self._observer = Observer(config)
        self._mirrors: dict[int, HostMirror] = {}  # by handle, as the engine's user knows a request
        self._late: deque[list[tuple[HostMirror, int, int]]] = deque()  # a list an update, oldest first
        self._before: dict[str, np.ndarray] = {}

    def welcome(self, request: Request) -> None:
        """Start the mirror of a request that was added, or that lost its blocks: then the host waits for its stream."""
        if not self._config.sound and self._policy is Policy.LAGGING and request.handle in self._mirrors:
            return
        mirror = self._mirrors[request.handle] = HostMirror(request, self._config.lookback)
        known = {Policy.SLOTS_ONLY: request.imported, Policy.PROMPT_ONLY: request.prompt_length}
        mirror.learn(0, known.get(self._policy, request.length))

    def loaded(self, request: Request) -> None:
        """Hear that blocks of a request were loaded, so that no slot knows their tokens."""
        if self._policy is Policy.SLOTS_ONLY:
            for positions in request.slotless:
                self._mirrors[request.handle].learn(positions.start, positions.stop)

    def fork(self, parent: Request, child: Request) -> None:
        """Start the mirror of a fork: it knows what the parent's does, and as late."""
        mirror, source = HostMirror(child, self._config.lookback), self._mirrors[parent.handle]
        mirror.copy(source, child.length - 1)
        self._mirrors[child.handle] = mirror
        if self._policy.knows_drafts:
            mirror.learn(child.length - 1, child.length)
        for update in self._late:
            update += [(mirror, begin, end) for owner, begin, end in update if owner is source]

    def forget(self, request: Request) -> None:
        """Drop the mirror of a request that left."""
        del self._mirrors[request.handle]

    def arrive(self) -> None:
        """Let the copies that the update `lag` before this one began reach the host."""
        if len(self._late) == self._config.lag:
            for mirror, begin, end in self._late.popleft():
                mirror.learn(begin, end)
        self._late.append([])

    def appended(self, request: Request, begin: int) -> None:
        """Hear that positions begin .. length - 1 of a request were sampled just now."""
        mirror = self._mirrors[request.handle]
        if self._policy is Policy.LAGGING:
            self._late[-1].append((mirror, begin, request.length))
        elif self._policy in (Policy.KNOWN_IDS, Policy.STATELESS):
            mirror.learn(begin, request.length)

    def build(
        self,
        index: int,
        cuts: Sequence[Cut],
        pool: BlockPool,
        *,
        budget: int,
        slot_copies: tuple[tuple[int, int], ...] = (),
        binding: int = 0,
    ) -> Step:
        """Build a step from its plan, in batch order; pads it, and fills the padding with stale data."""
        starts = np.array([cut.start + cut.request.offset for cut in cuts], np.int64)
        counts = np.array([cut.count for cut in cuts], np.int64)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        rows = np.repeat(np.arange(len(cuts)), counts)
        positions = np.arange(total) - np.repeat(ends - counts - starts, counts)
        size, requests = _bucket(total, self._config.pad_tokens), _bucket(len(cuts), self._config.pad_requests)
        padded = size > total or requests > len(cuts)
        mirrors = [self._mirrors[cut.request.handle] for cut in cuts]
        windows = [mirror.window(cut.start) for mirror, cut in zip(mirrors, cuts, strict=True)]
        lookback_ids, lookback_dead = (
            np.concatenate(half).reshape(len(cuts), -1)[:, ::-1].copy() for half in zip(*windows, strict=True)
        )
        late = self._updates_late(cuts, mirrors, lookback_ids)
        events = self._observer.watch(cuts, pool, index=index, budget=budget, padded=padded, late=late)
        pieces = [_piece(cut, names) for cut, names in zip(cuts, events, strict=True)]
        slot_mapping = block_table = None
        if self._policy.slot_cache:
            table = _table(cuts, self._block_size)
            blocks = table[rows, positions // self._block_size].astype(np.int64)
            slots = blocks * self._block_size + positions % self._block_size
            slot_mapping = self._tensor("slots", slots, size)
            block_table = self._tensor("", table, requests)
        boundaries = np.full(requests + 1, total, np.int32)
        boundaries[0], boundaries[1 : len(cuts) + 1] = 0, ends
        return Step(
            index=index,
            input_ids=self._tensor("ids", np.concatenate([p.tokens for p in pieces]), size).to(self._ids_dtype),
            positions=self._tensor("positions", positions, size),
            query_start_loc=torch.from_numpy(boundaries),
            dead_mask=self._tensor("dead", np.concatenate([p.token_dead for p in pieces]), size),
            lookback_token_ids=self._tensor("lookback", lookback_ids, requests).to(self._ids_dtype),
            lookback_dead_mask=self._tensor("lookback dead", lookback_dead, requests),
            slot_mapping=slot_mapping,
            block_table=block_table,
            pieces=tuple(pieces),
            num_tokens=total,
            slot_copies=slot_copies,
            binding=binding,
        )

    def _updates_late(
        self, cuts: Sequence[Cut], mirrors: Sequence[HostMirror], lookback_ids: np.ndarray
    ) -> dict[int, int]:
        """By row whose window lacks tokens: how many updates have not reached the host, 1 or 2 for more."""
        if not any(self._late):
            return {}
        starts = np.array([cut.start for cut in cuts])
        inside = starts[:, None] - 1 - np.arange(lookback_ids.shape[1]) >= 0
        ages: dict[int, int] = {}
        for age, update in enumerate(reversed(self._late), start=1):
            ages |= dict.fromkeys((id(mirror) for mirror, _, _ in update), min(age, 2))
        lacking = np.flatnonzero((inside & (lookback_ids < 0)).any(1)).tolist()
        return {row: ages[id(mirrors[row])] for row in lacking if id(mirrors[row]) in ages}

    def _tensor(self, name: str, live: np.ndarray, size: int) -> torch.Tensor:
        # Stale: rows of this step and the one before, from a drawn place on, so that ids and slots do not match.
        if self._config.pad_tokens or self._config.pad_requests:
            stale = np.concatenate([self._before.get(name, live[:0]), live])
            if name:
                self._before[name] = live.copy()
            if size > len(live):
                chosen = (self._rng.below(len(stale)) + np.arange(size - len(live))) % len(stale)
                live = np.concatenate([live, stale[chosen]])
        return torch.from_numpy(live)


def _bucket(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= count), count)


def _piece(cut: Cut, events: frozenset[str]) -> Piece:
    request, start, end = cut.request, cut.start, cut.start + cut.count
    tokens, token_dead = request.stream[start:end], request.dead[start:end]
    if cut.drafts is not None:
        tokens = np.concatenate([request.stream[start : cut.true_end], cut.drafts])
        token_dead = np.zeros(cut.count, np.bool_)
    return Piece(
        request_id=request.id,
        stream=request.stream[: request.length],
        dead=request.dead[: request.length],
        start=start,
        tokens=tokens,
        token_dead=token_dead,
        num_drafts=end - cut.true_end,
        num_sampled=cut.num_sampled,
        events=events,
        handle=request.handle,
        offset=request.offset,
    )


def _table(cuts: Sequence[Cut], block_size: int) -> np.ndarray:
    before = [cut.request.offset // block_size for cut in cuts]
    counts = [len(cut.request.blocks) for cut in cuts]
    table = np.zeros((len(cuts), max(map(sum, zip(before, counts, strict=True)))), np.int32)
    for row, cut, first, count in zip(table, cuts, before, counts, strict=True):
        row[first : first + count] = cut.request.table[:count]
    return table
