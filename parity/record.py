"""Record a run as a trace: `python -m parity record OUT`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity.compare import Judge
from parity.corpus import Corpus, encoder, read_texts
from parity.player import constants
from parity.runs import SMALL, Run, all_runs, workload_of
from parity.truth import Truth
from parity.workload import Session, run
from parity.world import World, flash
from reference.token_map import EMBEDDED_SHA256, token_map_digest
from serving.config import EngineConfig
from serving.step import Step
from serving.trace import Trace, TracedStep, write_trace

CPU = torch.device("cpu")


class Recorder:
    """Take the steps of a run, and give them as a trace with the rows that each request gets alone.

    Args:
        name: of the run.
        world: configuration and token map.
        disguise: `[V]`, the token id that is recorded for each one; it must compress alike.
    """

    def __init__(self, name: str, world: World, disguise: np.ndarray | None = None) -> None:
        digest = token_map_digest(world.token_map)
        self._trace = Trace(
            name=name,
            config=dataclasses.asdict(world.config),
            engines=[],
            token_map=world.token_map,
            token_map_name=flash().name if digest == EMBEDDED_SHA256 else None,
            token_map_sha256=digest,
            constants=constants(world),
        )
        self._world = world
        self._judge = Judge(world, [], CPU, disguise=disguise)
        self._sessions: list[Session] = []

    def feed(self, session: Session, step: Step) -> None:
        """Take one step, after which the engine may go on."""
        if session not in self._sessions:
            self._sessions.append(session)
            self._trace.engines.append(_readable(session.config))
        number = self._sessions.index(session)
        seen: dict[str, Any] = {name: self._judge.present(name, tensor) for name, tensor in step.arguments().items()}
        self._trace.steps.append(
            TracedStep(
                engine=number,
                block_size=session.config.block_size if session.config.policy.slot_cache else 0,
                blocks=session.engine.kv_cache.shape[0],
                step=dataclasses.replace(step, **seen),
                rows=None,
            )
        )

    def finish(self) -> Trace:
        """Give the trace; its rows are checked in the judge's two slower ways first.

        Raises:
            RuntimeError: the ways differ: the judge itself is wrong.
        """
        truth = Truth(self._world, CPU)
        steps = [one for one in self._trace.steps if one.step.pieces]
        pieces = [piece for one in steps for piece in one.step.pieces]
        owners = [(one.engine, piece.request_id) for one in steps for piece in one.step.pieces]
        rows = truth.rows(pieces)
        truth.check_integers(pieces, rows, samples=min(64, 1 + len(rows) // 16))
        truth.check_whole(owners, pieces, rows, limit=1 << 16)
        begin, done = 0, []
        for one in self._trace.steps:
            end = begin + sum(len(piece.tokens) for piece in one.step.pieces)
            done.append(dataclasses.replace(one, rows=rows[begin:end].numpy()))
            begin = end
        return dataclasses.replace(self._trace, steps=done)


def record(name: str, world: World, steps: Iterator[tuple[Session, Step]], disguise: np.ndarray | None = None) -> Trace:
    """Record all steps of a run, see `Recorder`."""
    recorder = Recorder(name, world, disguise)
    for session, step in steps:
        recorder.feed(session, step)
    return recorder.finish()


def record_run(one: Run, corpus: Corpus, *, rows: int, seed: int) -> Trace:
    """Record one run of the main job at its small size, until `rows` live rows were scheduled."""
    workload = workload_of(one, corpus, size=SMALL, rows=rows, seed=seed)
    return record(one.name, one.world, run(workload, one.world.vocabulary), one.world.alike if one.alike else None)


def main(arguments: list[str]) -> int:
    """Run `python -m parity record`; give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity record", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("--run", default="lagging", metavar="NAME", help="which run of the main job (lagging)")
    parser.add_argument("--rows", type=int, default=1000, help="live rows, at least (1,000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed is the same file everywhere")
    parser.add_argument("--config", default="deepseek-v4.1-flash", help="deepseek-v4.1-flash, toy, or a config.json")
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer.json (default: DeepSeek V4's)")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts of yours")
    options = parser.parse_args(arguments)
    from parity.__main__ import load_world  # it dispatches to this module

    try:
        if options.rows < 1 or options.seed < 0:
            raise ValueError(f"rows, seed: got {options.rows}, {options.seed}, expected at least 1 and at least 0")
        world = load_world(options.config, options.tokenizer)
        runs = {one.name: one for one in all_runs(world)}
        if options.run not in runs:
            raise ValueError(f"run: got {options.run!r}, expected one of {list(runs)}")
        corpus = Corpus(read_texts(options.texts), encoder(world, options.tokenizer), world)
        trace = record_run(runs[options.run], corpus, rows=options.rows, seed=options.seed)
        write_trace(options.out, trace)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    print(f"{options.out}: {trace.num_rows:,} rows in {len(trace.steps):,} steps of run {trace.name!r}")
    return 0


def _readable(config: EngineConfig) -> dict[str, Any]:
    plain = {**dataclasses.asdict(config), "policy": config.policy.value}
    return {**plain, "ids_dtype": str(config.ids_dtype).removeprefix("torch.")}
