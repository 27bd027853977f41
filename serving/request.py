"""A request: the tokens that it knows, how many are computed, and the blocks that it holds."""

from __future__ import annotations

import numpy as np

from serving.block_pool import NULL_BLOCK
from serving.prefix_cache import chain_key
from serving.speculation import count_accepted


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class Request:
    """Hold what one request is and how far it came.

    Positions below `computed` have their KV; positions below `length` have a known token. Between steps a request that
    still prefills has computed < target = length, one that decodes has computed = length - 1. The target is the
    prompt's length; after a preemption it is all that was known then.

    Args:
        request_id: unique for ever in an engine.
        handle: what the engine's user calls it: the smallest number that no living request has.
        prompt: [prompt_length] int64.
        dead: [prompt_length] bool.
        max_new_tokens: tokens to sample.
        imported: leading prompt tokens whose KV comes from elsewhere.
        block_size: B.
        max_blocks: blocks that it may come to hold.
        offset: positions before the stream, whose ids nobody kept.
    """

    def __init__(
        self,
        request_id: int,
        handle: int,
        prompt: np.ndarray,
        dead: np.ndarray,
        max_new_tokens: int,
        imported: int,
        block_size: int,
        max_blocks: int,
        offset: int = 0,
    ) -> None:
        self.id, self.handle = request_id, handle
        self.prompt_length = self.target = self.length = len(prompt)
        self.max_length = len(prompt) + max_new_tokens
        self.imported = imported
        self.max_blocks = max_blocks
        self.offset = offset
        self._brought = imported
        self.pack: int | None = None
        self._block_size = block_size
        self._tokens = np.concatenate([prompt, np.zeros(max_new_tokens, np.int64)])
        self.stream = _read_only(self._tokens)
        self.dead = _read_only(np.concatenate([dead, np.zeros(max_new_tokens, np.bool_)]))
        self.dead_end = int(np.flatnonzero(dead)[-1]) + 1 if dead.any() else 0
        self.span_starts = np.flatnonzero(np.diff(dead.astype(np.int8), prepend=0) == 1) if self.dead_end else ()
        self._keys: list[bytes] = []
        self.marks: set[str] = set()
        self.last_step = -1
        self._start_over()

    def _start_over(self) -> None:
        self.blocks: list[int] = []
        self.others: list[int] = []
        self.slotless: list[range] = []  # positions of blocks that were loaded, so that no step wrote their slots
        self.table = np.zeros(self.max_blocks, np.int32)
        self.evicted = 0
        self.published = 0
        self.computed = 0
        self.entry = 0
        self.hit_in_step = False
        self.drafted = self.accepted = 0

    @property
    def prefills(self) -> bool:
        """Whether known tokens other than the newest sampled one are left to compute."""
        return self.computed < self.target

    @property
    def ended(self) -> bool:
        """Whether its last token was sampled."""
        return self.length == self.max_length

    def hold(self, block: int) -> None:
        """Append a block to the request's table."""
        self.table[len(self.blocks)] = block
        self.blocks.append(block)

    def give_up(self, index: int) -> int:
        """Put the null block in the place of block `index`, the next one behind the window; return what was there."""
        block, self.blocks[index], self.table[index] = self.blocks[index], NULL_BLOCK, NULL_BLOCK
        self.evicted = index + 1
        return block

    def rewind(self, *, reload: bool) -> None:
        """Forget all blocks and what was computed in them.

        With reload its KV comes back from elsewhere; without it is computed anew, but for what nobody could compute:
        positions before the stream.
        """
        computed = self.computed
        self._start_over()
        self.target = self.length
        self.imported = computed if reload else self._brought if self.offset else 0

    def fork(self, request_id: int, handle: int, newest: int | None) -> Request:
        """Return a request of the same stream, which holds no block yet.

        Args:
            request_id: of the new one.
            handle: of the new one.
            newest: the token that stands in the place of the newest one; None: the same.
        """
        fresh = self.max_length - self.prompt_length
        prompt, dead = self.stream[: self.prompt_length], self.dead[: self.prompt_length]
        size, most = self._block_size, self.max_blocks
        child = Request(request_id, handle, prompt, dead, fresh, self.imported, size, most, self.offset)
        child.length, child.target, child.computed = self.length, self.target, self.computed
        child._tokens[: self.length] = self.stream[: self.length]
        child._keys = self._keys[: self.computed // self._block_size]
        child.slotless, child.entry = list(self.slotless), self.computed
        if newest is not None:
            child._tokens[self.length - 1] = newest
        return child

    def key(self, index: int) -> bytes:
        """Return the chained content key of block `index`, all of whose tokens must be known."""
        size = self._block_size
        if (index + 1) * size > self.length:
            raise RuntimeError(f"block {index} of request {self.id}: got {self.length} true tokens, expected it full")
        for i in range(len(self._keys), index + 1):
            before = self._keys[-1] if self._keys else b"" if self.offset == 0 else str(self.offset).encode()
            self._keys.append(chain_key(before, *(a[i * size : (i + 1) * size] for a in (self.stream, self.dead))))
        return self._keys[index]

    def absorb(self, drafts: list[int], sampled: list[int]) -> None:
        """Append the accepted drafts and one token more, up to max_new_tokens; all but the newest has its KV.

        Args:
            drafts: [k] ids that were fed behind the newest token.
            sampled: [k + 1] ids that the model gave.
        """
        self.drafted, self.accepted = len(drafts), count_accepted(drafts, sampled)
        kept = sampled[: min(self.accepted + 1, self.max_length - self.length)]
        self._tokens[self.length : self.length + len(kept)] = kept
        self.length += len(kept)
        self.computed = self.length - 1
