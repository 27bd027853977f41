"""what engines add to a step or a piece: carried as JSON, and refused where a reader does not know it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.step import Piece, Step
from serving.tensor_file import Refused

# These have arrays and columns of their own in a trace.
INPUTS = (
    "input_ids", "positions", "query_start_loc", "dead_mask",
    "lookback_token_ids", "lookback_dead_mask", "slot_mapping", "block_table",
)  # fmt: skip
OWN = {
    Step: frozenset({"index", "pieces", "num_tokens", "binding", "slot_copies", *INPUTS}),
    Piece: frozenset(
        {"request_id", "stream", "dead", "tokens", "token_dead", "start", "num_drafts", "num_sampled", "events"}
    ),
}


def gather_extras(items: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Give what fields without a place of their own hold, where it is not their default: number -> field -> value.

    Raises:
        TypeError: a value that is not None, a bool, an int, a string or a sequence of these.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(items):
        for one in dataclasses.fields(item):
            if one.name in OWN[type(item)]:
                continue
            value = getattr(item, one.name)
            if value is not one.default and value != one.default:
                found.setdefault(str(number), {})[one.name] = _plain(one.name, value)
    return found


def extras_by_number(name: str, extras: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Give extras by number.

    Raises:
        Refused: they are something else.
    """
    try:
        return {int(number): dict(values) for number, values in extras.items()}
    except (TypeError, ValueError) as error:
        raise Refused(f"story.{name}: got {extras!r}, expected number -> field -> value") from error


def extras_of(kind: type, number: int, extras: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Give the extra fields of one step or piece.

    Raises:
        Refused: one that is not known here.
    """
    values = extras.get(number, {})
    later = {one.name for one in dataclasses.fields(kind)} - OWN[kind]
    if unknown := sorted(set(values) - later):
        raise Refused(f"extras: got {unknown[0]!r} of {kind.__name__.lower()} {number}, expected of {sorted(later)}")
    return {name: _tuples(value) for name, value in values.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    if isinstance(value, np.integer):
        return int(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{name}: got {type(value).__name__}, expected None, bool, int, str or sequences of these")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
