"""Laws of the data: what is written is read back, what does not fit is refused by its place, goals are judged."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goals import judge, load_goals
from benchmarks.results import Case, Goal, Results, Skip, read_results, write_results
from benchmarks.table import goal_words, rate, seconds
from benchmarks.timing import Spread


def spread(median: float) -> Spread:
    """Give a spread around a median."""
    return Spread(median, median * 0.9, median * 1.1, median * 0.8, 5)


CASE = Case(
    question="lookup", name="foreground 64", series="foreground", axis="T", size=64, amount=100.0, unit="B",
    way="graph", ours=spread(2e-6), baseline=spread(4e-6), ratio=spread(0.5), agreement="bits", of_ceiling=0.5,
    goal=Goal(ratio=0.9), met=True,
)  # fmt: skip
RESULTS = Results(
    {"card": "a card"}, [CASE, replace(CASE, baseline=None, ratio=None)], [Skip("q", "n", "why")], ["note"]
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """JSON keeps every field of a run."""
    write_results(RESULTS, tmp_path / "run.json")
    assert read_results(tmp_path / "run.json") == RESULTS


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, r"results.format: got 2, expected 1"),
        (("cases", 0, "size"), "64", r"results.cases\[0\].size: got '64', expected int"),
        (("cases", 0, "ours", "median"), None, r"results.cases\[0\].ours.median: got None, expected float"),
        (("cases", 1, "met"), 1, r"results.cases\[1\].met: got 1, expected bool"),
        (("cases", 0, "speed"), 1, r"results.cases\[0\]: got fields .*'speed'.*, expected"),
        (("environment", "card"), 3, r"results.environment.card: got 3, expected str"),
        (("skips",), {}, r"results.skips: got {}, expected"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(tmp_path: Path, path: tuple, value: Any, message: str) -> None:
    """A value of another type, a field too many, another format."""
    data = asdict(RESULTS)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path / "run.json")


def test_a_missing_field_and_a_file_that_is_no_json_are_refused(tmp_path: Path) -> None:
    """Both say what was expected."""
    data = asdict(RESULTS)
    del data["cases"][0]["ours"]["least"]
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"results.cases\[0\].ours: got fields"):
        read_results(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_results(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal(ratio=0.5), True),
        (Goal(ratio=0.49), False),
        (Goal(peer=2e-6), True),
        (Goal(peer=1.9e-6), False),
        (Goal(of_ceiling=0.5), True),
        (Goal(of_ceiling=0.51), False),
        (Goal(rate=100 / 2e-6), True),
        (Goal(rate=101 / 2e-6), False),
        (Goal(ratio=0.5, of_ceiling=0.51), False),
        (Goal(), None),
    ],
)
def test_a_goal_is_met_when_all_of_it_is(goal: Goal, met: bool | None) -> None:
    """Equality meets; one bound that is missed misses the goal."""
    assert judge(CASE, {"lookup/*": goal}, "NVIDIA H200").met is met


def test_what_was_not_measured_meets_nothing() -> None:
    """Without a baseline a ratio cannot be told; a peer's time holds on its own card alone; no goal, no verdict."""
    alone = replace(CASE, baseline=None, ratio=None)
    assert judge(alone, {"*": Goal(ratio=0.5)}, "NVIDIA H200").met is None
    assert judge(CASE, {"*": Goal(peer=1e-9)}, "another card").met is None
    assert judge(CASE, {"*": Goal(ratio=0.5, peer=1e-9)}, "another card").met is True
    assert judge(replace(CASE, goal=None, met=None), {"gate/*": Goal(ratio=0.5)}, "NVIDIA H200").goal is None


def test_the_goals_of_the_project_are_well_formed() -> None:
    """Every goal asks for something, and for something possible."""
    for pattern, goal in load_goals().items():
        asked = [value for value in asdict(goal).values() if value is not None]
        assert asked, pattern
        assert min(asked) > 0, pattern
        assert goal.of_ceiling is None or goal.of_ceiling < 1, pattern


def test_numbers_have_three_digits() -> None:
    """Times, rates and goals as the table writes them."""
    assert [seconds(x) for x in (2.134e-6, 4.7e-5, 0.0123, 0.9996, 2, 812e-6)] == [
        "2.13 us", "47.0 us", "12.3 ms", "1.00 s", "2.00 s", "812 us",
    ]  # fmt: skip
    assert rate(3.521e12, "B") == "3.52 TB/s"
    assert rate(1.2e6, "rows") == "1.20 M rows/s"
    assert rate(5.1, "steps") == "5.10 steps/s"
    assert goal_words(Goal(ratio=0.25, peer=483e-6, of_ceiling=0.88), "B") == "0.25, 483 us, 88%"
