"""What every question gets: the device, a timer, the baseline, and a place for its cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from benchmarks.contest import Contest, Disagreement, measure
from benchmarks.goals import judge
from benchmarks.results import Case, Goal, Label, Results, Skip
from benchmarks.timing import HostTimer


@dataclass
class Bench:
    """Hold one run.

    Attributes:
        device: where the work runs.
        timer: of that device.
        results: grows case by case.
        baseline: the module that ours is timed against, or None.
        goals: pattern of a case's key -> goal.
        rounds: samples of each contender.
        quick: only the first size of each sweep, to try whether all works.
        copy_rate: bytes a second of the copy ceiling, once measured.
        table: weight and scales of one layer on the device, once a question made them.
        report: called with every case and skip as it comes.
    """

    device: torch.device
    timer: HostTimer
    results: Results
    baseline: ModuleType | None = None
    goals: dict[str, Goal] = field(default_factory=dict)
    rounds: int = 15
    quick: bool = False
    copy_rate: float | None = None
    table: tuple[torch.Tensor, torch.Tensor] | None = None
    report: Callable[[Case | Skip], None] = lambda found: None

    def sizes(self, sizes: Sequence[Any]) -> Sequence[Any]:
        """Give the sizes of a sweep that this run takes."""
        return sizes[:1] if self.quick else sizes

    def baseline_function(self, name: str) -> Callable[..., Any] | None:
        """Give a function of the baseline, or None where there is no baseline or it lacks the function."""
        return getattr(self.baseline, name, None)

    def contest(
        self, label: Label, contest: Contest, ways: Sequence[str] = ("graph", "eager"), rounds: int | None = None
    ) -> None:
        """Compare and time; outputs that differ are a fault and give no case."""
        try:
            for case in measure(self.timer, rounds or self.rounds, label, contest, ways):
                self.add(case)
        except Disagreement as error:
            self.skip(label.question, label.name, str(error), fault=True)

    def add(self, case: Case) -> None:
        """Take a case, with its share of the ceiling and its goal."""
        card = self.results.environment.get("card", "")
        if self.copy_rate and case.unit == "B" and case.way == "graph":
            case = replace(case, of_ceiling=case.rate / self.copy_rate)
        case = judge(case, self.goals, card)
        self.results.cases.append(case)
        self.report(case)

    def skip(self, question: str, name: str, reason: str, *, fault: bool = False) -> None:
        """Say what is not measured."""
        skipped = Skip(question, name, reason, fault)
        self.results.skips.append(skipped)
        self.report(skipped)
