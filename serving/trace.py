"""Traces: everything that a run fed to a forward call, and the rows it had to get, in one file; see docs/traces.md."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from serving.step import Piece, Step
from serving.tensor_file import digest, pack
from serving.trace_extras import gather_extras

FORMAT, VERSION = "engram-trace", "1"
STEP_COLUMNS = ("engine", "block_size", "blocks", "binding")
PIECE_COLUMNS = ("step", "request", "start", "length", "num_drafts", "num_sampled")
CONSTANTS = ("multipliers", "primes", "offsets")
COPY_COLUMNS = ("source", "target")


@dataclass(frozen=True, eq=False)
class TracedStep:
    """Hold one forward call of a run.

    Attributes:
        engine: whose state it goes to; each engine of a run has its own.
        block_size: B; 0 in the stateless way.
        blocks: of the KV cache that is bound at this step.
        step: the tensors and pieces. Read from a file, its index counts the steps of the file, and a piece's stream
            holds the D tokens before its start and no others.
        rows: `[live, L, C]` int32, those of each request alone; None in a file of inputs.
    """

    engine: int
    block_size: int
    blocks: int
    step: Step
    rows: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Trace:
    """Hold a run.

    Attributes:
        name: of the run.
        config: the model's configuration, JSON values by public name.
        engines: how each engine ran, JSON values; for people to read.
        token_map: `[V]` int32; None where the file only names it.
        token_map_name: a map that every reader has; None: the file holds it.
        token_map_sha256: of the map's entries as little-endian int32, in hexadecimal.
        constants: multipliers `[L, N]`, primes `[L, C]` and offsets `[L, C]`, int64.
        steps: in the order in which they ran.
    """

    name: str
    config: dict[str, Any]
    engines: list[dict[str, Any]]
    token_map: np.ndarray | None
    token_map_name: str | None
    token_map_sha256: str
    constants: dict[str, np.ndarray]
    steps: list[TracedStep] = field(default_factory=list)

    @property
    def lookback(self) -> int:
        """D, the tokens before the newest that a row depends on."""
        return self.constants["multipliers"].shape[1] - 1

    @property
    def num_rows(self) -> int:
        """Live rows of all steps."""
        return sum(one.step.num_tokens for one in self.steps)


class Tail:
    """Stand for a stream of which only the last tokens are known; a position past 2^31 costs nothing."""

    def __init__(self, values: np.ndarray, end: int) -> None:
        self._values, self._first, self._end = values, end - len(values), end

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, at: int | slice) -> Any:
        if not isinstance(at, slice):
            if not self._first <= at < self._end:
                raise IndexError(f"stream: got {at}, expected {self._first} to {self._end - 1}, what the trace holds")
            return self._values[at - self._first]
        start, stop, _ = at.indices(self._end)
        if start < self._first and start < stop:
            raise IndexError(f"stream: got {start}, expected {self._first} to {self._end}, what the trace holds")
        return self._values[start - self._first : stop - self._first : at.step]


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace; equal traces give equal bytes."""
    Path(path).write_bytes(pack_trace(trace))


def pack_trace(trace: Trace, *, with_rows: bool = True, token_map: np.ndarray | None = None) -> bytes:
    """Give the bytes of a trace's file.

    Args:
        trace: the run.
        with_rows: whether the expected rows are in it.
        token_map: the map, to be in the file although it has a name.
    """
    if token_map is None and trace.token_map_name is None:
        token_map = trace.token_map
    pieces = [(number, piece) for number, one in enumerate(trace.steps) for piece in one.step.pieces]
    story = {
        "name": trace.name,
        "config": trace.config,
        "engines": trace.engines,
        "token_map": {"name": trace.token_map_name, "sha256": trace.token_map_sha256},
        "events": [sorted(piece.events) for _, piece in pieces],
        "step_extras": gather_extras([one.step for one in trace.steps]),
        "piece_extras": gather_extras([piece for _, piece in pieces]),
    }
    arrays = {"story": np.frombuffer(json.dumps(story, separators=(",", ":")).encode(), np.uint8)}
    if token_map is not None:
        arrays["token_map"] = token_map.astype(np.int32)
    arrays |= {name: trace.constants[name] for name in CONSTANTS}
    arrays["steps"] = _table(
        [[one.engine, one.block_size, one.blocks, one.step.binding] for one in trace.steps], STEP_COLUMNS
    )
    arrays["pieces"] = _table(
        [[at, p.request_id, p.offset + p.start, len(p.tokens), p.num_drafts, p.num_sampled] for at, p in pieces],
        PIECE_COLUMNS,
    )
    arrays["history_ids"], arrays["history_dead"] = _history([piece for _, piece in pieces], trace.lookback)
    for number, one in enumerate(trace.steps):
        for name, tensor in one.step.arguments().items():
            if tensor is not None:
                arrays[f"{number}/{name}"] = tensor.cpu().numpy()
        if one.step.slot_copies:
            arrays[f"{number}/slot_copies"] = _table([list(pair) for pair in one.step.slot_copies], COPY_COLUMNS)
        if with_rows:
            if one.rows is None:
                raise ValueError(f"{number}/rows: got None, expected the rows of step {number}")
            arrays[f"{number}/rows"] = one.rows
    return pack(arrays, {"format": FORMAT, "version": VERSION, "sha256": digest(arrays)})


def map_digest(token_map: np.ndarray) -> str:
    """Return the SHA-256 of a map's entries as little-endian int32, in hexadecimal."""
    return hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()


def _table(rows: list[list[int]], columns: Sequence[str]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, len(columns))


def _history(pieces: Sequence[Piece], depth: int) -> tuple[np.ndarray, np.ndarray]:
    ids, dead = np.full((len(pieces), depth), -1, np.int64), np.zeros((len(pieces), depth), np.bool_)
    for row, piece in enumerate(pieces):
        before = slice(max(0, piece.start - depth), piece.start)
        count = before.stop - before.start
        ids[row, :count], dead[row, :count] = piece.stream[before][::-1], piece.dead[before][::-1]
    return ids, dead
