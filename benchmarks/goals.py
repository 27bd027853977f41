"""What is to be reached: goals.json, and whether a case did."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.results import Case, Goal

GOALS = Path(__file__).with_name("goals.json")


def load_goals(path: Path = GOALS) -> dict[str, Goal]:
    """Read the goals: pattern of a case's key -> goal.

    Raises:
        TypeError: a goal has an unknown field.
    """
    goals = json.loads(path.read_text(encoding="utf-8"))["goals"]
    return {pattern: Goal(**goal) for pattern, goal in goals.items()}


def judge(case: Case, goals: dict[str, Goal], card: str) -> Case:
    """Give the case with its goal, if it has one, and whether that is met.

    Args:
        case: as measured.
        goals: from `load_goals`; the first pattern that fits counts.
        card: where it ran; the peers' times hold for an H200 alone.
    """
    goal = next((goal for pattern, goal in goals.items() if fnmatchcase(case.key, pattern)), None)
    if goal is None:
        return case
    peer = goal.peer if "H200" in card else None
    bounds = (
        _at_most(case.ratio.median if case.ratio else None, goal.ratio),
        _at_most(case.ours.median, peer),
        _at_least(case.of_ceiling, goal.of_ceiling),
        _at_least(case.rate, goal.rate),
    )
    judged = [met for wanted, met in bounds if wanted]
    met = False if False in judged else None if None in judged or not judged else True
    return replace(case, goal=goal, met=met)


def _at_most(got: float | None, want: float | None) -> tuple[bool, bool | None]:
    """Say whether a bound is wanted, and whether it holds (None: nothing was measured)."""
    return want is not None, None if got is None or want is None else got <= want


def _at_least(got: float | None, want: float | None) -> tuple[bool, bool | None]:
    return want is not None, None if got is None or want is None else got >= want
