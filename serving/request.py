"""A request: the tokens that it knows, how many are computed, and the blocks that it holds."""

import numpy as np

from serving.prefix_cache import chain_key
from serving.speculation import count_accepted


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class Request:
    """Hold what one request is and how far it came.

    Positions below `computed` have their KV; positions below `length` have a known token. Between steps a request that
    still prefills has computed < prompt_length = length, one that decodes has computed = length - 1.

    Args:
        request_id: unique for ever in an engine.
        prompt: [prompt_length] int64.
        dead: [prompt_length] bool.
        max_new_tokens: tokens to sample.
        imported: leading prompt tokens whose KV comes from elsewhere.
        block_size: B.
        max_blocks: blocks that it may come to hold.
    """

    def __init__(
        self,
        request_id: int,
        prompt: np.ndarray,
        dead: np.ndarray,
        max_new_tokens: int,
        imported: int,
        block_size: int,
        max_blocks: int,
    ) -> None:
        self.id = request_id
        self.prompt_length = self.length = len(prompt)
        self.max_length = len(prompt) + max_new_tokens
        self.imported = imported
        self.max_blocks = max_blocks
        self._block_size = block_size
        self._tokens = np.concatenate([prompt, np.zeros(max_new_tokens, np.int64)])
        self.stream = _read_only(self._tokens)
        self.dead = _read_only(np.concatenate([dead, np.zeros(max_new_tokens, np.bool_)]))
        self.dead_end = int(np.flatnonzero(dead)[-1]) + 1 if dead.any() else 0
        self.blocks: list[int] = []
        self.table = np.zeros(max_blocks, np.int32)
        self._keys: list[bytes] = []
        self.published = 0
        self.computed = 0
        self.entry = 0
        self.hit_in_step = False
        self.drafted = self.accepted = 0

    @property
    def prefills(self) -> bool:
        """Whether prompt tokens are left to compute."""
        return self.computed < self.prompt_length

    @property
    def ended(self) -> bool:
        """Whether its last token was sampled."""
        return self.length == self.max_length

    def hold(self, block: int) -> None:
        """Append a block to the request's table."""
        self.table[len(self.blocks)] = block
        self.blocks.append(block)

    def key(self, index: int) -> bytes:
        """Return the chained content key of block `index`, all of whose tokens must be known."""
        size = self._block_size
        if (index + 1) * size > self.length:
            raise RuntimeError(f"block {index} of request {self.id}: got {self.length} true tokens, expected it full")
        for i in range(len(self._keys), index + 1):
            before = self._keys[-1] if self._keys else b""
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
