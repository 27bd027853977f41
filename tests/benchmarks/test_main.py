"""Laws of the command: one run writes data, table and plots come from the data, and mistakes are told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.oracles
from benchmarks.__main__ import main
from benchmarks.results import Goal, Results, read_results, write_results
from tests.benchmarks.test_results import CASE, spread

RUN = ["--device", "cpu", "--quick", "--rounds", "2", "--only", "oracles"]


def test_a_run_writes_what_it_measured_and_on_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, date and command stand in the JSON, paths cut to names; the table shows the same cases."""
    path = tmp_path / "run.json"
    assert main([*RUN, "-o", str(path)]) == 0
    results = read_results(path)
    assert [case.key for case in results.cases] == ["oracles/numpy 100/wall", "oracles/torch 100/wall"]
    assert results.environment.keys() >= {"card", "driver", "torch", "triton", "python", "date", "command", "baseline"}
    assert results.environment["command"].endswith("--only oracles -o run.json")
    assert str(tmp_path) not in path.read_text()
    shown = capsys.readouterr().out
    assert all(case.name in shown for case in results.cases)


def test_a_question_that_fails_loses_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured and written, the fault is told, the exit status is 1."""

    def fail(bench: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(benchmarks.oracles, "ask", fail)
    path = tmp_path / "run.json"
    assert main(["--device", "cpu", "--quick", "--rounds", "1", "--only", "oracles,engine", "-o", str(path)]) == 1
    results = read_results(path)
    assert {case.question for case in results.cases} == {"engine"}
    assert [(skip.question, skip.fault) for skip in results.skips] == [("oracles", True)]
    assert "RuntimeError: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--only", "gate"], "only: got ['gate'] on cpu, expected some of token_map"),
        (["--device", "cpu", "--baseline", "any.py"], "baseline: got any.py on the CPU"),
        (["--device", "tpu"], "device: got 'tpu'"),
        (["plot", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_argument_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, got and expected on one line, exit status 2."""
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_plots_come_from_the_stored_data_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run on a GPU, drawn on any machine: ratios with goals, and a line for each sweep."""
    pytest.importorskip("matplotlib")
    sweep = [
        replace(CASE, name=f"foreground {size}", size=size, ours=spread(size * 1e-8), goal=Goal(ratio=0.4))
        for size in (64, 1, 256)
    ]
    path, folder = tmp_path / "run.json", tmp_path / "plots"
    write_results(Results({"card": "NVIDIA H200", "torch": "2", "triton": "3", "date": "d"}, sweep), path)
    assert main(["plot", str(path), "-o", str(folder)]) == 0
    names = ["ratios.png", "growth_lookup.png"]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    for name in names:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_baseline_or_sweep_draws_nothing(tmp_path: Path) -> None:
    """No ratio, no plot of ratios; one size, no growth."""
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot_results

    assert plot_results(Results({}, [replace(CASE, baseline=None, ratio=None)]), tmp_path) == []


def test_stored_results_can_be_read() -> None:
    """Whatever lies in benchmarks/results is of today's format."""
    for path in (Path(benchmarks.oracles.__file__).parent / "results").glob("*.json"):
        assert json.loads(path.read_text())["cases"]
        read_results(path)
