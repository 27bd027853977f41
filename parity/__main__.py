"""Compare implementations of Engram on real text through a serving engine; exit status 1 if anything differs."""

from __future__ import annotations

import argparse
import importlib
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from parity.choice import PARTS, choose, parse_parts
from parity.compare import Comparison, Judge
from parity.corpus import Corpus, encoder, read_texts
from parity.device import choose_device
from parity.diagnose import describe, diagnose, diagnose_gate, diagnose_lookup
from parity.expected import ExpectedFailures, outcomes, read_expected_failures, without_expected
from parity.finding import Finding
from parity.gate import judge_gate
from parity.layer import judge_layer
from parity.lookup import judge_lookup
from parity.protocol import Implementation, load_implementation
from parity.report import Verdict, print_report, summary
from parity.runs import LARGE, SMALL, Run, Size, all_runs, execute, prepare
from parity.workload import Session
from parity.world import World, flash, toy
from reference.config import EngramConfig
from reference.token_map import load_tokenizer, token_map_for
from serving.step import Step

_VALUES = {"lookup": ("embedding.lookup", diagnose_lookup), "gate": ("gate.engram_gate", diagnose_gate)}


def main(arguments: list[str] | None = None) -> int:
    """Run the main job, `record` or `replay` (docs/traces.md), or `faults` (docs/faults.md); give the exit status."""
    commands = {"record": "record", "replay": "replay", "faults": "kill_matrix"}
    if (words := sys.argv[1:] if arguments is None else arguments)[:1] and words[0] in commands:
        return int(importlib.import_module(f"parity.{commands[words[0]]}").main(words[1:]))
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 132)
    try:
        device = choose_device(options.device)
        world = load_world(options.config, options.tokenizer)
        corpus = Corpus(read_texts(options.texts), encoder(world, options.tokenizer), world)
        names = dict.fromkeys(["reference", *(options.impl or ["optimized"])])
        implementations = [load_implementation(name) for name in names]
        runs = _chosen(all_runs(world), options.run)
        expected = (
            read_expected_failures(options.expected_failures) if options.expected_failures else ExpectedFailures()
        )
        expected.require_known(PARTS, {"hash": [one.name for one in all_runs(world)]})
        chosen, skipped = choose(parse_parts(options.what), implementations)
    except (ValueError, TypeError, AttributeError, OSError, ImportError) as error:
        parser.error(str(error))
    size = LARGE if device.type == "cuda" else SMALL
    rows = options.rows or size.rows
    hashed = f"{rows:,} rows" if "hash" in chosen else ", ".join(chosen)
    console.print(_header(world, implementations, device, options.seed, hashed))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for port in implementations:
        if port.name not in ("reference", "optimized"):
            say(f"port: {port.describe()}")
    if expected.name:
        say(f"{len(expected)} failures are expected by {expected.name}")

    results: list[tuple[Run, Comparison]] = []
    findings: list[Finding] = []
    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} rows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for part, judged in chosen.items():
            if part == "hash":
                results = _hash(runs, corpus, judged, device, size, rows, options.seed, progress)
                continue
            advance = partial(progress.advance, progress.add_task(part, total=None))
            if part == "gate":
                findings += judge_gate(world, judged, device, seed=options.seed, progress=advance)
            else:
                judge = judge_lookup if part == "lookup" else judge_layer
                findings += judge(
                    world, corpus, judged, device, size=size, seed=options.seed, progress=advance, say=say
                )
    seconds = time.perf_counter() - started

    verdict = print_report(console, results, findings)
    verdict = Verdict(without_expected(verdict.reasons, expected, outcomes(results, findings)))
    diagnosed: set[tuple[str, str]] = set()
    for number, (one, result) in enumerate(results):
        for name, mismatch in result.first.items():
            say(describe(mismatch, one.world, _repro(options, "hash")))
            if (name, "hash") not in diagnosed:
                again = partial(prepare, one, corpus, chosen["hash"], device, seed=1000 * options.seed + number)
                say(_diagnosis(name, again, size, -(-rows // len(runs))))
                diagnosed.add((name, "hash"))
    for finding in findings:
        for name, explained in finding.first.items():
            say(f"{explained}\n  REPRO: {_repro(options, finding.what)}")
            if finding.what in _VALUES and (name, finding.what) not in diagnosed:
                path, name_mistake = _VALUES[finding.what]
                port = next(one for one in chosen[finding.what] if one.name == name)
                say(f"{name}: {name_mistake(port.require(path), device)}")
                diagnosed.add((name, finding.what))
    for line in [*skipped, *(f"NOT CLEAN  {reason}" for reason in verdict.reasons)]:
        say(line)
    say(summary(world, results, findings, len(skipped), seconds, verdict))
    return 0 if verdict.clean else 1


def load_world(name: str, tokenizer: Path | None) -> World:
    """Give the world of `--config`: `deepseek-v4.1-flash`, `toy`, or the path of a config.json with a tokenizer's.

    Raises:
        ValueError: the config has no Engram, needs a tokenizer, or does not fit it.
    """
    if tokenizer is None and name in (worlds := {"deepseek-v4.1-flash": flash, "toy": toy}):
        return worlds[name]()
    config = EngramConfig.deepseek_v41_flash() if name == "deepseek-v4.1-flash" else EngramConfig.load(name)
    if config is None:
        raise ValueError(f"config: got {name}, which has no engram_layer_ids, expected a model with Engram")
    if tokenizer is None:
        raise ValueError(f"tokenizer: got none for {name}, expected the directory of its tokenizer.json (--tokenizer)")
    from optimized.token_map import build_token_map  # after choose_device: it decides how Triton runs

    token_map = token_map_for(load_tokenizer(tokenizer), config, build_token_map)
    return World(name, config, token_map, flash().image_tokens if config.vocab_size == 129280 else (0,))


def _hash(
    runs: list[Run], corpus: Corpus, implementations: list[Implementation], device: torch.device, size: Size, rows: int,
    seed: int, progress: Progress,
) -> list[tuple[Run, Comparison]]:  # fmt: skip
    task = progress.add_task("hash", total=rows)
    results = []
    for number, one in enumerate(runs):
        progress.update(task, description=f"hash: {one.name}")
        result = execute(
            one, corpus, implementations, device,
            size=size, rows=-(-rows // len(runs)), seed=1000 * seed + number, progress=partial(progress.advance, task),
        )  # fmt: skip
        results.append((one, result))
    return results


def _diagnosis(
    name: str, again: Callable[..., tuple[Judge, Iterator[tuple[Session, Step]]]], size: Size, rows: int
) -> str:
    """Diagnose a port on the small form of the run that it failed, or on the run itself if it fails there alone."""
    for form, length in ((SMALL, min(rows, SMALL.rows)), (size, rows)):
        judge, steps = again(size=form, rows=length)
        if (text := diagnose(judge, steps, name)) is not None:
            return text
    return f"{name}: no row is wrong when the run is repeated: its state depends on more than its steps"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parity",
        description=__doc__,
        epilog="Also: python -m parity record, replay, faults (each with --help).",
    )
    parser.add_argument(
        "--impl", action="append", metavar="MODULE",
        help="implementation to judge beside the reference: optimized (default) or a port, my_module or "
        "my_module:object (see docs/porting.md); repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--expected-failures",
        type=Path,
        metavar="FILE",
        help="lines `id | reason | issue`; an id is hash/RUN or PART/FEATURE",
    )
    parser.add_argument(
        "--what", default=",".join(PARTS), metavar="PARTS", help="parts to run, by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="auto", help="auto (cuda if there), cpu (Triton's interpreter), cuda, cuda:N"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="the same seed is the same run everywhere")
    parser.add_argument(
        "--rows", type=_at_least(1), help=f"live rows to hash, at least (cpu {SMALL.rows:,}, cuda {LARGE.rows:,})"
    )
    parser.add_argument("--config", default="deepseek-v4.1-flash", help="deepseek-v4.1-flash, toy, or a config.json")
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer.json (default: DeepSeek V4's)")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts of yours")
    parser.add_argument(
        "--run", action="append", metavar="NAME", help="of the hash part only this run of the second table; repeatable"
    )
    return parser


def _at_least(least: int):  # type: ignore[no-untyped-def]
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"got {value}, expected at least {least}")
        return value

    parse.__name__ = "int"
    return parse


def _chosen(runs: list[Run], names: list[str] | None) -> list[Run]:
    unknown = set(names or ()) - {run.name for run in runs}
    if unknown:
        raise ValueError(f"run: got {sorted(unknown)}, expected some of {[run.name for run in runs]}")
    return [run for run in runs if names is None or run.name in names]


def _header(world: World, implementations: list[Implementation], device: torch.device, seed: int, job: str) -> str:
    from triton import __version__ as triton_version

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, Triton's interpreter"
    return (
        f"engram parity: {', '.join(one.name for one in implementations)} on {where}; {world.name}, seed {seed}, "
        f"{job}; Python {platform.python_version()}, torch {torch.__version__}, triton {triton_version}, "
        f"numpy {np.__version__}"
    )


def _repro(options: argparse.Namespace, what: str) -> str:
    words = ["python", "-m", "parity", "--what", what, "--device", options.device, "--seed", options.seed]
    words += ["--config", options.config]
    words += [word for name in options.impl or () for word in ("--impl", name)]
    words += ["--expected-failures", options.expected_failures] if options.expected_failures else []
    words += ["--rows", options.rows] if options.rows and what == "hash" else []
    words += [word for name in options.run or () if what == "hash" for word in ("--run", name)]
    words += ["--tokenizer", options.tokenizer] if options.tokenizer else []
    words += ["--texts", *options.texts] if options.texts else []
    return shlex.join(str(word) for word in words)


if __name__ == "__main__":
    sys.exit(main())
