"""The engine: requests go in, steps come out, sampled tokens go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
import torch

from serving.block_pool import BlockPool
from serving.checks import check_flags, check_ids, check_int
from serving.config import EngineConfig
from serving.counters import Counters
from serving.placement import Placement
from serving.policy import Policy
from serving.request import Request
from serving.rng import Rng
from serving.runner import Runner
from serving.scheduler import Cut, Scheduler
from serving.speculation import Drafter, Propose, check_sampled
from serving.step import Step
from serving.transfer import Export

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Serve requests step by step: `step()` plans and builds one forward call, `update()` takes what it sampled.

    The two alternate; only `abort` may come between them. Nothing here depends on time or threads: equal config and
    calls give equal tensors.

    Args:
        config: how to run.
        propose: the draft model, (request id, true stream so far) -> up to num_drafts ids; never asked if those are 0.
    """

    def __init__(self, config: EngineConfig, propose: Propose | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.kv_cache = torch.zeros(config.num_blocks, 1)
        self._bindings = 0
        self._largest = int(torch.iinfo(config.ids_dtype).max)
        self._rng = Rng(config.seed)
        self._placement = Placement(config, self._new_pool(config.num_blocks), self.counters)
        self._scheduler = Scheduler(
            self._placement,
            Drafter(propose, config.num_drafts, self._largest),
            max_requests=config.max_requests,
            overcommit=config.overcommit,
            unruly=self._rng if config.unruly else None,
            longest=config.max_model_length,
            counters=self.counters,
        )
        self._runner = Runner(config, self._rng)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._handles: list[int] = []  # those of requests that are gone
        self._next_handle = 0
        self._next_pack = 0
        self._in_flight: list[Cut] | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache that is bound: blocks * block_size; 0 while asleep."""
        return len(self.kv_cache) * self.config.block_size

    @property
    def finished(self) -> bool:
        """Whether no request waits or runs."""
        return not self._scheduler.waiting and not self._scheduler.running

    @property
    def asleep(self) -> bool:
        """Whether no KV cache is bound."""
        return len(self.kv_cache) == 0

    @property
    def decoding(self) -> list[int]:
        """Running requests whose known tokens but the newest are computed, in order of admission."""
        return [request.id for request in self._scheduler.running.values() if not request.prefills]

    @property
    def running(self) -> list[int]:
        """Requests that hold blocks, in order of admission."""
        return list(self._scheduler.running)

    def stream(self, request_id: int) -> np.ndarray:
        """Return the true tokens of a request so far, read only; also after it ended, until `forget`.

        Raises:
            KeyError: no such request.
        """
        request = self._request(request_id)
        return request.stream[: request.length]

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        dead: Sequence[bool] | np.ndarray | None = None,
        max_new_tokens: int,
        imported: int = 0,
        offset: int = 0,
    ) -> int:
        """Queue a request and return its id.

        Args:
            prompt: [n >= 1] token ids.
            dead: [n] flags of masked tokens (an image span); none by default.
            max_new_tokens: tokens to sample, at least 1; fewer are where the model's length ends before.
            imported: leading prompt tokens whose KV arrives from elsewhere, slots not; at most n - 1.
            offset: positions before the prompt, a multiple of block_size, whose KV arrives as well and whose ids nobody
                kept; then the import must have as many tokens as a lookback reaches.

        Raises:
            TypeError, ValueError: an argument of the wrong type or out of range, or a request that the pool can never
                hold: ceil((n + max_new_tokens + num_drafts) / B) blocks.
        """
        tokens = check_ids("prompt", prompt, self._largest)
        longest = self.config.max_model_length
        check_int("prompt length", len(tokens), 1, None if longest is None else longest - 1)
        flags = check_flags("dead", np.zeros(len(tokens), np.bool_) if dead is None else dead, len(tokens))
        check_int("max_new_tokens", max_new_tokens, 1)
        check_int("offset", offset, 0)
        if offset % self.config.block_size:
            raise ValueError(f"offset: got {offset}, expected a multiple of block_size {self.config.block_size}")
        check_int("imported", imported, self.config.lookback if offset else 0, len(tokens) - 1)
        if longest is not None:
            max_new_tokens = min(max_new_tokens, longest - len(tokens))
        blocks = -(-(len(tokens) + max_new_tokens + self.config.num_drafts) // self.config.block_size)
        handle = heappop(self._handles) if self._handles else self._next_handle
        size = self.config.block_size
        request = Request(self._next_id, handle, tokens, flags, max_new_tokens, imported, size, blocks, offset)
        if self._placement.most(request) > self._pool.num_usable:
            if handle != self._next_handle:
                heappush(self._handles, handle)
            need = self._placement.most(request)
            raise ValueError(f"request: got a need of {need} blocks, expected at most {self._pool.num_usable}")
        self._enroll(request)
        self._runner.welcome(request)
        self._scheduler.waiting.append(request)
        self.counters.imports += imported > 0
        return request.id

    def add_packed(self, documents: Sequence[Sequence[int] | np.ndarray], *, max_new_tokens: int) -> list[int]:
        """Queue the documents of one packed sequence: each is a request of its own, with positions from 0."""
        added = [self.add(document, max_new_tokens=max_new_tokens) for document in documents]
        for request_id in added:
            self._requests[request_id].pack = self._next_pack
        self._next_pack += 1
        return added

    def import_(self, export: Export) -> int:
        """Queue a request that another engine prefilled; all its tokens so far are the prompt here. Return its id."""
        return self.add(export.tokens, dead=export.dead, max_new_tokens=export.max_new_tokens, imported=export.computed)

    def export(self, request_id: int) -> Export:
        """Hand a running request over: it leaves this engine and its blocks are freed.

        Raises:
            KeyError: no such request.
            RuntimeError: a step is in flight, or the request does not decode (waiting, prefilling or ended).
        """
        request = self._decoding("export", request_id)
        self._leave(request)
        self.counters.exports += 1
        tokens, dead = request.stream[: request.length].copy(), request.dead[: request.length].copy()
        return Export(tokens, dead, request.computed, request.max_length - request.length)

    def preempt(self, request_id: int, *, reload: bool) -> None:
        """Take a running request's blocks; it comes back before all that wait.

        Args:
            request_id: of a running request.
            reload: whether its KV was saved and comes back, without slots; else all is computed anew.

        Raises:
            KeyError: no such request.
            RuntimeError: a step is in flight, the request does not run, or generated KV would come back to windows that
                hold prompt positions alone.
        """
        request = self._between_steps("preempt", request_id)
        if request.id not in self._scheduler.running:
            raise RuntimeError(f"request {request.id}: got one that does not run, expected a running one")
        if reload and not self._placement.may_reload(request):
            raise RuntimeError(f"request {request.id}: got a reload of generated KV, expected windows that cover it")
        self._scheduler.preempt(request, reload=reload)
        self._runner.welcome(request)

    def may_reload(self, request_id: int) -> bool:
        """Whether `preempt` with reload is sound for a request now."""
        return self._placement.may_reload(self._request(request_id))

    def can_fork(self, request_id: int) -> bool:
        """Whether there is room for a fork of a request that decodes."""
        request = self._request(request_id)
        return self._scheduler.has_room(self._placement.fork_price(request))

    def fork(self, request_id: int, newest: int | None = None) -> int:
        """Let a second request go on from a decoding one's history, in the same blocks, and return its id.

        Full blocks are shared. The last one is copied, as both will write it: slots are copied with it, by the caller
        before the next step (`Step.slot_copies`), or else the windows cover them (`STATELESS` and `KNOWN_IDS`).

        Args:
            request_id: of a decoding request.
            newest: the new one's token in the place of the newest one, which was not fed yet; None: the same.

        Raises:
            KeyError: no such request.
            RuntimeError: a step is in flight, the request does not decode, or there is no room.
        """
        if len(self._scheduler.running) >= self.config.max_requests:
            raise RuntimeError(f"fork: got {self.config.max_requests} running requests, expected fewer: max_requests")
        child = self._fork(self._decoding("fork", request_id), newest)
        child.marks.add("fork")
        return child.id

    def reorder(self, parents: Mapping[int, int], newest: Mapping[int, int] | None = None) -> dict[int, int]:
        """Let beams go on from each other's histories: the keys end, and each gets a follower.

        Args:
            parents: beam -> the beam whose history its follower takes, all of them decoding.
            newest: beam -> the newest token of its follower, where it is another than the parent's.

        Returns:
            beam -> its follower.

        Raises:
            KeyError: no such request.
            RuntimeError: a step is in flight, a request does not decode, or there is no room.
        """
        for request_id in [*parents, *parents.values()]:
            self._decoding("reorder", request_id)
        followers = {}
        for beam, parent in parents.items():
            child = self._fork(self._requests[parent], (newest or {}).get(beam))
            child.marks.add("beam reorder")
            followers[beam] = child.id
        for beam in parents:
            self._leave(self._requests[beam])
        return followers

    def abort(self, request_id: int) -> None:
        """End a request at once, also while a step is in flight: what that one samples for it is thrown away.

        Raises:
            KeyError: no such request.
            RuntimeError: it neither waits nor runs.
        """
        request = self._request(request_id)
        if not self._alive(request):
            raise RuntimeError(f"request {request.id}: got one that ended, expected one that is alive")
        self._leave(request, aborted=True)
        self.counters.aborts += 1

    def sleep(self, *, reload: bool) -> None:
        """Lose the KV cache and all that was allocated with it.

        Args:
            reload: whether the KV of running requests is saved and comes back when they do, where that is sound.

        Raises:
            RuntimeError: a step is in flight, or it sleeps already.
        """
        if self._in_flight is not None or self.asleep:
            raise RuntimeError("sleep: got a call in flight or asleep, expected one after update, awake")
        for request_id in reversed(self.running):
            request = self._requests[request_id]
            self.preempt(request_id, reload=reload and self._placement.may_reload(request))
            request.marks.add("sleep and wake")
        self.kv_cache = torch.zeros(0, 1)
        self.counters.sleeps += 1

    def wake(self, num_blocks: int | None = None) -> None:
        """Bind a new KV cache.

        Args:
            num_blocks: of the new one; None: the config's.

        Raises:
            RuntimeError: it does not sleep.
            ValueError: a size that a living request does not fit into.
        """
        if not self.asleep:
            raise RuntimeError("wake: got a call while awake, expected sleep before")
        blocks = self.config.num_blocks if num_blocks is None else num_blocks
        needs = [self._placement.most(request) for request in self._requests.values() if self._alive(request)]
        null = self.config.num_blocks - self.config.usable_blocks
        check_int("num_blocks", blocks, max([1, *needs]) + null)
        self._placement.bind(self._new_pool(blocks))
        self.kv_cache = torch.zeros(blocks, 1)
        self._bindings += 1

    def forget(self, request_id: int) -> None:
        """Drop the stream of a request that ended or was exported.

        Raises:
            KeyError: no such request.
            RuntimeError: it still waits or runs.
        """
        request = self._request(request_id)
        if self._alive(request):
            raise RuntimeError(f"request {request.id}: got one that is alive, expected one that ended")
        del self._requests[request.id]

    def step(self, token_budget: int | None = None) -> Step | None:
        """Plan the next forward call; None when no request waits or runs.

        Args:
            token_budget: tokens of this step at most, 1 to the config's; None: the config's.

        Raises:
            RuntimeError: the step before was not answered by `update`, or no KV cache is bound.
        """
        if self._in_flight is not None:
            raise RuntimeError("step: got a call while a step is in flight, expected update first")
        if self.asleep:
            raise RuntimeError("step: got a call while asleep, expected wake first")
        most = self.config.token_budget
        budget = most if token_budget is None else check_int("token_budget", token_budget, 1, most)
        index, preemptions = self.counters.steps, self.counters.preemptions
        cuts = self._scheduler.schedule(budget, index)
        if self.counters.preemptions > preemptions:
            for request in self._scheduler.waiting:
                if request.marks & {"preempted, reload", "preempted, recompute"}:
                    self._runner.welcome(request)
        if not cuts:
            return None
        if self.config.offload_blocks:
            for cut in cuts:
                self._runner.loaded(cut.request)
        # Any order of the batch must do: a hit may stand before the piece that fills its block.
        turn = 0 if self.config.in_order else self._rng.below(len(cuts))
        cuts = cuts[turn:] + cuts[:turn]
        copies = self._placement.copies()
        step = self._runner.build(index, cuts, self._pool, budget=budget, slot_copies=copies, binding=self._bindings)
        self._in_flight = cuts
        self.counters.steps += 1
        self.counters.pieces += len(cuts)
        self.counters.tokens += step.num_tokens
        self.counters.padded_steps += "padding" in step.pieces[0].events
        return step

    def dummy_step(self, tokens: int) -> Step:
        """Give a step of `tokens` padding tokens and no request; it is not answered, and nothing changes here."""
        check_int("tokens", tokens, 0)
        nothing = torch.zeros(tokens, dtype=torch.int64)
        slots = self.config.policy.slot_cache
        window = torch.zeros((0, self.config.lookback), dtype=self.config.ids_dtype)
        return Step(
            index=self.counters.steps,
            input_ids=nothing.to(self.config.ids_dtype),
            positions=nothing.clone(),
            query_start_loc=torch.zeros(1, dtype=torch.int32),
            dead_mask=nothing.bool(),
            lookback_token_ids=window,
            lookback_dead_mask=window.bool(),
            slot_mapping=nothing.clone() if slots else None,
            block_table=torch.zeros((0, 1), dtype=torch.int32) if slots else None,
            pieces=(),
            num_tokens=0,
            binding=self._bindings,
            events=("dummy step",),
        )

    def update(self, sampled: Mapping[int, Sequence[int]]) -> None:
        """Take what the model sampled in the step in flight.

        A request of drafts d_1 .. d_k and samples s_0 .. s_k keeps s_0 .. s_a, where a is the largest count with
        d_{j+1} = s_j for all j < a; what goes past max_new_tokens is cut off. What was sampled for a request that was
        aborted meanwhile is thrown away.

        Args:
            sampled: request id -> the num_sampled ids of its piece; a piece that samples nothing may be left out.

        Raises:
            RuntimeError: no step is in flight.
            ValueError: a request that is not in the step, another number of ids, or an id out of range; then
                nothing changed.
        """
        if self._in_flight is None:
            raise RuntimeError("update: got a call without a step in flight, expected step first")
        strange = set(sampled) - {cut.request.id for cut in self._in_flight}
        if strange:
            raise ValueError(
                f"sampled: got requests {sorted(strange)}, expected those of step {self.counters.steps - 1}"
            )
        cuts = [cut for cut in self._in_flight if cut.request.id in self._scheduler.running]
        answers = check_sampled({cut.request.id: cut.num_sampled for cut in cuts}, sampled, self._largest)
        self._in_flight = None
        self._runner.arrive()
        for cut, new in zip(cuts, answers, strict=True):
            self._advance(cut, new)

    @property
    def _pool(self) -> BlockPool:
        return self._placement.pool

    def _new_pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(self._rng.permutation(num_blocks), null_block=self.config.sliding_window is not None)

    def _request(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise KeyError(f"request_id: got {request_id!r}, expected a request of this engine")
        return self._requests[request_id]

    def _alive(self, request: Request) -> bool:
        return request.id in self._scheduler.running or request in self._scheduler.waiting

    def _between_steps(self, what: str, request_id: int) -> Request:
        request = self._request(request_id)
        if self._in_flight is not None:
            raise RuntimeError(f"{what}: got a call between step and update, expected one after update")
        return request

    def _decoding(self, what: str, request_id: int) -> Request:
        request = self._between_steps(what, request_id)
        if request.id not in self._scheduler.running or request.prefills:
            raise RuntimeError(f"request {request.id}: got one that does not decode, expected a prefilled, running one")
        return request

    def _enroll(self, request: Request) -> None:
        if request.handle == self._next_handle:
            self._next_handle += 1
        else:
            request.marks.add("id reuse")
        self._next_id += 1
        self._requests[request.id] = request

    def _fork(self, parent: Request, newest: int | None) -> Request:
        if not self._scheduler.has_room(self._placement.fork_price(parent)):
            raise RuntimeError(f"request {parent.id}: got no room for a fork, expected can_fork to be asked first")
        if newest is not None:
            check_ids("newest", [newest], self._largest)
        handle = heappop(self._handles) if self._handles else self._next_handle
        child = parent.fork(self._next_id, handle, newest)
        self._enroll(child)
        copied = self.config.policy.slot_cache and self.config.policy is not Policy.KNOWN_IDS
        self._placement.fork(parent, child, copy_slots=copied and self.config.sound)
        self._runner.fork(parent, child)
        self._scheduler.running[child.id] = child
        self.counters.forks += 1
        return child

    def _advance(self, cut: Cut, new: list[int]) -> None:
        request, begin, step = cut.request, cut.request.length, self.counters.steps - 1
        if not new:
            request.computed = cut.true_end
            return
        request.absorb([] if cut.drafts is None else cut.drafts.tolist(), new)
        self.counters.sampled += request.length - begin
        self.counters.rejected_drafts += request.drafted - request.accepted
        self._runner.appended(request, begin)
        self._placement.publish(request, request.computed, step)
        if request.ended:
            self._leave(request)
            self.counters.finished += 1

    def _leave(self, request: Request, *, aborted: bool = False) -> None:
        self._scheduler.end(request, aborted=aborted)
        self._runner.forget(request)
        heappush(self._handles, request.handle)
