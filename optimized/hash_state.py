"""One step of an engine in Triton: slot writes, then the hash rows of its tokens.

The launcher comes first, the kernels below it. What they do that the reference does not:

- A token's request is found by comparing it with all boundaries at once, 256 at a time: no chain of dependent loads.
- Positions are consecutive within a request, so the chunk start and the window column follow from the token's own
  position and its request's first token: nothing more is loaded for them.
- `mix mod prime` is a multiplication: with m = floor(2^64 / p) and mix < 2^63 the high word of mix * m is the quotient
  or one less, so one conditional subtraction is exact.
"""

import inspect
import os
import weakref

import numpy as np
import torch
import triton
import triton.language as tl

from reference.checks import check_block_size, check_kv_cache, check_step, check_step_values, check_token_map
from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from reference.prime_layout import PrimeLayout

DEAD = -1
_WRITE_BLOCK = 256
_HASH_BLOCK = 32


class HashState:
    """Hash the tokens of every step, looking back into batch, window and slots.

    Takes and returns what `reference.hash_state.HashState` does, bit for bit, and never waits for the device, so that a
    CUDA graph can capture it. Values are checked where they lie on the host, and on a device with `ENGRAM_DEBUG=1`
    (not while capturing). Without that switch an out-of-range slot is not written, an out-of-range block reads some
    slot in bounds, and an out-of-range token id counts as dead.

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
        checked_map = check_token_map(token_map, config)
        self.device = torch.empty(0, device=device).device
        self.slot_cache = slot_cache
        self.block_size = block_size
        self.cache: torch.Tensor | None = None
        self._kv_cache: weakref.ref[torch.Tensor] | None = None
        self._shape = (len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads)
        self._columns = config.columns
        self._pad_id = int(checked_map[config.engram_pad_token_id])
        self._token_map = torch.from_numpy(checked_map).to(self.device)
        self._constants = torch.from_numpy(_pack_constants(config)).to(self.device)

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
        bound = kv_cache.numel() > 0
        if not bound:
            self.cache, self._kv_cache = None, None
        elif self.block_size is not None and self.slot_cache:
            previous = self._kv_cache and self._kv_cache()
            if previous is not kv_cache:
                slots = kv_cache.shape[0] * self.block_size
                self.cache = torch.zeros(slots, dtype=torch.int32, device=self.device)
                self._kv_cache = weakref.ref(kv_cache)
        return bound

    def dummy_hashes(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the hashes of a rank without real tokens: all DEAD `[T, L, C]` int32, and keep all False `[T]`."""
        hashes = self._empty_rows(input_ids.shape[0]).fill_(DEAD)
        return hashes, hashes.new_zeros(input_ids.shape[0], dtype=torch.bool)

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
            input_ids: `[T]` token ids; int32 or int64, as are all integer arguments. Any may be a strided view.
            positions: `[T]`, consecutive within a request.
            query_start_loc: `[R+1]`, request r owns tokens query_start_loc[r] .. query_start_loc[r+1] - 1; a token past
                the last boundary belongs to nobody.
            dead_mask: `[T]` bool, tokens that take no part in an n-gram.
            lookback_token_ids: `[R, D]` ids before each chunk start, column 0 the newest; negative where not known.
            lookback_dead_mask: `[R, D]` bool.
            slot_mapping: `[T]` the slot that each token writes, -1 for none; None in the stateless way.
            block_table: `[R', blocks]` each request's block numbers; None in the stateless way.

        Returns:
            `[T, L, C]` int32; rows of tokens that belong to nobody are unspecified.

        Raises:
            TypeError, ValueError: a wrong argument, or a caller's error in values that are checked (see the class).
            RuntimeError: the slot way before `ensure_cache`.
        """
        _, max_ngram, _ = self._shape
        step = (
            input_ids, positions, query_start_loc, dead_mask,
            lookback_token_ids, lookback_dead_mask, slot_mapping, block_table,
        )  # fmt: skip
        check_step(self.device, max_ngram - 1, self.slot_cache, *step)
        if self.slot_cache and self.cache is None:
            raise RuntimeError("forward: got no slot cache, expected ensure_cache with a bound KV cache before")
        if self.device.type == "cpu" or (os.environ.get("ENGRAM_DEBUG") == "1" and not _is_capturing()):
            slots = self.cache.numel() if self.cache is not None else 0
            check_step_values(self._token_map.numel(), self.block_size, slots, *step)
        rows = self._empty_rows(input_ids.shape[0])
        if rows.numel() and query_start_loc.shape[0] > 1:
            if slot_mapping is not None:
                self._write_slots(input_ids, query_start_loc, dead_mask, slot_mapping)
            self._hash(rows, *step[:6], block_table)
        return rows

    def _empty_rows(self, tokens: int) -> torch.Tensor:
        return torch.empty((tokens, self._shape[0], self._columns), dtype=torch.int32, device=self.device)

    def _write_slots(
        self,
        input_ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        dead_mask: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        assert self.cache is not None
        tokens = input_ids.shape[0]
        block = _block(_WRITE_BLOCK, tokens)
        _write_slots_kernel[(triton.cdiv(tokens, block),)](
            input_ids, query_start_loc, dead_mask, slot_mapping, self._token_map, self.cache,
            input_ids.stride(0), query_start_loc.stride(0), dead_mask.stride(0), slot_mapping.stride(0),
            tokens, query_start_loc.shape[0] - 1, self._token_map.numel(), self.cache.numel(),
            DEAD=DEAD, BLOCK=block, num_warps=4,
        )  # fmt: skip

    def _hash(
        self,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        dead_mask: torch.Tensor,
        lookback_token_ids: torch.Tensor,
        lookback_dead_mask: torch.Tensor,
        block_table: torch.Tensor | None,
    ) -> None:
        layers, max_ngram, heads = self._shape
        tokens = input_ids.shape[0]
        block = _block(_HASH_BLOCK, tokens)
        # Without slots the kernel never touches `table` and `cache`: any tensor stands in for them.
        table = lookback_token_ids if block_table is None else block_table
        cache = self._token_map if self.cache is None else self.cache
        _hash_kernel[(triton.cdiv(tokens, block), layers)](
            input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
            table, cache, self._token_map, self._constants, rows,
            input_ids.stride(0), positions.stride(0), query_start_loc.stride(0), dead_mask.stride(0),
            *lookback_token_ids.stride(), *lookback_dead_mask.stride(), *table.stride(),
            tokens, query_start_loc.shape[0] - 1, *table.shape, cache.numel(), self.block_size or 1,
            self._token_map.numel(), self._pad_id,
            SLOT_CACHE=self.slot_cache, LAYERS=layers, MAX_NGRAM=max_ngram, HEADS=heads, DEAD=DEAD, BLOCK=block,
            COLUMNS=triton.next_power_of_2(self._columns), BOUNDARIES=256, num_warps=4,
        )  # fmt: skip


def _pack_constants(config: EngramConfig) -> np.ndarray:
    """Pack what the kernel needs of a layer into one int64 row: N multipliers, C magics, C of offset << 32 | prime."""
    layout = PrimeLayout(config)
    primes = layout.primes.reshape(len(layout.primes), -1)
    magics = np.array([[2**64 // prime for prime in layer] for layer in primes.tolist()], dtype=np.uint64)
    return np.concatenate([hash_multipliers(config), magics.view(np.int64), layout.offsets << 32 | primes], axis=1)


def _block(compiled: int, tokens: int) -> int:
    # The interpreter's cost is a program's, whatever its block: one program takes as many tokens as there are.
    return min(triton.next_power_of_2(tokens), 2048) if triton.knobs.runtime.interpret else compiled


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _one_variant(kernel):
    """Compile a kernel once for its constants and dtypes: no size, stride or alignment makes a variant of its own."""
    parameters = inspect.signature(kernel).parameters.values()
    sizes = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=sizes)(kernel)


@_one_variant
def _write_slots_kernel(
    input_ids,
    query_start_loc,
    dead_mask,
    slot_mapping,
    token_map,
    cache,
    ids_stride,
    start_stride,
    dead_stride,
    slot_stride,
    tokens,
    requests,
    vocabulary,
    slots,
    DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each live token's compressed id, or DEAD, to its slot."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(query_start_loc + requests * start_stride.to(tl.int64))
    live = (t < tokens) & (t < end)
    slot = tl.load(slot_mapping + t * slot_stride, live, other=-1).to(tl.int64)
    writes = live & (slot >= 0) & (slot < slots)
    token = tl.load(input_ids + t * ids_stride, writes, other=-1).to(tl.int64)
    dead = tl.load(dead_mask + t * dead_stride, writes, other=0) != 0
    alive = writes & ~dead & (token >= 0) & (token < vocabulary)
    tl.store(cache + slot, tl.load(token_map + token, alive, other=DEAD), writes)


@_one_variant
def _hash_kernel(
    input_ids,
    positions,
    query_start_loc,
    dead_mask,
    window_ids,
    window_dead,
    table,
    cache,
    token_map,
    constants,
    rows,
    ids_stride,
    position_stride,
    start_stride,
    dead_stride,
    window_stride,
    window_column_stride,
    window_dead_stride,
    window_dead_column_stride,
    table_stride,
    table_column_stride,
    tokens,
    requests,
    table_rows,
    table_columns,
    slots,
    block_size,
    vocabulary,
    pad_id,
    SLOT_CACHE: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUNDARIES: tl.constexpr,
):
    """Hash a block of tokens for one layer: rows[t, layer, :]."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1)
    # The request of t is the number of boundaries 1 .. R at or before t; its first token is the last such boundary.
    request = tl.zeros((BLOCK,), tl.int32)
    first = tl.zeros((BLOCK,), tl.int64)
    for base in tl.range(0, requests, BOUNDARIES):
        index = base + 1 + tl.arange(0, BOUNDARIES)
        inside = index <= requests
        boundary = tl.load(query_start_loc + index.to(tl.int64) * start_stride, inside, other=0).to(tl.int64)
        passed = inside[None, :] & (boundary[None, :] <= t[:, None])
        request += tl.sum(passed.to(tl.int32), axis=1)
        first = tl.maximum(first, tl.max(tl.where(passed, boundary[None, :], 0), axis=1))
    live = (t < tokens) & (request < requests)
    request = request.to(tl.int64)
    position = tl.load(positions + t * position_stride, live, other=0).to(tl.int64)

    COLUMN_COUNT: tl.constexpr = (MAX_NGRAM - 1) * HEADS
    column = tl.arange(0, COLUMNS)
    in_layer = column < COLUMN_COUNT
    packed = constants + layer * (MAX_NGRAM + 2 * COLUMN_COUNT)
    blocked = tl.zeros((BLOCK,), tl.int1)
    mix = tl.zeros((BLOCK,), tl.int64)
    mixes = tl.zeros((BLOCK, COLUMNS), tl.int64)  # each column's mix: that of its own order
    for k in tl.static_range(MAX_NGRAM):
        q = position - k
        source = tl.full((BLOCK,), DEAD, tl.int32)
        in_batch = live & (t - k >= first)
        token = tl.load(input_ids + (t - k) * ids_stride, in_batch, other=-1).to(tl.int64)
        dead = tl.load(dead_mask + (t - k) * dead_stride, in_batch, other=0) != 0
        unknown = tl.zeros((BLOCK,), tl.int1)
        if k > 0:
            behind = live & ~in_batch & (q >= 0)
            window_column = k - 1 - (t - first)
            cell = request * window_stride + window_column * window_column_stride
            window_token = tl.load(window_ids + cell, behind, other=-1).to(tl.int64)
            unknown = behind & (window_token < 0)
            known = behind & (window_token >= 0)
            dead_cell = request * window_dead_stride + window_column * window_dead_column_stride
            dead |= tl.load(window_dead + dead_cell, known, other=0) != 0
            token = tl.where(known, window_token, token)
        alive = ~dead & (token >= 0) & (token < vocabulary)
        source = tl.load(token_map + token, alive, other=DEAD)
        if k > 0:
            if SLOT_CACHE:
                reads = unknown & (table_rows > 0) & (table_columns > 0) & (slots > 0)
                row = tl.minimum(request, table_rows - 1)
                table_column = tl.minimum(q // block_size, table_columns - 1)
                cell = row * table_stride + table_column * table_column_stride
                block = tl.load(table + cell, reads, other=0).to(tl.int64)
                slot = tl.minimum(tl.maximum(block * block_size + q % block_size, 0), slots - 1)
                source = tl.where(reads, tl.load(cache + slot, reads, other=DEAD), source)
            else:
                source = tl.where(unknown, pad_id, source)
        blocked |= (q < 0) | (source == DEAD)
        value = tl.where(blocked, pad_id, source).to(tl.int64)
        mix ^= value * tl.load(packed + k)
        if k > 0:
            mixes = tl.where((column >= (k - 1) * HEADS)[None, :], mix[:, None], mixes)

    magic = tl.load(packed + MAX_NGRAM + column, in_layer, other=0)
    offset_prime = tl.load(packed + MAX_NGRAM + COLUMN_COUNT + column, in_layer, other=1)
    prime = offset_prime.to(tl.uint32)[None, :]
    offset = (offset_prime >> 32).to(tl.int32)[None, :]
    quotient = tl.umulhi(mixes.to(tl.uint64), tl.broadcast_to(magic.to(tl.uint64)[None, :], (BLOCK, COLUMNS)))
    # The remainder is below 2 * prime < 2^32, so its low words are all of it.
    remainder = mixes.to(tl.uint32) - quotient.to(tl.uint32) * prime
    remainder = tl.where(remainder >= prime, remainder - prime, remainder)
    cell = (t * LAYERS + layer)[:, None] * COLUMN_COUNT + column[None, :]
    tl.store(rows + cell, remainder.to(tl.int32) + offset, live[:, None] & in_layer[None, :])
