"""`python -m parity` from the outside: what it prints and what it exits with."""

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from parity.__main__ import main
from parity.compare import Comparison
from parity.corpus import read_texts
from parity.report import print_report
from parity.runs import all_runs
from parity.world import World
from serving.runner import Policy

FAULTY = '''
"""A port that takes the window oldest first."""
from reference.hash_state import HashState as Right


class HashState(Right):
    def forward(self, **step):
        step["lookback_token_ids"] = step["lookback_token_ids"].flip(1)
        return super().forward(**step)
'''


@pytest.fixture
def faulty_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with one planted mistake."""
    (tmp_path / "reversed_window_port.py").write_text(FAULTY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "reversed_window_port"


def test_the_reference_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """A right implementation exits 0, with every law reached and every run in the table."""
    assert main(["--impl", "reference", "--rows", "14000", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "all equal" in printed
    assert "NOT REACHED" not in printed
    for name in ("stateless", "prompt only", "known ids", "lagging", "slots only", "another pad", "tokens alike"):
        assert name in printed


def test_a_planted_bug_fails_the_run_and_is_explained(faulty_port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A window in the wrong order exits 1 and shows the row, its lookbacks, both hashes and how to see it again."""
    assert main(["--impl", faulty_port, "--rows", "700", "--device", "cpu", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert f"{faulty_port}: first wrong row in run 'stateless'" in printed
    assert "window column 0" in printed
    assert "expected [" in printed
    assert "got      [" in printed
    assert f"REPRO: python -m parity --device cpu --seed 3 --config deepseek-v4.1-flash --impl {faulty_port}" in printed


def test_what_was_never_tested_is_not_clean(worlds: dict[str, World]) -> None:
    """A run whose lookbacks read no slot, and a feature that nothing reached, stand against the verdict."""
    lagging = next(run for run in all_runs(worlds["flash"]) if run.policy is Policy.LAGGING)
    empty = Comparison("lagging", sources=Counter({"batch": 5, "window": 5, "pad": 5}))
    verdict = print_report(Console(quiet=True), [(lagging, empty)])
    assert not verdict.clean
    assert "lagging: no lookback came from slot, so nothing of it was tested" in verdict.reasons
    assert any(reason.startswith("same-step hit: never reached") for reason in verdict.reasons)


def test_the_same_seed_is_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one seed print the same tables."""
    printed = []
    for _ in range(2):
        main(["--impl", "reference", "--rows", "3000", "--device", "cpu", "--seed", "5", "--run", "lagging"])
        printed.append(capsys.readouterr().out.partition("live rows")[0])
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "no_such_port"], "No module named 'no_such_port'"),
        (["--impl", "json"], "implementation: got json, which offers none of"),
        (["--device", "tpu"], "device: got 'tpu', expected auto, cpu, cuda or cuda:N"),
        (["--config", "missing.json"], "missing.json"),
        (["--run", "nothing"], "run: got ['nothing'], expected some of"),
        (["--rows", "0"], "got 0, expected at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option exits 2 and says what it got and what was expected."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_texts_keep_their_line_ends() -> None:
    """The texts are read as bytes: carriage returns and their like are part of the input."""
    texts = "".join(read_texts())
    assert "\r\n" in texts
    assert "\u2028" in texts
