"""The engine: requests go in, steps come out, sampled tokens go back."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from serving.block_pool import BlockPool
from serving.checks import check_flags, check_ids, check_int
from serving.config import EngineConfig
from serving.counters import Counters
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.rng import Rng
from serving.runner import Policy, Runner
from serving.scheduler import Cut, Scheduler
from serving.speculation import Drafter, Propose, check_sampled
from serving.step import Step
from serving.transfer import Export

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Serve requests step by step: `step()` plans and builds one forward call, `update()` takes what it sampled.

    The two alternate. Nothing here depends on time or threads: equal config and calls give equal tensors.

    Args:
        config: how to run.
        propose: the draft model, (request id, true stream so far) -> up to num_drafts ids; never asked if those are 0.
    """

    def __init__(self, config: EngineConfig, propose: Propose | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.kv_cache = torch.zeros(config.num_blocks, 1)
        self._largest = int(torch.iinfo(config.ids_dtype).max)
        self._rng = Rng(config.seed)
        self._pool = BlockPool(self._rng.permutation(config.num_blocks))
        self._scheduler = Scheduler(
            self._pool,
            PrefixCache() if config.share_prefixes else None,
            Drafter(propose, config.num_drafts, self._largest),
            block_size=config.block_size,
            max_requests=config.max_requests,
            share_imports=config.policy is not Policy.SLOTS_ONLY,
            counters=self.counters,
        )
        self._runner = Runner(
            config.policy,
            block_size=config.block_size,
            lookback=config.lookback,
            ids_dtype=config.ids_dtype,
            pad_tokens=config.pad_tokens,
            pad_requests=config.pad_requests,
            rng=self._rng,
        )
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._in_flight: list[Cut] | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache: num_blocks * block_size."""
        return self.config.num_blocks * self.config.block_size

    @property
    def finished(self) -> bool:
        """Whether no request waits or runs."""
        return not self._scheduler.waiting and not self._scheduler.running

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
    ) -> int:
        """Queue a request and return its id.

        Args:
            prompt: [n >= 1] token ids.
            dead: [n] flags of masked tokens (an image span); none by default.
            max_new_tokens: tokens to sample, at least 1.
            imported: leading prompt tokens whose KV arrives from elsewhere, slots not; at most n - 1.

        Raises:
            TypeError, ValueError: an argument of the wrong type or out of range, or a request that the pool can never
                hold: ceil((n + max_new_tokens + num_drafts) / B) blocks.
        """
        tokens = check_ids("prompt", prompt, self._largest)
        check_int("prompt length", len(tokens), 1)
        flags = check_flags("dead", np.zeros(len(tokens), np.bool_) if dead is None else dead, len(tokens))
        check_int("max_new_tokens", max_new_tokens, 1)
        check_int("imported", imported, 0, len(tokens) - 1)
        blocks = -(-(len(tokens) + max_new_tokens + self.config.num_drafts) // self.config.block_size)
        if blocks > self.config.num_blocks:
            raise ValueError(f"request: got a need of {blocks} blocks, expected at most {self.config.num_blocks}")
        request = Request(self._next_id, tokens, flags, max_new_tokens, imported, self.config.block_size, blocks)
        self._next_id += 1
        self._requests[request.id] = request
        self._runner.welcome(request)
        self._scheduler.waiting.append(request)
        self.counters.imports += imported > 0
        return request.id

    def import_(self, export: Export) -> int:
        """Queue a request that another engine prefilled; all its tokens so far are the prompt here. Return its id."""
        return self.add(export.tokens, dead=export.dead, max_new_tokens=export.max_new_tokens, imported=export.computed)

    def export(self, request_id: int) -> Export:
        """Hand a running request over: it leaves this engine and its blocks are freed.

        Raises:
            KeyError: no such request.
            RuntimeError: a step is in flight, or the request does not decode (waiting, prefilling or ended).
        """
        request = self._request(request_id)
        if self._in_flight is not None:
            raise RuntimeError("export: got a call between step and update, expected one after update")
        if request.id not in self._scheduler.running or request.prefills:
            raise RuntimeError(f"request {request.id}: got one that does not decode, expected a prefilled, running one")
        self._leave(request)
        self.counters.exports += 1
        tokens, dead = request.stream[: request.length].copy(), request.dead[: request.length].copy()
        return Export(tokens, dead, request.computed, request.max_length - request.length)

    def forget(self, request_id: int) -> None:
        """Drop the stream of a request that ended or was exported.

        Raises:
            KeyError: no such request.
            RuntimeError: it still waits or runs.
        """
        request = self._request(request_id)
        if request.id in self._scheduler.running or request in self._scheduler.waiting:
            raise RuntimeError(f"request {request.id}: got one that is alive, expected one that ended")
        del self._requests[request.id]

    def step(self, token_budget: int | None = None) -> Step | None:
        """Plan the next forward call; None when no request waits or runs.

        Args:
            token_budget: tokens of this step at most, 1 to the config's; None: the config's.

        Raises:
            RuntimeError: the step before was not answered by `update`.
        """
        if self._in_flight is not None:
            raise RuntimeError("step: got a call while a step is in flight, expected update first")
        most = self.config.token_budget
        budget = most if token_budget is None else check_int("token_budget", token_budget, 1, most)
        index = self.counters.steps
        cuts = self._scheduler.schedule(budget, index)
        if not cuts:
            return None
        # Any order of the batch must do: a hit may stand before the piece that fills its block.
        turn = self._rng.below(len(cuts))
        cuts = cuts[turn:] + cuts[:turn]
        step = self._runner.build(index, cuts, self._pool)
        self._in_flight = cuts
        self.counters.steps += 1
        self.counters.pieces += len(cuts)
        self.counters.tokens += step.num_tokens
        self.counters.padded_steps += "padding" in step.pieces[0].events
        return step

    def update(self, sampled: Mapping[int, Sequence[int]]) -> None:
        """Take what the model sampled in the step in flight.

        A request of drafts d_1 .. d_k and samples s_0 .. s_k keeps s_0 .. s_a, where a is the largest count with
        d_{j+1} = s_j for all j < a; what goes past max_new_tokens is cut off.

        Args:
            sampled: request id -> the num_sampled ids of its piece; a piece that samples nothing may be left out.

        Raises:
            RuntimeError: no step is in flight.
            ValueError: a request that is not in the step, another number of ids, or an id out of range; then
                nothing changed.
        """
        if self._in_flight is None:
            raise RuntimeError("update: got a call without a step in flight, expected step first")
        cuts = self._in_flight
        strange = set(sampled) - {cut.request.id for cut in cuts}
        if strange:
            raise ValueError(
                f"sampled: got requests {sorted(strange)}, expected those of step {self.counters.steps - 1}"
            )
        answers = [
            check_sampled(cut.request.id, sampled.get(cut.request.id, ()), cut.num_sampled, self._largest)
            for cut in cuts
        ]
        self._in_flight = None
        self._runner.arrive()
        for cut, new in zip(cuts, answers, strict=True):
            self._advance(cut, new)

    def _request(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise KeyError(f"request_id: got {request_id!r}, expected a request of this engine")
        return self._requests[request_id]

    def _advance(self, cut: Cut, new: list[int]) -> None:
        request, begin, step = cut.request, cut.request.length, self.counters.steps - 1
        if not new:
            request.computed = cut.true_end
            return
        request.absorb([] if cut.drafts is None else cut.drafts.tolist(), new)
        self.counters.sampled += request.length - begin
        self.counters.rejected_drafts += request.drafted - request.accepted
        self._runner.appended(request, begin)
        self._scheduler.publish(request, request.computed, step)
        if request.ended:
            self._leave(request)
            self.counters.finished += 1

    def _leave(self, request: Request) -> None:
        self._scheduler.end(request)
        self._runner.forget(request)
