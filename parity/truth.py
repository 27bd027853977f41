"""The rows that a step must give: those of each request alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from parity.world import World
from reference.ngram_hash import ngram_hash
from serving.rng import Rng
from serving.step import Piece

_ANY_ID, _DEAD = np.zeros(1, np.int64), np.ones(1, bool)


class Truth:
    """Compute expected rows on a device, and check samples of them in two slower, plainer ways.

    Args:
        world: configuration and token map.
        device: where the rows are to lie.
        seed: of the sample.
    """

    def __init__(self, world: World, device: torch.device, seed: int = 0) -> None:
        self.world = world
        self.device = device
        self.whole_rows = 0
        self.integer_rows = 0
        self._rng = Rng(seed)
        layout = world.layout
        arrays = {"multipliers": world.multipliers, "primes": layout.primes, "offsets": layout.offsets}
        self._constants = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    def rows(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Give the expected rows `[sum of piece lengths, L, C]` int32 of pieces, in order.

        A row depends on its token and the D before it alone, and a dead token blocks a lookback just as the start of a
        request does. So the pieces are laid end to end, each behind a dead token and the D tokens before it, and hashed
        as one request.
        """
        depth = self.world.config.lookback
        ids: list[np.ndarray] = []
        dead: list[np.ndarray] = []
        wanted: list[np.ndarray] = []
        for piece in pieces:
            before = slice(max(0, piece.start - depth), piece.start)
            context = piece.stream[before]
            ids += [_ANY_ID, context, piece.tokens]
            dead += [_DEAD, piece.dead[before], piece.token_dead]
            wanted += [np.zeros(1 + len(context), bool), np.ones(len(piece.tokens), bool)]
        compressed = torch.from_numpy(self.world.token_map[np.concatenate(ids)]).to(self.device)
        flags = torch.from_numpy(np.concatenate(dead)).to(self.device)
        keep = torch.from_numpy(np.flatnonzero(np.concatenate(wanted))).to(self.device)
        return ngram_hash(compressed, flags, pad_id=self.world.pad_id, **self._constants)[keep]

    def check_whole(
        self, requests: Sequence[Hashable], pieces: Sequence[Piece], rows: torch.Tensor, limit: int
    ) -> None:
        """Check expected rows against whole requests, each hashed by NumPy from position 0, up to `limit` positions.

        Args:
            requests: whose each piece is.
            pieces: in order of time.
            rows: what `rows` gave for the pieces.
            limit: positions that are hashed, about.

        Raises:
            RuntimeError: they differ: the judge itself is wrong.
        """
        last = dict(zip(requests, pieces, strict=True))
        whole: dict[Hashable, np.ndarray] = {}
        for request, piece in last.items():
            if limit <= 0:
                break
            whole[request] = self.world.alone(piece.stream, piece.dead)
            limit -= len(piece.stream)
        begin = 0
        for request, piece in zip(requests, pieces, strict=True):
            given, begin = rows[begin : begin + len(piece.tokens)], begin + len(piece.tokens)
            if request not in whole:
                continue
            stream = last[request].stream[piece.start : piece.end]
            on_stream = np.logical_and.accumulate(stream == piece.tokens[: len(stream)])  # not on it: a rejected draft
            want = whole[request][piece.start : piece.end][on_stream]
            self.whole_rows += len(want)
            if not np.array_equal(given[: len(want)].cpu().numpy(), want):
                raise RuntimeError(
                    f"the judge: request {piece.request_id} from {piece.start} on: whole and piece differ"
                )

    def check_integers(self, pieces: Sequence[Piece], rows: torch.Tensor, samples: int) -> None:
        """Check a sample of expected rows, rejected drafts among them, against the oracle in plain integers.

        Raises:
            RuntimeError: they differ: the judge itself is wrong.
        """
        begins = np.cumsum([0] + [len(piece.tokens) for piece in pieces])
        for _ in range(samples):
            pick = self._rng.below(len(pieces))
            piece = pieces[pick]
            index = self._rng.below(len(piece.tokens))
            want = self.integer_row(piece, index)
            self.integer_rows += 1
            if rows[begins[pick] + index].tolist() != want:
                raise RuntimeError(f"the judge: request {piece.request_id} at {piece.start + index}: integers differ")

    def integer_row(self, piece: Piece, index: int) -> list[list[int]]:
        """Give one row, `[L][C]`, from the oracle in plain integers."""
        tokens = [*piece.stream[: piece.start].tolist(), *piece.tokens.tolist()]
        dead = [*piece.dead[: piece.start].tolist(), *piece.token_dead.tolist()]
        return self.world.oracle.row(tokens, dead, piece.start + index)
