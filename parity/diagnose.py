"""Explain a wrong row: whose it is, where each lookback should have come from, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.compare import Mismatch, piece_sources
from parity.world import World


def describe(mismatch: Mismatch, world: World, repro: str) -> str:
    """Write what is known about a wrong row, down to the command that shows it again.

    Args:
        mismatch: the row.
        world: the configuration it was hashed under.
        repro: the command line of the run.
    """
    piece, index = mismatch.piece, mismatch.index
    position = piece.start + index
    draft = index - (len(piece.tokens) - piece.num_drafts) + 1
    kind = f", draft {draft} of {piece.num_drafts}" if draft > 0 else ""
    return "\n".join(
        [
            f"{mismatch.implementation}: first wrong row in run {mismatch.run!r}, engine {mismatch.engine}, "
            f"step {mismatch.step.index}",
            f"  request {piece.request_id}, position {position}{kind}; its piece is {piece.start}..{piece.end - 1}: "
            f"{', '.join(sorted(piece.events))}",
            *(f"  {line}" for line in _lookbacks(mismatch, world)),
            *(f"  {line}" for line in _columns(mismatch, world)),
            f"  REPRO: {repro}",
        ]
    )


def _lookbacks(mismatch: Mismatch, world: World) -> Iterator[str]:
    piece, index = mismatch.piece, mismatch.index
    row = next(row for row, other in enumerate(mismatch.step.pieces) if other is piece)
    starts = np.array([other.start for other in mismatch.step.pieces])
    sources = piece_sources(mismatch.step, starts)[row]
    for back in range(world.config.lookback + 1):
        at = piece.start + index - back
        if at < 0:
            yield f"look back {back}: before the request begins, so the pad id {world.pad_id}"
            continue
        if back <= index:
            source, token, dead = "the batch", piece.tokens[index - back], piece.token_dead[index - back]
        else:
            column = back - index - 1
            source = f"window column {column}" if sources[column] == "window" else _slot(mismatch, row, at)
            token, dead = piece.stream[at], piece.dead[at]
        what = "dead" if dead else f"compressed {world.token_map[token]}"
        yield f"look back {back}: position {at} from {source}: token {token}, {what}"


def _slot(mismatch: Mismatch, row: int, position: int) -> str:
    if mismatch.step.block_table is None:
        return "nowhere (the runner does not know it)"
    # Pieces stand in batch order and empty requests only at the end, so the piece's place is its table row.
    block = int(mismatch.step.block_table[row, position // mismatch.block_size])
    return f"slot {block * mismatch.block_size + position % mismatch.block_size} (block {block})"


def _columns(mismatch: Mismatch, world: World) -> Iterator[str]:
    heads = world.config.engram_n_heads
    for layer, layer_id in enumerate(world.config.engram_layer_ids):
        expected, got = mismatch.expected[layer], mismatch.got[layer]
        wrong = expected != got
        orders = [
            f"order {order} {'all heads' if part.all() else f'heads {np.flatnonzero(part).tolist()}'}"
            for order, part in enumerate(wrong.reshape(-1, heads), start=2)
            if part.any()
        ]
        yield f"layer {layer_id}: {wrong.sum()} of {wrong.size} columns wrong {', '.join(orders)}".rstrip()
        if orders:
            yield f"  expected {expected.tolist()}"
            yield f"  got      {got.tolist()}"
