"""One step of an engine: the hash rows of its tokens, and the state between steps.

Equations (the hash itself is in ngram_hash.py):

    (6) chunk_start[r] = positions[query_start_loc[r]]
    (7) the source of the token at position q = p - k of request r is, in this order,
          the batch    where q >= chunk_start:      map[input_ids[t - k]], DEAD where dead_mask
          the window   where column c = chunk_start - 1 - q holds an id >= 0:
                                                    that id's map entry, DEAD where lookback_dead_mask
          the slot     with a slot cache:           cache[block_table[r, q // B] * B + q % B]
          the pad      without one:                 the compressed pad id, which blocks nothing by itself
    (8) before any read, every token of the step writes its own source to cache[slot_mapping[t]] (-1: not written)
"""

import weakref

import numpy as np
import torch

from reference.checks import check_block_size, check_kv_cache, check_step, check_step_values, check_token_map
from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from reference.ngram_hash import hash_values
from reference.prime_layout import PrimeLayout

DEAD = -1


class HashState:
    """Hash the tokens of every step, looking back into batch, window and slots.

    Args:
        config: the model's Engram configuration.
        token_map: `[V]` integers in [0, W), token id to compressed id.
        slot_cache: True keeps one compressed id a KV slot; False is the stateless way, in which the runner passes
            every lookback id.
        block_size: B, KV slots a block; None only without a slot cache.
        device: where the step tensors lie.

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """

    def __init__(
        self,
        config: EngramConfig,
        token_map: np.ndarray | torch.Tensor,
        *,
        slot_cache: bool,
        block_size: int | None,
        device: torch.device | str,
    ) -> None:
        check_block_size(block_size, slot_cache=slot_cache)
        self.device = torch.empty(0, device=device).device
        self.slot_cache = slot_cache
        self.block_size = block_size
        self.lookback = config.lookback
        self.token_map = self._tensor(check_token_map(token_map, config)).long()
        self.pad_id = int(self.token_map[config.engram_pad_token_id])
        layout = PrimeLayout(config)
        self.multipliers = self._tensor(hash_multipliers(config))
        self.primes = self._tensor(layout.primes)
        self.offsets = self._tensor(layout.offsets)
        self.cache: torch.Tensor | None = None
        self._bound: weakref.ref[torch.Tensor] | None = None

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Make the slot cache for the KV cache that is bound now, one zeroed slot a KV slot.

        Args:
            kv_cache: `[blocks, ...]`; empty while the engine has not bound it. It is not kept alive.

        Returns:
            False while `kv_cache` is empty: the slots are dropped, and hashing is to be skipped.

        Raises:
            TypeError, ValueError: not a tensor, or one without axes.
        """
        check_kv_cache(kv_cache)
        if kv_cache.numel() == 0:
            self.cache = self._bound = None
            return False
        if self.slot_cache and (self._bound is None or self._bound() is not kv_cache):
            assert self.block_size is not None
            self.cache = torch.zeros(kv_cache.shape[0] * self.block_size, dtype=torch.int32, device=self.device)
            self._bound = weakref.ref(kv_cache)
        return True

    def dummy_hashes(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the hashes of a rank without real tokens: all DEAD `[T, L, C]` int32, and keep all False `[T]`."""
        tokens = input_ids.shape[0]
        hashes = torch.full((tokens, *self.offsets.shape), DEAD, dtype=torch.int32, device=self.device)
        return hashes, torch.zeros(tokens, dtype=torch.bool, device=self.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        dead_mask: torch.Tensor,
        lookback_token_ids: torch.Tensor,
        lookback_dead_mask: torch.Tensor,
        slot_mapping: torch.Tensor | None,
        block_table: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hash the tokens of one step.

        Args:
            input_ids: `[T]` token ids; int32 or int64, as are all integer arguments.
            positions: `[T]`, consecutive within a request.
            query_start_loc: `[R+1]`, request r owns tokens query_start_loc[r] .. query_start_loc[r+1] - 1; a token past
                the last boundary belongs to nobody.
            dead_mask: `[T]` bool, tokens that take no part in an n-gram.
            lookback_token_ids: `[R, D]` ids before each chunk start, column 0 the newest; negative where not known.
            lookback_dead_mask: `[R, D]` bool.
            slot_mapping: `[T]` the slot that each token writes, -1 for none; None in the stateless way.
            block_table: `[R', blocks]` each request's block numbers; None in the stateless way.

        Returns:
            `[T, L, C]` int32; rows of tokens that belong to nobody are DEAD here, unspecified in general.

        Raises:
            TypeError, ValueError: a wrong argument, or a caller's error in the values (always checked here).
            RuntimeError: the slot way before `ensure_cache`.
        """
        step = (
            input_ids, positions, query_start_loc, dead_mask,
            lookback_token_ids, lookback_dead_mask, slot_mapping, block_table,
        )  # fmt: skip
        check_step(self.device, self.lookback, self.slot_cache, *step)
        if self.slot_cache and self.cache is None:
            raise RuntimeError("forward: got no slot cache, expected ensure_cache with a bound KV cache before")
        slots = 0 if self.cache is None else len(self.cache)
        check_step_values(len(self.token_map), self.block_size, slots, *step)

        live = int(query_start_loc[-1])
        request = torch.repeat_interleave(query_start_loc.diff().long())  # [live]
        positions = positions[:live].long()
        chunk_start = positions[query_start_loc.long()[request]]  # (6)
        batch = self._compress(input_ids[:live].long(), dead_mask[:live])
        if self.cache is not None and slot_mapping is not None:
            writes = slot_mapping[:live] >= 0
            self.cache[slot_mapping[:live][writes].long()] = batch[writes].int()  # (8)

        values = torch.empty((live, self.lookback + 1), dtype=torch.int64, device=self.device)
        blocked = torch.zeros(live, dtype=torch.bool, device=self.device)
        token = torch.arange(live, device=self.device)
        for k in range(self.lookback + 1):
            q = positions - k
            source = torch.full_like(q, self.pad_id)
            in_batch = q >= chunk_start
            column = (chunk_start - 1 - q).clamp(0, self.lookback - 1)  # at most k - 1 < D: only batch rows are clamped
            window_id = lookback_token_ids[request, column].long()
            known = ~in_batch & (window_id >= 0)
            source[in_batch] = batch[token[in_batch] - k]
            source[known] = self._compress(window_id, lookback_dead_mask[request, column])[known]
            if self.cache is not None and block_table is not None:
                reads = ~in_batch & ~known & (q >= 0)
                source[reads] = self._read_slots(block_table, request[reads], q[reads])
            blocked = blocked | (q < 0) | (source == DEAD)  # (2)
            values[:, k] = torch.where(blocked, self.pad_id, source)  # (3)

        rows = self.dummy_hashes(input_ids)[0]
        rows[:live] = hash_values(values, self.multipliers, self.primes, self.offsets).int()
        return rows

    def _compress(self, ids: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
        return torch.where(dead, DEAD, self.token_map[ids.clamp(min=0)])  # what a negative id gives is never used

    def _read_slots(self, block_table: torch.Tensor, request: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        assert self.cache is not None
        assert self.block_size is not None
        block = block_table[request, q // self.block_size].long()
        return self.cache[block * self.block_size + q % self.block_size].long()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
