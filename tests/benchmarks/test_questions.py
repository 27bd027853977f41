"""Laws of the questions: each runs, at its smallest size, on any device, and a wrong kernel is never timed."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import CPU_QUESTIONS, GPU_QUESTIONS
from benchmarks.baseline import load_baseline
from benchmarks.bench import Bench
from benchmarks.goals import load_goals
from benchmarks.results import Label, Results
from benchmarks.timing import HostTimer

BASELINE = Path(__file__).with_name("plain_baseline.py")


@pytest.fixture
def bench(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A quick run of one round; on the CPU a graph is one call, for the interpreter is slow."""
    timer = HostTimer()
    if device.type == "cuda":
        from benchmarks.cuda_timing import CudaTimer

        timer = CudaTimer(device)
    else:
        for constant in ("_SHORT", "_LONG", "_TRIAL"):
            monkeypatch.setattr(f"benchmarks.contest.{constant}", 1)
    for question in ("hash", "rows", "interpreter"):
        monkeypatch.setattr(f"benchmarks.{question}._SETS", 2)
    return Bench(device, timer, Results({"card": "none"}), load_baseline(BASELINE), load_goals(), rounds=1, quick=True)


@pytest.mark.parametrize("question", GPU_QUESTIONS)
def test_a_question_of_the_gpu_answers(question: str, bench: Bench) -> None:
    """Every case agrees with a baseline out of the reference and has a time; nothing but one launch may be missing."""
    if bench.device.type == "cuda" and question != "ceilings":
        # The reference waits for the device, so no graph can hold it: ours alone.
        bench.baseline = None
    importlib.import_module(f"benchmarks.{question}").ask(bench)
    assert [skip for skip in bench.results.skips if "one launch" not in skip.name] == []
    assert bench.results.cases
    compared = question != "ceilings" and bench.baseline is not None
    for case in bench.results.cases:
        assert case.question == question
        assert case.ours.median > 0
        assert (case.ratio is not None) == compared
        assert case.agreement == (None if not compared else "close" if question == "gate" else "bits")


@pytest.mark.parametrize("question", CPU_QUESTIONS)
def test_a_question_of_the_cpu_answers(question: str, bench: Bench) -> None:
    """Every case has a time; the fast token map and the interpreted kernel agree with the plain ones."""
    if bench.device.type == "cuda":
        pytest.skip("a question of the CPU")
    bench.baseline = None
    importlib.import_module(f"benchmarks.{question}").ask(bench)
    assert bench.results.skips == []
    for case in bench.results.cases:
        assert case.ours.median > 0
        assert case.agreement == ("bits" if question in ("token_map", "interpreter") else None)


@pytest.mark.parametrize(
    ("question", "function", "spoil"),
    [
        ("hash", "hash_ids", lambda out: out[-1, -1, -1].add_(1)),
        ("lookup", "lookup", lambda out: out[-1, -1, -1].neg_()),
        ("gate", "gate", lambda out: out[-1, -1, -1].add_(1)),
    ],
)
def test_kernels_that_differ_in_one_element_are_a_fault_and_have_no_time(
    question: str, function: str, spoil: Any, bench: Bench
) -> None:
    """Whoever is wrong, ours or the baseline: no case, and a fault for each."""
    right = getattr(bench.baseline, function)

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        spoil(out)
        return out

    bench.baseline = SimpleNamespace(**{function: wrong})  # type: ignore[assignment]
    importlib.import_module(f"benchmarks.{question}").ask(bench)
    assert bench.results.cases == []
    assert all(skip.fault and "outputs differ" in skip.reason for skip in bench.results.skips)
    assert bench.results.skips


def test_every_goal_is_of_a_case(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A goal whose case was renamed would never be judged: each has one in a whole run."""
    keys: list[str] = []

    class Names(Bench):
        def contest(self, label: Label, contest: object, ways: Any = ("graph", "eager"), rounds: Any = None) -> None:
            found = {"eager": ("eager cpu", "eager wall")}
            keys.extend(f"{label.question}/{label.name}/{one}" for way in ways for one in found.get(way, (way,)))

        def skip(self, question: str, name: str, reason: str, *, fault: bool = False) -> None:
            keys.append(f"{question}/{name}/graph")

    names = Names(bench.device, bench.timer, bench.results, table=(torch.empty(1, 256), torch.empty(1, 8)))
    nothing = lambda *arguments, **options: None  # noqa: E731
    for question in (*GPU_QUESTIONS[1:], *CPU_QUESTIONS):
        module = importlib.import_module(f"benchmarks.{question}")
        for contest in ("hash_contest", "lookup_contest", "rows_contest", "gate_contest", "oracle_contest"):
            monkeypatch.setattr(module, contest, nothing, raising=False)
        monkeypatch.setattr(module, "host_table", lambda *_: names.table, raising=False)
        if question not in ("token_map", "engine", "interpreter"):
            module.ask(names)
    from fnmatch import fnmatchcase

    unused = [pattern for pattern in load_goals() if not any(fnmatchcase(key, pattern) for key in keys)]
    assert unused == []
