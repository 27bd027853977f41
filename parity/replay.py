"""Replay a trace on an implementation, without the engine: `python -m parity replay TRACE`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from parity.compare import COMPANY
from parity.device import choose_device
from parity.diagnose import describe
from parity.player import Outcome, check_rows, replay, replay_command, world_of
from parity.protocol import load_implementation
from parity.world import World
from serving.step import EVENTS
from serving.trace import Trace
from serving.trace_reader import read_trace


def print_outcomes(console: Console, trace: Trace, outcomes: Sequence[Outcome]) -> None:
    """Print one row a feature of the trace: pieces (or steps), rows, and of each implementation the unequal ones."""
    table = Table("feature", title=f"Rows of trace {trace.name!r} equal to those of each request alone")
    for column in ("cases", "rows", *(f"unequal: {one.implementation}" for one in outcomes)):
        table.add_column(column, justify="right")
    counts: dict[str, np.ndarray] = {}
    for number, one in enumerate(trace.steps):
        everything = [int(result.wrong[number].sum()) if result.wrong else 0 for result in outcomes]
        for name in one.step.events:
            counts[name] = counts.get(name, 0) + np.array([1, one.step.num_tokens, *everything])
        begin = 0
        for piece in one.step.pieces:
            end = begin + len(piece.tokens)
            unequal = [int(result.wrong[number][begin:end].sum()) if result.wrong else 0 for result in outcomes]
            names = {"all", *piece.events} | ({COMPANY} if len(one.step.pieces) > 1 else set())
            for name in names:
                counts[name] = counts.get(name, 0) + np.array([1, end - begin, *unequal])
            begin = end
    order = {name: place for place, name in enumerate(("all", *EVENTS, COMPANY))}
    for name in sorted(counts, key=lambda name: (order.get(name, len(order)), name)):
        pieces, rows, *unequal = counts[name].tolist()
        shown = ["-" if result.reason else f"{one:,}" for result, one in zip(outcomes, unequal, strict=True)]
        table.add_row(name, f"{pieces:,}", f"{rows:,}", *shown)
    console.print(table)


def main(arguments: list[str]) -> int:
    """Run `python -m parity replay`; give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity replay", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file that `python -m parity record` wrote")
    parser.add_argument(
        "--impl", action="append", metavar="MODULE", help="implementation to judge (optimized); repeatable"
    )
    parser.add_argument("--command", help="a port in another process: 'my_port {inputs} {outputs}', see docs/traces.md")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the command may take (600)")
    parser.add_argument("--device", default="auto", help="auto (cuda if there), cpu, cuda, cuda:N")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 132)
    try:
        device = choose_device(options.device)
        trace = read_trace(options.trace)
        world = world_of(trace)
        check_rows(trace, world, device)
        names = options.impl or ([] if options.command else ["optimized"])
        outcomes = [replay(trace, world, load_implementation(name), device) for name in names]
        if options.command:
            outcomes.append(replay_command(trace, world, options.command, options.timeout))
    except (ValueError, TypeError, OSError, ImportError, AttributeError) as error:
        parser.error(str(error))
    print_outcomes(console, trace, outcomes)
    for outcome in outcomes:
        console.print(_verdict(outcome, trace, world, options), markup=False, highlight=False, soft_wrap=True)
    return 0 if all(outcome.equal for outcome in outcomes) else 1


def _verdict(outcome: Outcome, trace: Trace, world: World, options: argparse.Namespace) -> str:
    if outcome.reason:
        return f"NOT COMPARED  {outcome.implementation}: {outcome.reason}"
    if outcome.first is None:
        return f"{outcome.implementation}: {trace.num_rows:,} live rows, all equal"
    words = ["python", "-m", "parity", "replay", str(options.trace), "--device", options.device]
    words += ["--command" if outcome.implementation == options.command else "--impl", outcome.implementation]
    count = sum(int(one.sum()) for one in outcome.wrong)
    return (
        f"{describe(outcome.first, world, shlex.join(words))}\n"
        f"NOT EQUAL  {outcome.implementation}: {count:,} of {trace.num_rows:,} live rows differ"
    )
