"""Mistakes of a runner or an engine: the hash state is right, and the steps that it is fed say something wrong."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from parity.faults.fault import plant
from serving.step import Piece, Step

Cell = tuple[int, bool]  # what a window's column says: an id, or -1, and whether it is dead
UNKNOWN, NOTHING = (-1, False), (0, True)
_BACK = ("preempted, recompute", "preempted, reload", "sleep and wake")


class Misstep:
    """Change the windows of an engine's steps; a subclass says how, and remembers what it needs between them."""

    depth = 3

    def __init__(self) -> None:
        self.memory: dict[Hashable, Any] = {}

    def change(self, engine: int, step: Step) -> Step:
        """Give a step of an engine, known by its number, as the faulty runner builds it: the same where it is right."""
        if not step.pieces:
            return step
        ids, dead, changed = step.lookback_token_ids.clone(), step.lookback_dead_mask.clone(), False
        self.depth = ids.shape[1]
        self.begin(engine, step)
        for row, piece in zip(rows_of(step), step.pieces, strict=True):
            cells = list(zip(ids[row].tolist(), dead[row].tolist(), strict=True))
            told = [*self.window((engine, piece.request_id), piece, cells), *[NOTHING] * self.depth][: self.depth]
            if told != cells:
                changed = True
                ids[row] = torch.tensor([cell[0] for cell in told], dtype=ids.dtype)
                dead[row] = torch.tensor([cell[1] for cell in told])
        return replace(step, lookback_token_ids=ids, lookback_dead_mask=dead) if changed else step

    def begin(self, engine: int, step: Step) -> None:
        """Look at a whole step before its windows."""

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give the window of a piece, newest first, from the right one; missing columns hold nothing."""
        return cells

    def history(self, piece: Piece) -> list[Cell]:
        """Give the true tokens before a piece, newest first, D at most."""
        before = slice(max(0, piece.start - self.depth), piece.start)
        return list(zip(piece.stream[before][::-1].tolist(), piece.dead[before][::-1].tolist(), strict=True))


def rows_of(step: Step) -> list[int]:
    """Give the row of every piece's request."""
    return step.query_start_loc.diff().nonzero().flatten().tolist()


def fed(piece: Piece) -> list[Cell]:
    """Give a piece's own tokens, oldest first."""
    return list(zip(piece.tokens.tolist(), piece.token_dead.tolist(), strict=True))


def ahead(piece: Piece) -> bool:
    """Say whether a piece is a draft model's, before the verify."""
    return "draft runs ahead" in piece.events


@plant("H1", "the window holds -1 for tokens that were sampled on the device, and that is taken as an id")
class SampledTokensReadAsIds(Misstep):
    """The host's copy of a stream waits for sampled tokens and holds -1; clamped to 0, it looks like a token.

    Source: vllm#53896. Law: agreement.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Put id 0 where a sampled position stands."""
        first = self.memory.get(key, piece.start)
        if piece.num_sampled and key not in self.memory:
            self.memory[key] = piece.end - piece.num_drafts
        return [(0, False) if piece.start - 1 - c >= first else cell for c, cell in enumerate(cells)]


@plant("H2", "the rejected draft stays in the history")
class RejectedDraftStays(Misstep):
    """The history is appended to whenever tokens are fed, and nobody takes rejected drafts back out.

    Source: omlx#3232. Law: rollback.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give the newest tokens that were ever fed."""
        if ahead(piece):
            return cells
        if key not in self.memory or piece.events & {*_BACK}:
            self.memory[key] = self.history(piece)[::-1]
        told = self.memory[key][-self.depth :][::-1]
        self.memory[key] = [*self.memory[key], *fed(piece)][-self.depth :]
        return told


@plant("H3", "the history is reset to pad when a request goes back over a rejected draft")
class RewindResets(Misstep):
    """The history cannot be cut, so any rewind empties it.

    Source: ik_llama.cpp#2460. Law: rollback.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Lose what stands before the last rewind."""
        end, floor = self.memory.get(key, (piece.start, 0))
        if piece.start < end and not ahead(piece):
            floor = piece.start
        self.memory[key] = (end if ahead(piece) else piece.end), floor
        return [NOTHING if piece.start - 1 - c < floor else cell for c, cell in enumerate(cells)]


@plant("H4", "the history stands still from the first verify on")
class HistoryFreezes(Misstep):
    """What commits a verified step to the history returns early from its second call on.

    Source: sglang#37794. Law: rollback.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give what was there behind the first verify."""
        state = self.memory.get(key)
        if state == "verified":
            self.memory[key] = state = self.history(piece)
        elif state is None and piece.num_drafts and not ahead(piece):
            self.memory[key] = "verified"
        return state if isinstance(state, list) else cells


@plant("H5", "the second microbatch of a cut request does not know the tokens before the cut")
class MicrobatchLosesItsPast(Misstep):
    """A step is cut into two by tokens, and the second half begins as if its requests did.

    Source: vllm#56440. Law: microbatches.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Know nothing behind a cut."""
        return [NOTHING] * self.depth if "microbatch inside a request" in piece.events else cells


@plant("H7", "the history of an imported request is never filled")
class ImportNotSeeded(Misstep):
    """A prefill elsewhere sends KV, and the history on this side begins with what is computed here.

    Source: sglang#30175. Law: import.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Not know what stands before the import's end."""
        if "import" in piece.events:
            self.memory[key] = piece.start
        end = self.memory.get(key, 0)
        return [UNKNOWN if piece.start - 1 - c < end else cell for c, cell in enumerate(cells)]


@plant("H8", "the token sampled behind an unfinished prompt chunk, which nobody wants, enters the history")
class ChunkSampleEnters(Misstep):
    """The sampler runs on every row; what it says behind half a prompt is thrown away, but not by the history.

    Source: sglang#30175. Law: chunks.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Push the last token once more in front of the history."""
        stray = self.memory.pop(key, None)
        if piece.num_sampled == 0 and not ahead(piece):
            self.memory[key] = fed(piece)[-1]
        return cells if stray is None else [stray, *self.history(piece)]


@plant("H10", "after a prefix hit with one token left only one predecessor is known")
class OneTokenLeftKnowsOne(Misstep):
    """A hit of the whole prompt is cut back by one token, and the history is rebuilt from that token alone.

    Source: Whallm#5. Law: prefix_hit.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Keep the newest column."""
        return cells[:1] if "one token left" in piece.events else cells


@plant("H14", "the window is taken where the engine counted drafts as computed, not where the piece starts")
class WindowAtComputedTokens(Misstep):
    """The scheduler runs ahead and counts every draft as computed; behind a rejection the window stands too far right.

    Law: rollback.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Take the window at the end of what was fed last."""
        if ahead(piece):
            return cells
        end, log = self.memory.get(key, (piece.start, {}))
        log |= {piece.start - 1 - c: cell for c, cell in enumerate(self.history(piece))}
        log[piece.start] = fed(piece)[0]
        told = cells
        if end > piece.start and not piece.events & {*_BACK}:
            told = [log.get(end - 1 - c, UNKNOWN) for c in range(self.depth)]
        log |= {piece.start + at: cell for at, cell in enumerate(fed(piece))}
        self.memory[key] = piece.end, {at: cell for at, cell in log.items() if at > piece.end - 3 * self.depth}
        return told


@plant("H16", "a request that is given a used id finds the old request's history")
class OldRequestsHistory(Misstep):
    """The history is kept by the request's id, which is used again, and is not cleared at the end.

    Source: vllm-ascend, its history table. Law: reuse.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Begin with what stands under the id."""
        shelf = (key[0], piece.handle)
        owner, tail = self.memory.get(shelf, (piece.request_id, []))
        self.memory[shelf] = piece.request_id, [*reversed(fed(piece)), *self.history(piece)][: self.depth]
        return cells if owner == piece.request_id or not tail else tail


@plant("H17", "a request that was preempted comes back without its history")
class PreemptionDropsHistory(Misstep):
    """A preemption frees the history with the blocks, and a resume whose KV is loaded does not rebuild it.

    Law: reload.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Not know what was computed before."""
        if "preempted, reload" in piece.events:
            self.memory[key] = piece.start
        end = self.memory.get(key, 0)
        return [UNKNOWN if piece.start - 1 - c < end else cell for c, cell in enumerate(cells)]


@plant("H22", "a beam that goes on from another one keeps its own history")
class BeamsKeepTheirHistory(Misstep):
    """A reorder permutes the KV cache between beams; the history is a member that it does not know of.

    Source: the beam search of HF transformers. Law: beams.
    """

    def begin(self, engine: int, step: Step) -> None:
        """Remember whose history each request has, and which requests left."""
        there = {piece.request_id for piece in step.pieces}
        self._left = [tail for key, tail in self.memory.items() if key[0] == engine and key[1] not in there]  # type: ignore[index]

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give a follower the history of a beam that left."""
        told = cells
        if "beam reorder" in piece.events and self._left:
            told = self._left[-1]
        self.memory[key] = [*reversed(fed(piece)), *self.history(piece)][: self.depth]
        return told


@plant("H23", "the history leaks from one packed document into the next")
class DocumentsLeak(Misstep):
    """A packed sequence is hashed as one request; positions count on, and so do the lookbacks.

    Law: documents.
    """

    def change(self, engine: int, step: Step) -> Step:
        """Let a document that begins see the one before it in the batch."""
        if not any("packed documents" in piece.events for piece in step.pieces):
            return step
        step = replace(step, lookback_token_ids=step.lookback_token_ids.clone(), positions=step.positions.clone())
        step = replace(step, lookback_dead_mask=step.lookback_dead_mask.clone())
        begin, before = 0, None
        for row, piece in zip(rows_of(step), step.pieces, strict=True):
            depth, end = step.lookback_token_ids.shape[1], begin + len(piece.tokens)
            if "packed documents" in piece.events and piece.start == 0 and before is not None:
                tail = [*reversed(fed(before)), *[NOTHING] * depth][:depth]
                step.positions[begin:end] += depth
                step.lookback_token_ids[row] = torch.tensor([cell[0] for cell in tail])
                step.lookback_dead_mask[row] = torch.tensor([cell[1] for cell in tail])
            begin, before = end, piece
        return step


@plant("H35", "each row of the batch keeps its own history, although requests change rows")
class HistoryByBatchRow(Misstep):
    """The history is a buffer of batch rows; when a request leaves and others move up, it does not move with them.

    Law: company.
    """

    def begin(self, engine: int, step: Step) -> None:
        """Number the rows anew."""
        self._row = 0

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give what the row held."""
        shelf, self._row = (key[0], self._row), self._row + 1
        owner, tail = self.memory.get(shelf, (None, []))
        self.memory[shelf] = piece.request_id, [*reversed(fed(piece)), *self.history(piece)][: self.depth]
        return tail if tail and owner != piece.request_id and piece.start else cells


@plant("H36", "the window is one step late")
class WindowOneStepLate(Misstep):
    """The window of a decode is copied to the device before the step in flight has added its token.

    Law: agreement.
    """

    def window(self, key: tuple[int, int], piece: Piece, cells: list[Cell]) -> list[Cell]:
        """Give the true window of the piece before."""
        late, self.memory[key] = self.memory.get(key), self.history(piece)
        return cells if late is None or not late else late
