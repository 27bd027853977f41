"""Time this project, on a GPU against a baseline or on a CPU; exit status 1 if outputs differ or a question fails."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.results import Case, Results, Skip, read_results, write_results
from benchmarks.table import print_results, rate, seconds
from parity.device import choose_device

# In this order: the ceilings first, for shares of them are taken.
GPU_QUESTIONS = ("ceilings", "hash", "gate", "lookup", "rows", "host_table")
CPU_QUESTIONS = ("token_map", "oracles", "engine", "interpreter")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit status: 0 done, 1 outputs differ or a question failed, 2 a wrong argument."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _plot(words[1:]) if words[:1] == ["plot"] else _measure(words)
    except (ValueError, FileNotFoundError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2


def _measure(words: list[str]) -> int:
    options = _parser().parse_args(words)
    device = choose_device(options.device)  # before any question, for it decides how Triton runs
    questions = _chosen(device, options.only)

    from benchmarks.baseline import fingerprint, load_baseline
    from benchmarks.bench import Bench
    from benchmarks.environment import describe
    from benchmarks.goals import load_goals
    from benchmarks.timing import HostTimer

    gpu = device.type == "cuda"
    if options.baseline and not gpu:
        raise ValueError(f"baseline: got {options.baseline} on the CPU, expected it with --device cuda alone")
    results = Results(describe(device, words, fingerprint(options.baseline) if options.baseline else "none"))
    if gpu:
        torch.cuda.set_device(device)
        from benchmarks.cuda_timing import CudaTimer

    bench = Bench(
        device,
        CudaTimer(device) if gpu else HostTimer(),
        results,
        load_baseline(options.baseline) if options.baseline else None,
        load_goals(),
        rounds=options.rounds,
        quick=options.quick,
        report=_print_progress,
    )
    for question in questions:
        try:
            with torch.no_grad():
                importlib.import_module(f"benchmarks.{question}").ask(bench)
        except Exception as error:  # one question that fails must not lose what the others measured
            traceback.print_exc()
            bench.skip(question, "all that follows", f"{type(error).__name__}: {error}", fault=True)
        if options.output:
            write_results(results, options.output)
    print_results(Console(width=170), results)
    return 1 if any(skip.fault for skip in results.skips) else 0


def _plot(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description="Draw the plots of a run.")
    parser.add_argument("results", type=Path, help="JSON that a run wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("."), metavar="DIR", help="where the PNG files go")
    options = parser.parse_args(words)
    results = read_results(options.results)
    from benchmarks.plot import plot_results

    for path in plot_results(results, options.output):
        print(path)
    return 0


def _chosen(device: torch.device, only: str | None) -> list[str]:
    possible = GPU_QUESTIONS if device.type == "cuda" else CPU_QUESTIONS
    names = possible if only is None else tuple(only.split(","))
    unknown = set(names) - set(possible)
    if unknown:
        raise ValueError(f"only: got {sorted(unknown)} on {device.type}, expected some of {', '.join(possible)}")
    return [name for name in possible if name in names or (name == "ceilings" and device.type == "cuda")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog="Also: python -m benchmarks plot results.json -o DIR."
    )
    parser.add_argument(
        "--only", metavar="NAMES",
        help=f"questions, with commas between; cuda: {', '.join(GPU_QUESTIONS)}; cpu: {', '.join(CPU_QUESTIONS)}",
    )  # fmt: skip
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="Python file to time ours against (README.md)")
    parser.add_argument("--device", default="auto", help="auto (cuda if there), cpu, cuda, cuda:N")
    parser.add_argument("--rounds", type=_count, default=15, help="samples of each contender (15)")
    parser.add_argument("--quick", action="store_true", help="only the first size of each sweep: does it all work?")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def _print_progress(found: Case | Skip) -> None:
    if isinstance(found, Skip):
        print(f"{found.question} {found.name}: {found.reason}", flush=True)
        return
    ratio = "" if found.ratio is None else f", ratio {found.ratio.median:.2f}"
    print(f"{found.key}: {seconds(found.ours.median)}, {rate(found.rate, found.unit)}{ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
