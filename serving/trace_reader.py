"""Read traces, and refuse by name what is damaged, incomplete, of another version or not known here."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from serving.step import Piece, Step
from serving.tensor_file import Refused, digest, unpack
from serving.trace import (
    COPY_COLUMNS,
    FORMAT,
    PIECE_COLUMNS,
    STEP_COLUMNS,
    VERSION,
    Tail,
    Trace,
    TracedStep,
    map_digest,
)
from serving.trace_extras import INPUTS, extras_by_number, extras_of

_I32, _I64, _U8, _BOOL = (np.dtype(kind) for kind in (np.int32, np.int64, np.uint8, np.bool_))
_STORY = {
    "name": str, "config": dict, "engines": list, "token_map": dict, "events": list, "step_extras": dict,
    "piece_extras": dict,
}  # fmt: skip


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        Refused: naming the file and what is wrong with it.
        OSError: it cannot be read.
    """
    try:
        return unpack_trace(Path(path).read_bytes())
    except Refused as error:
        raise Refused(f"{path}: {error}") from error


def unpack_trace(data: bytes) -> Trace:
    """Read the bytes of a trace's file.

    Raises:
        Refused: damaged, of another format or version, or with something that is missing, misshapen or unknown.
    """
    arrays, metadata = unpack(data)
    for key, want in (("format", FORMAT), ("version", VERSION), ("sha256", digest(arrays))):
        if (got := metadata.pop(key, None)) != want:
            raise Refused(f"{key}: got {got!r}, expected {want!r}")
    if metadata:
        raise Refused(f"__metadata__: got {', '.join(metadata)}, expected format, version and sha256 alone")
    reader = _Reader(arrays)
    trace = reader.trace()
    if left := sorted(set(arrays) - reader.taken):
        raise Refused(f"{left[0]}: got {len(left)} arrays that no trace has, expected none")
    return trace


class _Reader:
    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.taken: set[str] = set()

    def trace(self) -> Trace:
        story = self._story()
        multipliers = self._take("multipliers", ("L", "N"), _I64)
        if multipliers.shape[1] < 2:
            raise Refused(f"multipliers: got N {multipliers.shape[1]}, expected at least 2")
        primes = self._take("primes", (len(multipliers), "C"), _I64)
        offsets = self._take("offsets", primes.shape, _I64)
        token_map = self._token_map(story["token_map"])
        steps = self._take("steps", ("S", len(STEP_COLUMNS)), _I64)
        _check_steps(steps)
        trace = Trace(
            story["name"], story["config"], story["engines"], token_map, story["token_map"]["name"],
            story["token_map"]["sha256"], {"multipliers": multipliers, "primes": primes, "offsets": offsets},
        )  # fmt: skip
        self._pieces = self._take("pieces", ("P", len(PIECE_COLUMNS)), _I64)
        self._history = (
            self._take("history_ids", (len(self._pieces), trace.lookback), _I64),
            self._take("history_dead", (len(self._pieces), trace.lookback), _BOOL),
        )
        self._events = story["events"]
        self._extras = [extras_by_number(name, story[name]) for name in ("step_extras", "piece_extras")]
        if len(self._events) != len(self._pieces):
            raise Refused(f"events: got those of {len(self._events)} pieces, expected {len(self._pieces)}")
        if not all(isinstance(own, list) and all(isinstance(one, str) for one in own) for own in self._events):
            raise Refused("events: got what is no list of names for every piece, expected one")
        owners = self._pieces[:, 0]
        if (np.diff(owners) < 0).any() or ((owners < 0) | (owners >= len(steps))).any():
            raise Refused(f"pieces: got steps {owners.tolist()[:20]}, expected 0 to {len(steps) - 1}, never falling")
        bounds = np.searchsorted(owners, np.arange(len(steps) + 1)).tolist()
        with_rows = any(name.endswith("/rows") for name in self._arrays)
        for number, (engine, block_size, blocks, binding) in enumerate(steps.tolist()):
            own = range(bounds[number], bounds[number + 1])
            step = self._step(number, own, block_size > 0, trace.lookback, binding)
            rows = self._take(f"{number}/rows", (step.num_tokens, *primes.shape), _I32) if with_rows else None
            trace.steps.append(TracedStep(engine, block_size, blocks, step, rows))
        return trace

    def _take(self, name: str, shape: Sequence[int | str], *dtypes: np.dtype) -> np.ndarray:
        """Give an array; a string stands for any size."""
        if name not in self._arrays:
            raise Refused(f"{name}: missing, expected in every trace of this kind")
        self.taken.add(name)
        array = self._arrays[name]
        if array.dtype not in dtypes:
            raise Refused(f"{name}: got {array.dtype}, expected {' or '.join(map(str, dtypes))}")
        if len(shape) != array.ndim or any(
            isinstance(w, int) and w != g for w, g in zip(shape, array.shape, strict=True)
        ):
            raise Refused(f"{name}: got shape {list(array.shape)}, expected [{', '.join(map(str, shape))}]")
        return array

    def _story(self) -> dict[str, Any]:
        try:
            story = json.loads(self._take("story", ("bytes",), _U8).tobytes())
        except ValueError as error:
            raise Refused(f"story: got bytes that are no JSON ({error}), expected JSON") from error
        if not isinstance(story, dict) or set(story) != set(_STORY):
            raise Refused(
                f"story: got {sorted(story) if isinstance(story, dict) else story!r}, expected {sorted(_STORY)}"
            )
        for key, kind in _STORY.items():
            if not isinstance(story[key], kind):
                raise Refused(f"story.{key}: got {type(story[key]).__name__}, expected {kind.__name__}")
        if set(story["token_map"]) != {"name", "sha256"}:
            raise Refused(f"story.token_map: got {sorted(story['token_map'])}, expected name and sha256")
        return story

    def _token_map(self, named: dict[str, Any]) -> np.ndarray | None:
        if "token_map" not in self._arrays and named["name"] is not None:
            return None
        token_map = self._take("token_map", ("V",), _I32)
        if map_digest(token_map) != named["sha256"]:
            raise Refused(f"token_map: got SHA-256 {map_digest(token_map)}, expected {named['sha256']}")
        return token_map

    def _step(self, number: int, own: range, slots: bool, depth: int, binding: int) -> Step:
        starts = self._take(f"{number}/query_start_loc", ("R+1",), _I32, _I64)
        ids = self._take(f"{number}/input_ids", ("T",), _I32, _I64)
        tokens, requests = len(ids), len(starts) - 1
        if requests < 0 or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > tokens:
            raise Refused(
                f"{number}/query_start_loc: got {starts.tolist()}, expected 0, never falling, to at most {tokens}"
            )
        shapes: dict[str, tuple[tuple[int | str, ...], tuple[np.dtype, ...]]] = {
            "positions": ((tokens,), (_I32, _I64)),
            "dead_mask": ((tokens,), (_BOOL,)),
            "lookback_token_ids": ((requests, depth), (_I32, _I64)),
            "lookback_dead_mask": ((requests, depth), (_BOOL,)),
        }
        if slots:
            shapes |= {"slot_mapping": ((tokens,), (_I32, _I64)), "block_table": (("R", "blocks"), (_I32, _I64))}
        found = {name: self._take(f"{number}/{name}", shape, *kinds) for name, (shape, kinds) in shapes.items()}
        found |= {"input_ids": ids, "query_start_loc": starts}
        tensors = {name: torch.from_numpy(found[name]) if name in found else None for name in INPUTS}
        pieces = tuple(self._piece(at, found, *span) for at, span in self._spans(number, own, starts))
        copies = np.zeros((0, 2), np.int64)
        if f"{number}/slot_copies" in self._arrays:
            copies = self._take(f"{number}/slot_copies", ("n", len(COPY_COLUMNS)), _I64)
        return Step(
            index=number,
            pieces=pieces,
            num_tokens=int(starts[-1]),
            binding=binding,
            slot_copies=tuple((source, target) for source, target in copies.tolist()),
            **tensors,  # type: ignore[arg-type]
            **extras_of(Step, number, self._extras[0]),
        )

    def _spans(self, number: int, own: range, starts: np.ndarray) -> list[tuple[int, tuple[int, int]]]:
        """Give every piece of a step with its first token and the one behind its last."""
        spans = [(begin, end) for begin, end in pairwise(starts.tolist()) if begin < end]
        lengths, given = [end - begin for begin, end in spans], self._pieces[own.start : own.stop, 3].tolist()
        if given != lengths:
            raise Refused(
                f"pieces: got lengths {given} in step {number}, expected {lengths}: one a request with tokens"
            )
        return list(zip(own, spans, strict=True))

    def _piece(self, at: int, found: dict[str, np.ndarray], begin: int, end: int) -> Piece:
        number, request, position, _, drafts, sampled = self._pieces[at].tolist()
        extras = extras_of(Piece, at, self._extras[1])
        start = position - extras.get("offset", 0)
        if position != found["positions"][begin] or start < 0 or not 0 <= drafts <= end - begin:
            raise Refused(
                f"pieces: got start {position} and {drafts} drafts for piece {at}, expected the position "
                f"{found['positions'][begin]} of step {number} and at most {end - begin} drafts"
            )
        ids, dead = (half[at, : min(start, half.shape[1])][::-1] for half in self._history)
        return Piece(
            request_id=request,
            stream=cast(np.ndarray, Tail(ids, start)),
            dead=cast(np.ndarray, Tail(dead, start)),
            start=start,
            tokens=found["input_ids"][begin:end].astype(np.int64),
            token_dead=found["dead_mask"][begin:end],
            num_drafts=drafts,
            num_sampled=sampled,
            events=frozenset(self._events[at]),
            **extras,
        )


def _check_steps(steps: np.ndarray) -> None:
    if not len(steps):
        raise Refused("steps: got none, expected at least one")
    if (steps < 0).any():
        raise Refused(f"steps: got {steps.min()}, expected no negative number")
    for engine in np.unique(steps[:, 0]):
        own = steps[steps[:, 0] == engine]
        rises = np.diff(own[:, 3])
        if len(np.unique(own[:, 1])) > 1 or (rises < 0).any():
            raise Refused(f"steps: got engine {engine} with falling bindings or two block sizes, expected neither")
        if (np.diff(own[:, 2])[rises == 0] != 0).any():
            raise Refused(f"steps: got engine {engine} with another number of blocks, expected a new binding for that")
