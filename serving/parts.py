"""Run a step in parts: two microbatches, or a draft model that runs ahead of the verify."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from serving.step import Piece, Step


def split(step: Step, at: int, *, knows_fed: bool) -> tuple[Step, Step]:
    """Cut a step into two microbatches before token `at`; the second one's piece of a cut request is a chunk.

    Every row is kept in both parts, empty where it has no token there. The padding goes with the second part.

    Args:
        step: of one part.
        at: 1 .. num_tokens - 1.
        knows_fed: whether the second part's windows hold what the first part fed; else its slots must.

    Raises:
        ValueError: `at` leaves a part without a live token.
    """
    if not 0 < at < step.num_tokens:
        raise ValueError(f"at: got {at}, expected 1 to {step.num_tokens - 1}")
    ends = np.cumsum([len(piece.tokens) for piece in step.pieces])
    lengths = np.diff(ends, prepend=0)
    cuts = np.clip(at - (ends - lengths), 0, lengths)
    first = _part(step, np.zeros_like(cuts), cuts, knows_fed, "microbatch")
    second = _part(step, cuts, lengths, knows_fed, "microbatch", inside="microbatch inside a request", tail=True)
    return first, replace(second, slot_copies=())


def run_ahead(step: Step, *, knows_fed: bool) -> list[Step]:
    """Give the steps of a draft model that proposed a step's drafts, then the step itself.

    Draft step j feeds token j of every piece that has more than j drafts, to the same slots as the verify.

    Args:
        step: with verifying pieces or without.
        knows_fed: whether windows hold the drafts that were fed before.
    """
    drafts = np.array([piece.num_drafts for piece in step.pieces])
    steps = []
    for j in range(int(drafts.max(initial=0))):
        begin = np.where(drafts > j, j, 0)
        steps.append(_part(step, begin, begin + (drafts > j), knows_fed, "draft runs ahead"))
    for index in range(1, len(steps)):
        steps[index] = replace(steps[index], slot_copies=())
    return [*steps, replace(step, slot_copies=()) if steps else step]


def _part(
    step: Step,
    begins: np.ndarray,
    ends: np.ndarray,
    knows_fed: bool,
    event: str,
    *,
    inside: str = "",
    tail: bool = False,
) -> Step:
    """Take tokens begins[i] .. ends[i] - 1 of piece i; all rows stay."""
    bounds = step.query_start_loc.numpy()
    filled = np.flatnonzero(np.diff(bounds) > 0)
    counts = np.zeros(len(bounds) - 1, np.int64)
    counts[filled] = ends - begins
    firsts = bounds[filled] + begins
    total = int(counts.sum())
    offsets = np.cumsum(ends - begins) - (ends - begins)
    chosen = np.arange(total) - np.repeat(offsets - firsts, ends - begins)
    if tail:
        chosen = np.concatenate([chosen, np.arange(step.num_tokens, len(step.input_ids))])
    tokens = torch.from_numpy(chosen)
    ids, dead = step.lookback_token_ids, step.lookback_dead_mask
    if begins.any():
        ids, dead = ids.clone(), dead.clone()
        for row, piece, begin in zip(filled, step.pieces, begins, strict=True):
            if begin:
                ids[row], dead[row] = _window(piece, int(begin), ids[row], dead[row], knows_fed)
    return replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        query_start_loc=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        dead_mask=step.dead_mask[tokens],
        lookback_token_ids=ids,
        lookback_dead_mask=dead,
        slot_mapping=None if step.slot_mapping is None else step.slot_mapping[tokens],
        pieces=tuple(_pieces(step.pieces, begins.tolist(), ends.tolist(), event, inside)),
        num_tokens=total,
    )


def _window(
    piece: Piece, begin: int, ids: torch.Tensor, dead: torch.Tensor, knows_fed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    depth, fed = len(ids), piece.tokens[:begin][::-1].copy()
    flags = piece.token_dead[:begin][::-1] & knows_fed
    fed = fed if knows_fed else np.full_like(fed, -1)
    return (
        torch.cat([torch.from_numpy(fed).to(ids.dtype), ids])[:depth],
        torch.cat([torch.from_numpy(flags), dead])[:depth],
    )


def _pieces(
    pieces: Sequence[Piece], begins: Sequence[int], ends: Sequence[int], event: str, inside: str
) -> list[Piece]:
    parts = []
    for piece, begin, end in zip(pieces, begins, ends, strict=True):
        length, true = len(piece.tokens), len(piece.tokens) - piece.num_drafts
        if begin == end:
            continue
        events = piece.events | {event}
        if begin and inside:
            events |= {inside}
        stream, dead = piece.stream, piece.dead
        if begin > true:  # what stands before the part is not all true
            stream = np.concatenate([stream[: piece.start], piece.tokens[:begin]])
            dead = np.concatenate([dead[: piece.start], piece.token_dead[:begin]])
        parts.append(
            replace(
                piece,
                start=piece.start + begin,
                tokens=piece.tokens[begin:end],
                token_dead=piece.token_dead[begin:end],
                stream=stream,
                dead=dead,
                num_drafts=max(0, end - max(begin, true)),
                num_sampled=piece.num_sampled if end == length else 0,
                events=frozenset(events),
            )
        )
    return parts
