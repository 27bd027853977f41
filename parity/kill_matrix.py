"""Run every fault against the law that names it, each in a process of its own, and write who caught what."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from parity.device import choose_device

if TYPE_CHECKING:
    from parity.faults import Fault
    from parity.kill import Verdict
    from parity.laws import Law
    from parity.protocol import Implementation

LIMIT = 300.0  # seconds a process
PAGE = Path("docs/faults.md")
_BOUNDS = (1, 5, 20, 50, 100, 200)
_GROUPS = {
    "layout": "Constants", "token_map": "Token map and pad", "hash_state": "Hash state", "kernel": "Kernels",
    "runner": "Runner and engine", "embedding": "Lookup", "gate": "Gate", "sharding": "Shards", "module": "Layer",
}  # fmt: skip
_HEAD = """# Mistakes that the laws catch

Each is code in `parity/faults/`, a small wrong implementation. `python -m parity faults` (or `make faults`) tries the
law that names it on generated cases alone, at most 200, as many as the profile `ci` has, and writes this page. A
mistake that is not caught, or a right implementation that breaks a law, fails the run. "Within" says how many cases it
took at most, "also by" which other laws saw it within 5 cases. H is history and scheduling, C constants and map, T
table and shards, G the gate. Reports are cited as repository#number; where none is, the mistake is a neighbour of one.
"""


def main(arguments: list[str]) -> int:
    """Run `python -m parity faults`; give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity faults", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="only these faults, and no control")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"where a whole run writes its table ({PAGE})")
    options = parser.parse_args(arguments)
    choose_device("cpu")
    torch.set_num_threads(1)
    from parity.faults import CATALOGUE  # after choose_device: it decides how Triton runs
    from parity.kill import control_laws, controls, judge_fault, world

    if unknown := set(options.only) - set(CATALOGUE):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, expected of {', '.join(CATALOGUE)}")
    _ = world().oracle, world().layout  # made once, before the processes split off
    console, started = Console(width=None if os.isatty(1) else 150), time.perf_counter()
    jobs: dict[str, Callable[[], Any]] = {}
    if not options.only:
        for name, right in controls().items():
            jobs |= {f"{name}: {law.name}": partial(_try, law, right) for law in control_laws(name)}
    chosen = {number: fault for number, fault in CATALOGUE.items() if number in (options.only or CATALOGUE)}
    jobs |= {number: partial(judge_fault, fault) for number, fault in chosen.items()}
    results: dict[str, list[Any]] = {}
    for name, found in forked(jobs, options.workers, LIMIT):
        results[name] = found if isinstance(found, list) else []
        console.print(_line(name, found), markup=False, highlight=False, soft_wrap=True)
    results = {name: results[name] for name in jobs}
    failures = [name for name in chosen if not (results[name] and results[name][0].broken)]
    spoiled = [name for name in jobs if name not in chosen and not _holds(results[name])]
    _print(console, chosen, results)
    for name in failures:
        console.print(f"SURVIVED  {name}: {chosen[name].clause}", markup=False)
    for name in spoiled:
        console.print(f"NOT CLEAN  {name}: a right implementation breaks the law", markup=False)
    caught = len(chosen) - len(failures)
    console.print(
        f"{caught} of {len(chosen)} faults caught by the laws that name them, {len(jobs) - len(chosen)} controls, "
        f"{len(spoiled)} of them not clean, in {time.perf_counter() - started:.0f} s",
        highlight=False,
    )
    if not options.only and not failures and not spoiled:
        options.page.write_text(page(CATALOGUE, results), encoding="utf-8")
    return 1 if failures or spoiled else 0


def forked(jobs: Mapping[str, Callable[[], Any]], workers: int, limit: float) -> Iterator[tuple[str, Any]]:
    """Run each job in a process that is forked from this one; yield its result as it comes.

    A process that raises, dies or takes longer than `limit` seconds yields a string that says so.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs.items()), dict[Connection, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            name, job = waiting.pop(0)
            source, sink = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, sink))
            process.start()
            sink.close()
            running[source] = name, process, time.monotonic() + limit
        soonest = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), max(0.0, soonest - time.monotonic()))
        late = [one for one, (_, _, deadline) in running.items() if deadline <= time.monotonic()]
        for source in [one for one in running if one in ready or one in late]:
            name, process, _ = running.pop(source)
            if source in ready:
                try:
                    result = source.recv()
                except EOFError:
                    process.join()
                    result = f"the process ended with {process.exitcode}"
            else:
                process.kill()
                result = f"took more than {limit:g} s"
            process.join()
            source.close()
            yield name, result


def _work(job: Callable[[], Any], sink: Connection) -> None:
    try:
        sink.send(job())
    except Exception as error:
        sink.send(f"{type(error).__name__}: {error}")


def _try(law: Law, implementation: Implementation) -> list[Verdict]:
    from parity.kill import CASES, try_law

    return [try_law(law, implementation, CASES)]


def _holds(verdicts: Sequence[Any]) -> bool:
    return bool(verdicts) and not any(one.broken or one.error for one in verdicts)


def _line(name: str, found: Any) -> str:
    if not isinstance(found, list):
        return f"{name}: {found}"
    first = found[0]
    state = "broken" if first.broken else first.error or "holds"
    return f"{name}: {first.law} {state[:200]}, case {first.cases}, {first.seconds:.1f} s"


def _print(console: Console, chosen: Mapping[str, Fault], results: Mapping[str, Sequence[Any]]) -> None:
    table = Table("fault", "what", "law", title="Faults by law")
    for column in ("caught", "cases", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("also by (few cases each)")
    for name, fault in chosen.items():
        if not results[name]:
            table.add_row(name, fault.clause, fault.law, "NO", "", "", "")
            continue
        first, *others = results[name]
        also = ", ".join(f"{one.law} ({one.cases})" for one in others if one.broken)
        caught = "yes" if first.broken else "NO"
        table.add_row(name, fault.clause, fault.law, caught, str(first.cases), f"{first.seconds:.1f}", also)
    console.print(table)


def page(catalogue: Mapping[str, Fault], results: Mapping[str, Sequence[Any]]) -> str:
    """Write the table of a run as docs/faults.md has it; nothing in it depends on the machine."""
    lines = [_HEAD]
    faults = sorted(catalogue.values(), key=lambda fault: list(_GROUPS).index(fault.group))
    for group, members in groupby(faults, key=lambda fault: fault.group):
        lines += [
            f"## {_GROUPS[group]}",
            "",
            "| id | what the port does | how it comes about | reported in | law | within | also by |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for fault in sorted(members, key=_by_number):
            first, *others = results[fault.id]
            within = next(bound for bound in _BOUNDS if first.cases <= bound)
            also = ", ".join(one.law for one in others if one.broken)
            cells = (fault.id, fault.clause, fault.story, fault.source, fault.law, str(within), also)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _by_number(fault: Fault) -> tuple[str, int, str]:
    digits = "".join(filter(str.isdigit, fault.id))
    return fault.id[0], int(digits), fault.id
