"""Plots of a run, made from its results alone: how ours compares, and how times grow."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files alone, no display

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.results import Case, Results

_OURS, _OTHER, _GOAL = "#1f6fb2", "#9a9a9a", "#d1495b"


def plot_results(results: Results, folder: Path) -> list[Path]:
    """Draw `ratios.png`, and `growth_QUESTION.png` for every question with a sweep; give the files.

    Args:
        results: of one run.
        folder: made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    compared = [case for case in results.cases if case.ratio and case.way != "eager wall"]
    if compared:
        drawn.append(_save(_ratios(compared, results.environment), folder / "ratios.png"))
    for question, found in groupby(sorted(results.cases, key=lambda case: case.question), lambda case: case.question):
        cases = [case for case in found if case.way in ("graph", "wall") or question == "host_table"]
        sweeps = [sweep for sweep in _sweeps(cases) if len(sweep) > 1]
        if sweeps:
            drawn.append(_save(_growth(question, sweeps, results.environment), folder / f"growth_{question}.png"))
    return drawn


def _sweeps(cases: list[Case]) -> list[list[Case]]:
    """Sort cases into lines: one series, one way, one axis, rising in size, the first of equal sizes alone."""

    def line(case: Case) -> tuple[str, str, str]:
        return case.series, case.way, case.axis

    lines = []
    for _, found in groupby(sorted(cases, key=line), key=line):
        by_size: dict[int, Case] = {}
        for case in found:
            by_size.setdefault(case.size, case)
        lines.append([by_size[size] for size in sorted(by_size)])
    return lines


def _ratios(cases: list[Case], environment: dict[str, str]) -> pyplot.Figure:
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.2 * len(cases)), layout="constrained")
    for row, case in enumerate(reversed(cases)):
        assert case.ratio is not None
        axes.plot([case.ratio.low, case.ratio.high], [row, row], color=_OURS, linewidth=4, alpha=0.35)
        axes.plot(case.ratio.median, row, "o", color=_OURS, markersize=4)
        if case.goal and case.goal.ratio is not None:
            axes.plot(case.goal.ratio, row, "|", color=_GOAL, markersize=9, markeredgewidth=2)
    axes.axvline(1, color=_OTHER, linewidth=1)
    axes.set_yticks(
        range(len(cases)), [f"{case.question} {case.name}, {case.way}" for case in reversed(cases)], fontsize=6
    )
    axes.set_ylim(-1, len(cases))
    axes.set_xlim(left=0)
    axes.set_xlabel("ours : baseline in time, median and quartiles; red: goal, at most")
    axes.grid(axis="x", alpha=0.3)
    _caption(axes, "Ratio to the baseline", environment)
    return figure


def _growth(question: str, sweeps: list[list[Case]], environment: dict[str, str]) -> pyplot.Figure:
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for number, sweep in enumerate(sweeps):
        color = f"C{number}"
        name = f"{sweep[0].series}, {sweep[0].way}"
        sizes = [case.size for case in sweep]
        axes.plot(sizes, [case.ours.median for case in sweep], "o-", color=color, label=name)
        axes.fill_between(
            sizes, [case.ours.low for case in sweep], [case.ours.high for case in sweep], color=color, alpha=0.2
        )
        if all(case.baseline for case in sweep):
            others = [case.baseline.median for case in sweep if case.baseline]
            axes.plot(sizes, others, "x--", color=color, alpha=0.6, label=f"{name}: baseline")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(" or ".join(sorted({sweep[0].axis for sweep in sweeps})))
    axes.set_ylabel("seconds a call")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    _caption(axes, question.replace("_", " "), environment)
    return figure


def _caption(axes: Axes, title: str, environment: dict[str, str]) -> None:
    where = environment["card"] if environment.get("card", "none") != "none" else environment.get("processor", "")
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "date") if name in environment)
    axes.set_title(f"{title}\n{where}; {versions}", fontsize=8)


def _save(figure: pyplot.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
