"""What the host knows, and the tensors that it builds from it."""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch

from serving.block_pool import BlockPool
from serving.events import events_of
from serving.request import Request
from serving.rng import Rng
from serving.scheduler import Cut
from serving.step import Piece, Step


class Policy(StrEnum):
    """Say what the lookback windows hold; -1 stands wherever the policy does not know."""

    STATELESS = "stateless"  # every id, from the history on the device; no slots
    PROMPT_ONLY = "prompt_only"  # prompt positions
    KNOWN_IDS = "known_ids"  # every true id
    LAGGING = "lagging"  # every true id that reached the host: what the last update appended has not
    SLOTS_ONLY = "slots_only"  # imported positions, for which there is no slot

    @property
    def slot_cache(self) -> bool:
        """Whether steps carry slots and block tables."""
        return self is not Policy.STATELESS


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

    def window(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and flags of positions start - D .. start - 1, oldest first."""
        return self._tokens[start : start + self._lookback], self._dead[start : start + self._lookback]


class Runner:
    """Own the host mirrors and turn a plan into a step.

    Args:
        policy: what windows hold, and whether there are slots.
        block_size: B.
        lookback: D.
        ids_dtype: torch.int32 or torch.int64.
        pad_tokens: bucket sizes of T, rising; a step above the last one is not padded.
        pad_requests: bucket sizes of R.
        rng: draws the batch order and the stale data.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        block_size: int,
        lookback: int,
        ids_dtype: torch.dtype,
        pad_tokens: Sequence[int],
        pad_requests: Sequence[int],
        rng: Rng,
    ) -> None:
        self._policy, self._block_size, self._lookback, self._ids_dtype = policy, block_size, lookback, ids_dtype
        self._pad_tokens, self._pad_requests, self._rng = pad_tokens, pad_requests, rng
        self._mirrors: dict[int, HostMirror] = {}
        self._late: list[tuple[HostMirror, int, int]] = []
        self._before: dict[str, np.ndarray] = {}

    def welcome(self, request: Request) -> None:
        """Start the mirror of a request that was added."""
        mirror = self._mirrors[request.id] = HostMirror(request, self._lookback)
        mirror.learn(0, request.imported if self._policy is Policy.SLOTS_ONLY else request.prompt_length)

    def forget(self, request: Request) -> None:
        """Drop the mirror of a request that left."""
        del self._mirrors[request.id]

    def arrive(self) -> None:
        """Let the copies that the update before this one began reach the host."""
        for mirror, begin, end in self._late:
            mirror.learn(begin, end)
        self._late.clear()

    def appended(self, request: Request, begin: int) -> None:
        """Hear that positions begin .. length - 1 of a request were sampled just now."""
        mirror = self._mirrors[request.id]
        if self._policy is Policy.LAGGING:
            self._late.append((mirror, begin, request.length))
        elif self._policy in (Policy.KNOWN_IDS, Policy.STATELESS):
            mirror.learn(begin, request.length)

    def build(self, index: int, cuts: Sequence[Cut], pool: BlockPool) -> Step:
        """Build a step from its plan, in batch order; pads it, and fills the padding with stale data."""
        starts = np.array([cut.start for cut in cuts], np.int64)
        counts = np.array([cut.count for cut in cuts], np.int64)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        rows = np.repeat(np.arange(len(cuts)), counts)
        positions = np.arange(total) - np.repeat(ends - counts - starts, counts)
        size, requests = _bucket(total, self._pad_tokens), _bucket(len(cuts), self._pad_requests)
        padded = size > total or requests > len(cuts)
        pieces = [self._piece(cut, pool, padded) for cut in cuts]
        windows = [self._mirrors[cut.request.id].window(cut.start) for cut in cuts]
        lookback_ids, lookback_dead = (
            np.concatenate(half).reshape(len(cuts), -1)[:, ::-1].copy() for half in zip(*windows, strict=True)
        )
        slot_mapping = block_table = None
        if self._policy.slot_cache:
            table = _table(cuts)
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
        )

    def _piece(self, cut: Cut, pool: BlockPool, padded: bool) -> Piece:
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
            events=events_of(cut, pool=pool, block_size=self._block_size, lookback=self._lookback, padded=padded),
        )

    def _tensor(self, name: str, live: np.ndarray, size: int) -> torch.Tensor:
        # Stale: rows of this step and the one before, from a drawn place on, so that ids and slots do not match.
        if self._pad_tokens or self._pad_requests:
            stale = np.concatenate([self._before.get(name, live[:0]), live])
            if name:
                self._before[name] = live.copy()
            if size > len(live):
                chosen = (self._rng.below(len(stale)) + np.arange(size - len(live))) % len(stale)
                live = np.concatenate([live, stale[chosen]])
        return torch.from_numpy(live)


def _bucket(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= count), count)


def _table(cuts: Sequence[Cut]) -> np.ndarray:
    table = np.zeros((len(cuts), max(len(cut.request.blocks) for cut in cuts)), np.int32)
    for row, cut in zip(table, cuts, strict=True):
        row[: len(cut.request.blocks)] = cut.request.table[: len(cut.request.blocks)]
    return table
