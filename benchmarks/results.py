"""Results as data: what was measured, on what, and the JSON that table and plots are made from."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Spread

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Label:
    """Say what a case is about.

    Attributes:
        question: the file that asks.
        name: the case within the question.
        series: cases of one series differ in their size alone.
        axis: what the size counts, such as T tokens or R requests.
        size: along that axis.
        amount: of work in one call, in units.
        unit: of the amount: B (bytes read and written), rows, tokens, ids, steps or calls.
    """

    question: str
    name: str
    series: str
    axis: str
    size: int
    amount: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Say what a case is to reach.

    Attributes:
        ratio: of ours to the baseline, at most.
        peer: seconds of the fastest kernel of other engines on one H200, not to be slower than, there.
        of_ceiling: share of the copy ceiling, at least.
        rate: units a second, at least.
    """

    ratio: float | None = None
    peer: float | None = None
    of_ceiling: float | None = None
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case(Label):
    """Hold what one case gave, all times in seconds a call.

    Attributes:
        way: `graph`, `eager cpu` (until the call returns), `eager wall` (until its work has ended), or
            `wall` where the two are one.
        ours: of this project.
        baseline: of what it was timed against, or None.
        ratio: ours / baseline of the samples of each round, or None.
        agreement: how the outputs were compared before: bits, close, or None without a baseline.
        of_ceiling: ours as a share of the copy ceiling, where the unit is bytes.
        goal: what is to be reached, or None.
        met: whether it was, or None where it cannot be told.
    """

    way: str
    ours: Spread
    baseline: Spread | None = None
    ratio: Spread | None = None
    agreement: str | None = None
    of_ceiling: float | None = None
    goal: Goal | None = None
    met: bool | None = None

    @property
    def key(self) -> str:
        """The case's name among all."""
        return f"{self.question}/{self.name}/{self.way}"

    @property
    def rate(self) -> float:
        """Units a second of ours."""
        return self.amount / self.ours.median


@dataclass(frozen=True)
class Skip:
    """Say what was not measured and why; it is a fault where outputs differed."""

    question: str
    name: str
    reason: str
    fault: bool = False


@dataclass
class Results:
    """Hold a run.

    Attributes:
        environment: card, driver, versions, date and command, by name.
        cases: in the order in which they were measured.
        skips: what was not measured.
        notes: what a reader must know, such as a table cut to the card.
        format: of the file.
    """

    environment: dict[str, str]
    cases: list[Case] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT


def write_results(results: Results, path: Path) -> None:
    """Write a run as JSON."""
    path.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")


def read_results(path: Path) -> Results:
    """Read a run back.

    Raises:
        ValueError: not JSON, another format, or a field that is missing, unknown or of another type; says where.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"results: {path} is not JSON ({error}), expected what python -m benchmarks wrote") from error
    results = _build(Results, data, "results")
    if results.format != FORMAT:
        raise ValueError(f"results.format: got {results.format}, expected {FORMAT}")
    return results


def _build(kind: Any, value: Any, place: str) -> Any:
    """Make a value of a type from plain JSON, or say where it does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _build(inner[0], value, place)
    if origin is list and isinstance(value, list):
        return [_build(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _build(inner[1], item, f"{place}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        hints, names = typing.get_type_hints(kind), {entry.name for entry in fields(kind)}
        if names != set(value):
            raise ValueError(f"{place}: got fields {sorted(value)}, expected {sorted(names)}")
        return kind(**{name: _build(hints[name], value[name], f"{place}.{name}") for name in names})  # type: ignore[operator]
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    raise ValueError(f"{place}: got {value!r}, expected {getattr(kind, '__name__', kind)}")
