"""Refusals that both sides share: what an argument must look like, said by name, got and expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from reference.config import EngramConfig

INTEGERS = (torch.int32, torch.int64)
STREAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Refuse an argument that is not a tensor of this shape, dtype and device.

    Args:
        name: the argument as the caller knows it.
        value: what was passed.
        shape: one entry an axis; an int is the size it must have, a string names an axis of any size.
        dtypes: the dtypes that are allowed.
        device: the device it must be on; None allows any.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: of another shape, or on another device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")
    fits = value.ndim == len(shape) and all(
        isinstance(want, str) or got == want for got, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected [{', '.join(map(str, shape))}]")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got device {value.device}, expected {device}")


def check_token_map(token_map: object, config: EngramConfig) -> np.ndarray:
    """Refuse a token map that is no map into [0, W) or lacks the pad token; give it as int32 `[V]`.

    Raises:
        TypeError: not a 1-D array of integers.
        ValueError: an entry outside [0, W), or no entry for the pad token.
    """
    array = token_map.cpu().numpy() if isinstance(token_map, torch.Tensor) else np.asarray(token_map)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"token_map: got {array.dtype} of shape {array.shape}, expected integers [V]")
    size = config.engram_compressed_vocab_size
    outside = np.flatnonzero((array < 0) | (array >= size))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"token_map: got {array[at]} for token {at}, expected compressed ids in [0, {size})")
    if len(array) <= config.engram_pad_token_id:
        raise ValueError(
            f"token_map: got {len(array)} ids, expected one for the pad token {config.engram_pad_token_id}"
        )
    return array.astype(np.int32)


def check_kv_cache(kv_cache: object) -> None:
    """Refuse a KV cache that is not a tensor `[blocks, ...]`.

    Raises:
        TypeError: not a tensor.
        ValueError: without axes.
    """
    if not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"kv_cache: got {type(kv_cache).__name__}, expected a torch.Tensor")
    if kv_cache.ndim == 0:
        raise ValueError("kv_cache: got shape (), expected [blocks, ...]")


def check_block_size(block_size: int | None, *, slot_cache: bool) -> None:
    """Refuse a block size that is not a positive int; None is for the stateless way."""
    if block_size is None and not slot_cache:
        return
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size: got {block_size!r}, expected an int >= 1 (None only without a slot cache)")


def check_step(
    device: torch.device,
    lookback: int,
    slot_cache: bool,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    dead_mask: torch.Tensor,
    lookback_token_ids: torch.Tensor,
    lookback_dead_mask: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Refuse step tensors of wrong shape, dtype or device; reads no values, so it never waits for a device.

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """
    check_tensor("input_ids", input_ids, ("T",), INTEGERS, device)
    tokens = input_ids.shape[0]
    check_tensor("positions", positions, (tokens,), INTEGERS, device)
    check_tensor("query_start_loc", query_start_loc, ("R+1",), INTEGERS, device)
    requests = query_start_loc.shape[0] - 1
    if requests < 0:
        raise ValueError("query_start_loc: got 0 entries, expected R + 1, the first being 0")
    check_tensor("dead_mask", dead_mask, (tokens,), (torch.bool,), device)
    check_tensor("lookback_token_ids", lookback_token_ids, (requests, lookback), INTEGERS, device)
    check_tensor("lookback_dead_mask", lookback_dead_mask, (requests, lookback), (torch.bool,), device)
    for name, value, shape in (
        ("slot_mapping", slot_mapping, (tokens,)),
        ("block_table", block_table, ("R'", "blocks")),
    ):
        if slot_cache:
            check_tensor(name, value, shape, INTEGERS, device)
        elif value is not None:
            raise ValueError(f"{name}: got a tensor, expected None in the stateless way")


def check_step_values(
    vocabulary: int,
    block_size: int | None,
    slots: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    dead_mask: torch.Tensor,
    lookback_token_ids: torch.Tensor,
    lookback_dead_mask: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Refuse a caller's error in the values of a step, for the tokens that belong to a request.

    Args:
        vocabulary: V, token ids lie in [0, V).
        block_size: B of the slot way.
        slots: S of the slot way.

    Raises:
        ValueError: naming the argument, the index, what it is and what was expected.
    """
    bounds = query_start_loc.cpu().numpy().astype(np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > input_ids.shape[0]:
        raise ValueError(
            f"query_start_loc: got {bounds.tolist()}, expected it to start at 0, never to fall and to end by T "
            f"{input_ids.shape[0]}"
        )
    live, lengths = int(bounds[-1]), np.diff(bounds)
    request = np.repeat(np.arange(len(lengths)), lengths)
    ids, place = (tensor[:live].cpu().numpy() for tensor in (input_ids, positions))
    _check_range("input_ids", ids, 0, vocabulary)
    starts = bounds[:-1][request]
    chunk_start = place[starts] if live else place
    want = chunk_start + (np.arange(live) - starts)
    _check_range("positions", chunk_start, 0, 2**63 - 1)
    if (wrong := np.flatnonzero(place != want)).size:
        at = int(wrong[0])
        raise ValueError(f"positions: got {place[at]} at {at}, expected {want[at]}: consecutive within a request")
    reader = np.flatnonzero(lengths > 0)  # the requests that have tokens; each reads behind its chunk start
    window = lookback_token_ids.cpu().numpy()[reader]
    for column in range(window.shape[1]):
        _check_range(f"lookback_token_ids[:, {column}]", window[:, column], None, vocabulary, reader)
    if slot_mapping is None or block_table is None or block_size is None:
        return
    written = slot_mapping[:live].cpu().numpy()
    _check_range("slot_mapping", written, -1, slots)
    _check_shared_slots(written, np.where(dead_mask[:live].cpu().numpy(), -1, ids))
    if live and request[-1] >= block_table.shape[0]:
        raise ValueError(f"block_table: got {block_table.shape[0]} rows, expected one for request {request[-1]}")
    table = block_table.cpu().numpy()
    for column in range(window.shape[1]):
        behind = place[bounds[reader]].astype(np.int64) - 1 - column
        reads = (behind >= 0) & (window[:, column] < 0)
        _check_blocks(table, reader[reads], behind[reads], block_size, slots)


def _check_range(
    name: str, values: np.ndarray, low: int | None, high: int, places: Sequence[object] | np.ndarray | None = None
) -> None:
    outside = values >= high if low is None else (values < low) | (values >= high)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        least = "" if low is None else f"{low} <= "
        place = at if places is None else places[at]
        raise ValueError(f"{name}: got {values[at]} at {place}, expected {least}value < {high}")


def _check_shared_slots(slots: np.ndarray, held: np.ndarray) -> None:
    order = np.argsort(slots, kind="stable")
    slots, held = slots[order], held[order]
    clash = (slots[1:] == slots[:-1]) & (slots[1:] >= 0) & (held[1:] != held[:-1])
    if clash.any():
        at = int(np.flatnonzero(clash)[0])
        raise ValueError(
            f"slot_mapping: got slot {slots[at]} for tokens {order[at]} and {order[at + 1]}, which differ; expected "
            "tokens that write one slot in a step to hold the same id"
        )


def _check_blocks(table: np.ndarray, rows: np.ndarray, position: np.ndarray, block_size: int, slots: int) -> None:
    column = position // block_size
    if (past := column >= table.shape[1]).any():
        at = int(np.flatnonzero(past)[0])
        raise ValueError(
            f"block_table: got {table.shape[1]} columns, expected one for position {position[at]} of request {rows[at]}"
        )
    block = table[rows, column].astype(np.int64)
    where = [f"[{row}, {block}]" for row, block in zip(rows, column, strict=True)]
    _check_range("block_table", block, 0, slots // block_size, where)


def check_gate(
    hidden: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    token_mask: torch.Tensor | None,
    eps: float,
    clamp: float,
) -> None:
    """Refuse arguments of `engram_gate` of wrong shape, dtype, device or range.

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """
    check_tensor("hidden", hidden, ("T", "hc", "M"), STREAM_DTYPES)
    tokens, copies, width = hidden.shape
    if copies < 1 or width < 1:
        raise ValueError(f"hidden: got shape {tuple(hidden.shape)}, expected hc >= 1 and M >= 1")
    kv_dtypes = tuple(dict.fromkeys((torch.bfloat16, hidden.dtype)))
    check_tensor("kv", kv, ("Tkv", (copies + 1) * width), kv_dtypes, hidden.device)
    if kv.shape[0] > tokens:
        raise ValueError(f"kv: got {kv.shape[0]} tokens, expected at most the {tokens} of hidden")
    check_tensor("q_weight", q_weight, (copies, width), (torch.bfloat16,), hidden.device)
    check_tensor("k_weight", k_weight, (copies, width), (torch.bfloat16,), hidden.device)
    if token_mask is not None:
        check_tensor("token_mask", token_mask, (kv.shape[0],), (torch.bool,), hidden.device)
    for name, number in (("eps", eps), ("clamp", clamp)):
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}: got {number}, expected a finite number >= 0")
