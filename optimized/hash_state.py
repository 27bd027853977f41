"""One step of an engine in Triton: slot writes, then the hash rows of its tokens.

The launcher comes first, the kernels below it. What they do that the reference does not:

- A token's request is guessed, as if all were of one length, and the guess checked by one load of its boundaries. Where
  it fails, 64 boundaries a stride apart are compared at once, then those behind the last one passed: two dependent
  loads for any number of requests up to 1024, and the window of the guess is loaded without waiting for either.
- Positions are consecutive within a request, so the chunk start and the window column follow from the token's own
  position and its request's first token: nothing more is loaded for them.
- `x mod p` is a multiplication: with m = floor(2^64 / p) and x < 2^63 the high word of x * m is the quotient or one
  less, so one conditional subtraction is exact. The same serves for `position // block_size`.
- Few tokens are latency: all columns of a layer lie side by side in a warp. Many are arithmetic: a thread owns a token.
- The hash starts while the slot writes still run (programmatic dependent launch) and waits for them where it reads.
"""

import inspect
import os
import weakref
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from optimized.ngram_hash import hash_a_token_a_thread, hash_order, hash_side_by_side, pack_layers
from reference.checks import check_block_size, check_kv_cache, check_step, check_step_values, check_token_map
from reference.config import EngramConfig

DEAD = -1
_WRITE_BLOCK = 256
_MOST_VALUES = 2**31 - 1


class _Regime(NamedTuple):
    """How a step of up to `tokens` tokens is spread: each is one compiled variant a kernel and id dtype."""

    tokens: int
    block: int  # tokens a program
    side_by_side: bool  # columns of a layer across the threads, or a token a thread
    parts: str  # what a program does of its tokens: "all", a "layer", or an "order" of a layer
    near_first: bool  # whether a program asks first if any of its tokens looks behind its chunk


# Measured on an H200; see benchmarks/.
_REGIMES = (
    _Regime(512, 2, True, "layer", False),
    _Regime(2048, 4, True, "layer", False),
    _Regime(16384, 32, False, "order", True),
    _Regime(65536, 32, False, "all", True),
    _Regime(2**31, 64, False, "all", False),
)


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
        # 2^64 // block_size, as far as it has a place: for 1 it is one too large.
        block_magic = np.array([(2**64 - 1) // (block_size or 1)], dtype=np.uint64).view(np.int64)
        self._constants = torch.from_numpy(np.concatenate([block_magic, pack_layers(config)])).to(self.device)
        # Programmatic dependent launch came with compute capability 9.0.
        self._overlaps = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)

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
        if rows.numel() > _MOST_VALUES:
            most = _MOST_VALUES // (self._shape[0] * self._columns)
            raise ValueError(
                f"input_ids: got {len(input_ids)} tokens, expected at most {most}: rows are counted in int32"
            )
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
        block = _interpreted(tokens) or _WRITE_BLOCK
        _write_slots_kernel[(triton.cdiv(tokens, block),)](
            input_ids, query_start_loc, dead_mask, slot_mapping, self._token_map, self.cache,
            input_ids.stride(0), query_start_loc.stride(0), dead_mask.stride(0), slot_mapping.stride(0),
            tokens, query_start_loc.shape[0] - 1, self._token_map.numel(), self.cache.numel(),
            DEAD=DEAD, BLOCK=block, OVERLAP=self._overlaps, num_warps=4,
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
        tokens, requests = input_ids.shape[0], query_start_loc.shape[0] - 1
        regime = self._regime(tokens)
        # Without slots the kernel never touches `table` and `cache`: any tensor stands in for them.
        table = lookback_token_ids if block_table is None else block_table
        cache = self._token_map if self.cache is None else self.cache
        parts = {"all": 1, "layer": layers, "order": layers * (max_ngram - 1)}[regime.parts]
        overlaps = self._overlaps and self.slot_cache
        _hash_kernel[(triton.cdiv(tokens, regime.block), parts)](
            rows, input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
            table, cache, self._token_map, self._constants,
            input_ids.stride(0), positions.stride(0), query_start_loc.stride(0), dead_mask.stride(0),
            *lookback_token_ids.stride(), *lookback_dead_mask.stride(), *table.stride(),
            tokens, requests, max(1, tokens // requests), *table.shape, cache.numel(), self.block_size or 1,
            self._token_map.numel(), self._pad_id,
            SLOT_CACHE=self.slot_cache, LAYERS=layers, MAX_NGRAM=max_ngram, HEADS=heads, DEAD=DEAD,
            BLOCK=regime.block, SIDE_BY_SIDE=regime.side_by_side, PARTS=regime.parts, NEAR_FIRST=regime.near_first,
            HEAD_BLOCK=triton.next_power_of_2(heads), COLUMN_BLOCK=triton.next_power_of_2(self._columns),
            OVERLAP=overlaps, num_warps=1, **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip

    def _regime(self, tokens: int) -> _Regime:
        regime = next(regime for regime in _REGIMES if tokens <= regime.tokens)
        block = _interpreted(tokens)
        return regime._replace(block=block, side_by_side=True, parts="layer", near_first=False) if block else regime


def _interpreted(tokens: int) -> int | None:
    # The interpreter's cost is a program's, whatever its block: one program takes as many tokens as there are.
    return min(triton.next_power_of_2(tokens), 2048) if triton.knobs.runtime.interpret else None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _one_variant(kernel):
    """Compile a kernel once for its constants and dtypes: no size, stride or alignment makes a variant of its own.

    Only `rows` keeps its alignment, which the wide stores need: it is always a tensor of the launcher's own making.
    """
    parameters = inspect.signature(kernel).parameters.values()
    sizes = [one.name for one in parameters if one.annotation is not tl.constexpr and one.name != "rows"]
    return triton.jit(do_not_specialize=sizes)(kernel)


# fmt: off
@_one_variant
def _write_slots_kernel(
    input_ids, query_start_loc, dead_mask, slot_mapping, token_map, cache,
    ids_stride, start_stride, dead_stride, slot_stride,
    tokens, requests, vocabulary, slots,
    DEAD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    """Write each live token's compressed id, or DEAD, to its slot."""
    if OVERLAP:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = t < tokens
    end = tl.load(query_start_loc + requests * start_stride.to(tl.int64))
    slot = tl.load(slot_mapping + t * slot_stride, here, other=-1).to(tl.int64)
    compressed = _compress_at(input_ids, t * ids_stride, dead_mask, t * dead_stride, here, token_map, vocabulary, DEAD)
    tl.store(cache + slot, compressed, here & (t < end) & (slot >= 0) & (slot < slots))


# fmt: off
@_one_variant
def _hash_kernel(
    rows,  # [T, L, C] int32, contiguous
    input_ids, positions, query_start_loc, dead_mask, window_ids, window_dead, table, cache, token_map, constants,
    ids_stride, position_stride, start_stride, dead_stride, window_stride, window_column_stride,
    window_dead_stride, window_dead_column_stride, table_stride, table_column_stride,
    tokens, requests, tokens_a_request, table_rows, table_columns, slots, block_size, vocabulary, pad_id,
    SLOT_CACHE: tl.constexpr, LAYERS: tl.constexpr, MAX_NGRAM: tl.constexpr, HEADS: tl.constexpr, DEAD: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, PARTS: tl.constexpr, NEAR_FIRST: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    """Hash a block of tokens: rows[t, layer, :] for every layer, one of them, or one order of one."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = t < tokens
    guess = tl.minimum(t // tokens_a_request, requests - 1)
    likely = guess * tokens_a_request
    start = tl.load(query_start_loc + guess.to(tl.int64) * start_stride).to(tl.int32)
    stop = tl.load(query_start_loc + (guess + 1).to(tl.int64) * start_stride).to(tl.int32)
    position = tl.load(positions + t.to(tl.int64) * position_stride, here, other=0).to(tl.int64)

    batch = ()  # the sources of k = 0 .. N-1 as far as the batch knows them; what is another request's is not used
    for k in tl.static_range(MAX_NGRAM):
        at = t.to(tl.int64) - k
        inside = here & (at >= 0)
        batch = batch + (
            _compress_at(input_ids, at * ids_stride, dead_mask, at * dead_stride, inside, token_map, vocabulary, DEAD),
        )
    guessed_ids = ()  # the window of the guessed request, columns of k = 1 .. N-1
    guessed = ()
    if SIDE_BY_SIDE:
        for k in tl.static_range(1, MAX_NGRAM):
            column = k - 1 - (t - likely)
            window_at = guess.to(tl.int64) * window_stride + column.to(tl.int64) * window_column_stride
            dead_at = guess.to(tl.int64) * window_dead_stride + column.to(tl.int64) * window_dead_column_stride
            inside = here & (column >= 0)
            guessed_ids = guessed_ids + (tl.load(window_ids + window_at, inside, other=-1).to(tl.int64),)
            guessed = guessed + (
                _compress_at(window_ids, window_at, window_dead, dead_at, inside, token_map, vocabulary, DEAD),
            )

    lost = here & ((start > t) | (t >= stop))
    request, first = _find_request(t, lost, guess, start, query_start_loc, start_stride, requests, BLOCK)
    live = here & (request < requests)
    missed = live
    if SIDE_BY_SIDE:
        missed = live & ((request != guess) | (first != likely))
    within = t - first

    sources = batch
    near = True
    if NEAR_FIRST:
        near = tl.max((live & (within < MAX_NGRAM - 1)).to(tl.int32), axis=0) > 0
    if near:
        row = request.to(tl.int64)
        outside = ()
        unknown = ()
        for k in tl.static_range(1, MAX_NGRAM):
            behind = live & (within < k)
            again = behind & missed
            back = (k - 1 - within).to(tl.int64)
            id_at = row * window_stride + back * window_column_stride
            flag_at = row * window_dead_stride + back * window_dead_column_stride
            known_id = tl.load(window_ids + id_at, again, other=-1).to(tl.int64)
            known = _compress_at(window_ids, id_at, window_dead, flag_at, again, token_map, vocabulary, DEAD)
            if SIDE_BY_SIDE:
                known_id = tl.where(missed, known_id, guessed_ids[k - 1])
                known = tl.where(missed, known, guessed[k - 1])
            outside = outside + (known,)
            unknown = unknown + (behind & (known_id < 0),)
        if SLOT_CACHE:
            slot_of = ()
            reads_of = ()
            for k in tl.static_range(1, MAX_NGRAM):
                reads = unknown[k - 1] & (position >= k) & (table_rows > 0) & (table_columns > 0) & (slots > 0)
                slot = _slot(
                    position - k, row, reads, table, table_stride, table_column_stride, table_rows, table_columns,
                    slots, block_size, tl.load(constants),
                )  # fmt: skip
                slot_of = slot_of + (slot,)
                reads_of = reads_of + (reads,)
            if OVERLAP:
                gdc_wait()  # until here nothing was read that this step writes
        sources = (batch[0],)
        for k in tl.static_range(1, MAX_NGRAM):
            source = outside[k - 1]
            if SLOT_CACHE:
                # Past the first-level cache, which knows nothing of other multiprocessors' writes.
                held = tl.load(cache + slot_of[k - 1], reads_of[k - 1], other=DEAD, cache_modifier=".cg")
                source = tl.where(reads_of[k - 1], held, source)
            else:
                source = tl.where(unknown[k - 1], pad_id, source)
            sources = sources + (tl.where(within < k, source, batch[k]),)

    values = ()
    blocked = tl.zeros((BLOCK,), tl.int1)
    for k in tl.static_range(MAX_NGRAM):
        blocked |= (position < k) | (sources[k] == DEAD)
        values = values + (tl.where(blocked, pad_id, sources[k]).to(tl.int64),)

    if PARTS == "order":
        layer, order = tl.program_id(1) // (MAX_NGRAM - 1), tl.program_id(1) % (MAX_NGRAM - 1)
        hash_order(rows, constants + 1, t, live, values, layer, order, LAYERS, MAX_NGRAM, HEADS, HEAD_BLOCK)
    else:
        for index in tl.static_range(LAYERS if PARTS == "all" else 1):
            layer = index if PARTS == "all" else tl.program_id(1)
            if SIDE_BY_SIDE:
                hash_side_by_side(
                    rows, constants + 1, t, live, values, layer, LAYERS, MAX_NGRAM, HEADS, BLOCK, COLUMN_BLOCK
                )
            else:
                hash_a_token_a_thread(rows, constants + 1, t, live, values, layer, LAYERS, MAX_NGRAM, HEADS, HEAD_BLOCK)
    if OVERLAP:
        gdc_wait()  # who read no slot did not wait: the step must not end before its writes


@triton.jit
def _compress_at(ids, id_at, dead, dead_at, inside, token_map, vocabulary, DEAD: tl.constexpr):
    """Load tokens and flags and give their compressed ids; DEAD where dead, not inside, or out of range."""
    token = tl.load(ids + id_at, inside, other=-1).to(tl.int64)
    is_dead = tl.load(dead + dead_at, inside, other=0) != 0
    return tl.load(token_map + token, ~is_dead & (token >= 0) & (token < vocabulary), other=DEAD)


@triton.jit
def _find_request(t, lost, guess, start, query_start_loc, start_stride, requests, BLOCK: tl.constexpr):
    """Give each token's request, R for nobody's, and that request's first token; lost tokens are searched for.

    The request of t is the number of boundaries 1 .. R at or before t, its first token the last such boundary.
    """
    SAMPLES: tl.constexpr = 64
    FINE: tl.constexpr = 16
    FAR: tl.constexpr = 2147483647
    request = guess
    first = start
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        stride = (requests + SAMPLES - 1) // SAMPLES
        sample = (1 + tl.arange(0, SAMPLES)) * stride
        boundary = tl.load(query_start_loc + sample.to(tl.int64) * start_stride, sample <= requests, other=FAR)
        boundary = boundary.to(tl.int32)
        passed = boundary[None, :] <= t[:, None]
        coarse = tl.sum(passed.to(tl.int32), axis=1) * stride
        last = tl.max(tl.where(passed, boundary[None, :], 0), axis=1)
        more = tl.zeros((BLOCK,), tl.int32)
        base = stride * 0
        while base < stride:
            step = base + 1 + tl.arange(0, FINE)
            index = coarse[:, None] + step[None, :]
            inside = (step < stride)[None, :] & (index <= requests)
            boundaries = tl.load(query_start_loc + index.to(tl.int64) * start_stride, inside, other=FAR).to(tl.int32)
            behind = boundaries <= t[:, None]
            more += tl.sum(behind.to(tl.int32), axis=1)
            last = tl.maximum(last, tl.max(tl.where(behind, boundaries, 0), axis=1))
            base += FINE
        request = tl.where(lost, coarse + more, guess)
        first = tl.where(lost, last, start)
    return request, first


@triton.jit
def _slot(
    position, request, reads, table, table_stride, table_column_stride, table_rows, table_columns, slots,
    block_size, magic,
):  # fmt: skip
    """Give the slot that holds a position; some slot in bounds where the block table is wrong."""
    block = tl.umulhi(position.to(tl.uint64), magic.to(tl.uint64)).to(tl.int64)
    offset = position - block * block_size
    block += (offset >= block_size).to(tl.int64)
    offset -= tl.where(offset >= block_size, block_size, 0)
    cell = (
        tl.minimum(request, table_rows - 1) * table_stride + tl.minimum(block, table_columns - 1) * table_column_stride
    )
    number = tl.load(table + cell, reads, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(number * block_size + offset, 0), slots - 1)
