"""Print what a run compared: a table of laws, a table of ways, and every first wrong row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from parity.compare import COMPANY, SOURCES, Comparison, Tally
from parity.finding import Finding
from parity.runs import REQUIRED_SOURCES, Run
from parity.world import World
from serving.step import EVENT_MEANINGS

# Law numbers as in parity/laws.py; an event that several laws rest on stands with the first.
LAW_EVENTS = {
    1: ("prompt whole", "chunk", "decode", "starved", "budget change", "long position", "model's limit"),
    2: (COMPANY, "reordered", "packed documents"),
    3: ("prefix hit", "same-step hit", "one token left"),
    4: ("verify", "several drafts", "ragged verify", "after rejection", "all rejected", "draft runs ahead"),
    5: ("import", "import at block edge"),
    6: ("block reuse", "one-token blocks", "large blocks", "hybrid groups", "sliding window", "window edge"),
    7: ("padding", "dummy step"),
    8: ("dead span", "dead at chunk edge", "several images"),
    9: (),
    10: ("host lags", "host lags by two"),
    11: (
        "preempted, recompute", "preempted, reload", "off-load reload", "fork", "copy on write", "beam reorder",
        "after abort", "id reuse", "sleep and wake", "microbatch", "microbatch inside a request",
    ),
}  # fmt: skip
_MEANINGS = {**EVENT_MEANINGS, COMPANY: "other requests share the step"}


@dataclass(frozen=True)
class Verdict:
    """Say whether a report is clean, and if not, why: one line a reason."""

    reasons: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether everything was equal and everything was reached."""
        return not self.reasons


def print_report(
    console: Console, results: Sequence[tuple[Run, Comparison]], findings: Sequence[Finding] = ()
) -> Verdict:
    """Print both tables, findings at the end of the first; give the verdict.

    Unequal rows, stray slots, a feature that no run reached and a source that a run should have read and did not are
    reasons against.
    """
    reasons: list[str] = []
    console.print(_law_table(results, findings, reasons))
    if results:
        console.print(_way_table(results, reasons))
    return Verdict(tuple(reasons))


def summary(
    world: World,
    results: Sequence[tuple[Run, Comparison]],
    findings: Sequence[Finding],
    skipped: int,
    seconds: float,
    verdict: Verdict,
) -> str:
    """Say in a sentence or two how much was compared in all, and what came of it."""
    said, checked = [], ""
    if results:
        total, whole, integers = (
            sum(getattr(result, name) for _, result in results) for name in ("rows", "whole_rows", "integer_rows")
        )
        ids = total * world.config.columns * len(world.config.engram_layer_ids)
        said.append(f"{total:,} live rows ({ids:,} ids) an implementation")
        checked = (
            f" Of the expected rows {whole:,} were also hashed from whole requests by NumPy, {integers:,} in plain "
        )
        checked += "integers."
    for what in dict.fromkeys(finding.what for finding in findings):
        said.append(f"{what} {sum(finding.rows for finding in findings if finding.what == what):,} rows")
    left_out = f" Skipped as not offered: {skipped}." if skipped else ""
    return f"{', '.join(said)} in {seconds:.1f} s: {'all equal' if verdict.clean else 'NOT CLEAN'}.{checked}{left_out}"


def _law_table(results: Sequence[tuple[Run, Comparison]], findings: Sequence[Finding], reasons: list[str]) -> Table:
    table = Table("law", "feature", "what it means", title="Rows equal to those of each request alone, and values")
    for name in ("cases", "rows", "unequal"):
        table.add_column(name, justify="right")
    table.add_column("verdict")

    def add(law: str, feature: str, meaning: str, tally: Tally) -> None:
        table.add_row(
            law, feature, meaning, f"{tally.cases:,}", f"{tally.rows:,}", f"{tally.unequal:,}", _verdict(tally)
        )
        if not tally.cases:
            reasons.append(f"{feature}: never reached; more rows (--rows) reach it")

    for law, events in LAW_EVENTS.items() if results else ():
        for event in events:
            add(str(law), event, _MEANINGS[event], _sum(result.features[event] for _, result in results))
        if law == 9 and any(run.alike for run, _ in results):
            alike = _sum(_total(result) for run, result in results if run.alike)
            add("9", "tokens alike", "every token replaced by one that compresses alike", alike)
        if law == 10:
            policies = len({run.policy for run, _ in results})
            agree = _sum(_total(result) for _, result in results)
            add("10", f"{policies} ways agree", "stateless, and slots under every window policy", agree)
    for one in findings:
        total = one.unequal.total()
        unequal = f"{total:,}" if one.worst is None else f"{total:,}; worst {one.worst:.2f}"
        verdict = "[green]equal[/]" if one.worst is None else "[green]close[/]"
        if found := one.reasons():
            reasons += found
            verdict = "[bold red]UNEQUAL[/]" if total else "[bold red]NOT REACHED[/]"
        table.add_row(one.what, one.feature, one.meaning, f"{one.cases:,}", f"{one.rows:,}", unequal, verdict)
    return table


def _way_table(results: Sequence[tuple[Run, Comparison]], reasons: list[str]) -> Table:
    table = Table("run", title="Where lookbacks came from, by run")
    for name in ("steps", "rows", *SOURCES, "slots compared", "unequal"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for run, result in results:
        unequal = sum(result.unequal.values())
        verdict = "[green]equal[/]" if result.equal else "[bold red]UNEQUAL[/]"
        for name, count in result.unequal.items():
            reasons.append(f"{run.name}: {name} has {count} of {result.rows} rows unequal")
        for name, count in result.stray.items():
            reasons.append(
                f"{run.name}: {name} has {count} of {result.slots} slots that hold what no token wrote there"
            )
        for source in sorted(REQUIRED_SOURCES[run.policy]):
            if not result.sources[source]:
                reasons.append(f"{run.name}: no lookback came from {source}, so nothing of it was tested")
                verdict = "[bold red]NOT TESTED[/]" if result.equal else verdict
        counts = [result.steps, result.rows, *(result.sources[source] for source in SOURCES), result.slots, unequal]
        table.add_row(run.name, *(f"{count:,}" for count in counts), verdict)
    return table


def _verdict(tally: Tally) -> str:
    if not tally.cases:
        return "[bold red]NOT REACHED[/]"
    return "[bold red]UNEQUAL[/]" if tally.unequal else "[green]equal[/]"


def _total(result: Comparison) -> Tally:
    return Tally(result.steps, result.rows, sum(result.unequal.values()))


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.cases += tally.cases
        total.rows += tally.rows
        total.unequal += tally.unequal
    return total
