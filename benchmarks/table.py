"""The table of a run, made from its results alone."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.results import Case, Goal, Results

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def print_results(console: Console, results: Results) -> None:
    """Print the environment, a table a question, and what was not measured."""
    console.print("; ".join(f"{name} {value}" for name, value in results.environment.items()), markup=False)
    for question, cases in groupby(results.cases, key=lambda case: case.question):
        console.print(_table(question, list(cases)))
    for note in results.notes:
        console.print(f"note: {note}", markup=False)
    for skip in results.skips:
        style = "bold red" if skip.fault else "yellow"
        word = "FAULT" if skip.fault else "skipped"
        console.print(f"[{style}]{word}[/] {escape(f'{skip.question} {skip.name}: {skip.reason}')}")


def _table(question: str, cases: list[Case]) -> Table:
    table = Table("case", "way", title=question)
    for name in ("ours", "quartiles", "baseline", "ratio", "rate", "of copy", "goal"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for case in cases:
        table.add_row(
            escape(case.name),
            case.way,
            seconds(case.ours.median),
            f"{seconds(case.ours.low)} to {seconds(case.ours.high)}",
            seconds(case.baseline.median) if case.baseline else "",
            f"{case.ratio.median:.2f} ({case.ratio.low:.2f} to {case.ratio.high:.2f})" if case.ratio else "",
            rate(case.rate, case.unit),
            "" if case.of_ceiling is None else f"{case.of_ceiling:.0%}",
            "" if case.goal is None else goal_words(case.goal, case.unit),
            {True: "[green]met[/]", False: "[bold red]not met[/]", None: ""}[case.met],
        )
    return table


def seconds(value: float) -> str:
    """Write a time with three digits: 2.13 us, 47.0 ms."""
    for size, unit in ((1e-6, "us"), (1e-3, "ms"), (1.0, "s")):
        if value < 999.5 * size or unit == "s":
            return f"{value / size:#.3g} {unit}".replace(". ", " ")
    raise AssertionError


def rate(value: float, unit: str) -> str:
    """Write units a second with three digits: 3.52 TB/s, 1.20 M rows/s."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if value >= size), _PREFIXES[-1])
    number = f"{value / size:#.3g}".rstrip(".")
    return f"{number} {prefix}B/s" if unit == "B" else f"{number} {prefix} {unit}/s".replace("  ", " ")


def goal_words(goal: Goal, unit: str) -> str:
    """Write a goal: 0.47, 4.70 us, 88% of copy."""
    words = [
        None if goal.ratio is None else f"{goal.ratio:.2g}",
        None if goal.peer is None else seconds(goal.peer),
        None if goal.of_ceiling is None else f"{goal.of_ceiling:.0%}",
        None if goal.rate is None else rate(goal.rate, unit),
    ]
    return ", ".join(word for word in words if word)
