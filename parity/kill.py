"""Run laws against faults: each fault must break the law that names it, and the right implementations none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, settings

import parity.laws
from parity.engine_laws import ENGINE_LAWS
from parity.faults import CATALOGUE, RUNNER, Fault
from parity.faults.gate import plain_gate
from parity.faults.model import Model
from parity.laws import LAWS, Bench, Law, LawBroken
from parity.protocol import Implementation, load_implementation
from parity.runs import with_another_pad
from parity.value_laws import NEEDS, VALUE_LAWS
from parity.workload import Session, Workload, run
from parity.world import World, flash
from serving.step import Step

CASES = 200  # of the profile `ci`
OTHER_CASES = 5  # of the laws that do not name a fault
ALL_LAWS: dict[str, Law] = {law.name: law for law in (*LAWS, *ENGINE_LAWS, *VALUE_LAWS)}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Verdict:
    """Say what became of a law on an implementation.

    Attributes:
        law: its name.
        cases: how many were tried; the last one broke it, if it was broken.
        seconds: how long that took.
        broken: what the law said, or "".
        error: another error than a broken law, or "": then nothing is known.
    """

    law: str
    cases: int
    seconds: float
    broken: str = ""
    error: str = ""


@cache
def world() -> World:
    """Give DeepSeek-V4.1-Flash with a pad token that compresses to another id: no mistake of the pad hides there."""
    return with_another_pad(flash())


def try_law(law: Law, implementation: Implementation, cases: int) -> Verdict:
    """Try a law on generated cases, without shrinking, stored or pinned ones, always the same."""
    bench = Bench(world(), implementation, CPU)
    tried, broken = 0, ""

    @settings(
        max_examples=cases, database=None, derandomize=True, phases=[Phase.generate], deadline=None,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(law.cases(bench.world))
    def holds(case: object) -> None:
        nonlocal tried, broken
        if broken:
            raise LawBroken(broken)  # hypothesis shows the case once more
        tried += 1
        try:
            law.check(bench, case)
        except LawBroken as error:
            broken = str(error) or law.sentence
            raise

    started, other = time.perf_counter(), ""
    try:
        holds()
    except Exception as error:
        other = "" if broken else f"{type(error).__name__}: {error}"
    return Verdict(law.name, tried, time.perf_counter() - started, broken, other)


@contextmanager
def planted(fault: Fault) -> Iterator[Implementation]:
    """Give the port that has a fault; where the runner has it, every engine's steps pass through it meanwhile."""
    if fault.level != RUNNER:
        yield fault.implementation
        return

    def steps(workload: Workload, vocabulary: int) -> Iterator[tuple[Session, Step]]:
        wrong, numbers = fault.make(), dict[int, int]()
        for session, step in run(workload, vocabulary):
            yield session, wrong.change(numbers.setdefault(id(session), len(numbers)), step)

    with patch.object(parity.laws, "run", steps):
        yield fault.implementation


def judge_fault(fault: Fault, *, others: int = OTHER_CASES) -> list[Verdict]:
    """Try the law that names a fault on `CASES` cases, and the others that may see it on a few."""
    with planted(fault) as port:
        verdicts = [try_law(ALL_LAWS[fault.law], port, CASES)]
        for law in ALL_LAWS.values():
            if others and law.name != fault.law and may_see(law, fault):
                verdicts.append(try_law(law, port, others))
    return verdicts


def may_see(law: Law, fault: Fault) -> bool:
    """Say whether a law asks for what a fault breaks, and does not spend seconds a case."""
    if law.name == "far_rows" or (fault.group == "kernel" and law.name not in ("agreement", "chunks", "prefix_hit")):
        return False
    return NEEDS.get(law.name, "hash_state.HashState") == fault.offers and not (
        fault.level == RUNNER and law.name in ("dead_span", "compression", "binding")
    )


def controls() -> dict[str, Implementation]:
    """Give the right implementations, by name: what faults are made of must break no law itself."""
    gate = Implementation("plain gate", SimpleNamespace(engram_gate=plain_gate))
    model = Implementation("step model", SimpleNamespace(HashState=Model))
    return {"reference": load_implementation("reference"), "step model": model, "plain gate": gate}


def control_laws(name: str) -> list[Law]:
    """Give the laws that a control is tried on."""
    if name == "plain gate":
        return [law for law in VALUE_LAWS if NEEDS[law.name] == "gate.engram_gate"]
    return [*LAWS, *ENGINE_LAWS] if name == "step model" else list(VALUE_LAWS)


def survivors(verdicts: dict[str, Sequence[Verdict]]) -> list[str]:
    """Name the faults that the law which names them did not catch."""
    return [number for number, found in verdicts.items() if not found or not found[0].broken]


def in_process(numbers: Sequence[str]) -> Iterator[tuple[str, list[Verdict]]]:
    """Judge faults one after the other, here."""
    for number in numbers:
        yield number, judge_fault(CATALOGUE[number], others=0)
