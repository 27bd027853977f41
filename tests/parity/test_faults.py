"""The laws can fail: each mistake that people really made breaks the law that names it, on generated cases alone."""

import re
from pathlib import Path

import pytest
import triton

from parity.faults import CATALOGUE, RUNNER, STATE
from parity.kill import ALL_LAWS, control_laws, controls, judge_fault, survivors, try_law
from parity.kill_matrix import forked

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
LISTED = {
    **dict.fromkeys((f"H{number}" for number in range(1, 30)), "history and scheduling"),
    **dict.fromkeys((f"C{number}" for number in range(1, 24)), "constants and map"),
    **dict.fromkeys((f"T{number}" for number in range(1, 17)), "table and shards"),
    **dict.fromkeys((f"G{number}" for number in range(1, 12)), "gate"),
}
# These take seconds each: `make faults` has them all.
LONG = {"H10", "H16", "H20", "H20b", "H32", "C1b", "C20"}
SAMPLE = [number for number in CATALOGUE if number not in LONG]


@pytest.mark.parametrize("number", SAMPLE)
def test_a_fault_breaks_the_law_that_names_it(number: str) -> None:
    """No more cases than the profile `ci` has, none of them pinned, and the law finds it: a red that was seen."""
    fault = CATALOGUE[number]
    if fault.group == "kernel" and not triton.knobs.runtime.interpret:
        pytest.skip("faulty kernels run in Triton's interpreter")
    verdicts = judge_fault(fault, others=0)
    assert not survivors({number: verdicts}), verdicts


@pytest.mark.parametrize("name", ["reference", "step model", "plain gate"])
def test_what_faults_are_made_of_breaks_no_law(name: str) -> None:
    """The right implementations pass, so that a fault is caught for what it changes and for nothing else."""
    right = controls()[name]
    for law in control_laws(name):
        verdict = try_law(law, right, 12)
        assert not verdict.broken, verdict.broken
        assert not verdict.error, verdict.error


def test_every_listed_mistake_is_in_the_catalogue() -> None:
    """All 79 that were collected are there, each of them and every other with a story and a law that exists."""
    assert not set(LISTED) - set(CATALOGUE)
    assert len(CATALOGUE) >= 75
    for fault in CATALOGUE.values():
        assert fault.law in ALL_LAWS, fault.id
        assert len(fault.story.split()) > 5, fault.id
        assert fault.story.endswith("."), fault.id
        assert fault.clause[0].islower(), fault.id
        assert fault.level in (STATE, RUNNER) or fault.offers != "hash_state.HashState"
    assert len({fault.clause for fault in CATALOGUE.values()}) == len(CATALOGUE)


def test_reports_are_cited_by_repository_and_number() -> None:
    """Where a report is public, the source names it so that it can be looked up."""
    cited = [fault for fault in CATALOGUE.values() if re.search(r"\w#\d+", fault.source)]
    assert len(cited) >= 20


def test_the_page_lists_every_fault() -> None:
    """docs/faults.md is the catalogue's: id, clause, story and law of each; `make faults` writes it."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text(encoding="utf-8").splitlines()}
    for fault in CATALOGUE.values():
        assert fault.id in rows, f"{fault.id}: run `make faults`"
        for part in (fault.clause, fault.story, fault.source, f"| {fault.law} |"):
            assert part in rows[fault.id], f"{fault.id}: run `make faults`"


def test_a_process_that_dies_or_hangs_is_no_catch() -> None:
    """A job that raises, ends its process or takes too long is reported as that, and the others go on."""
    import os
    import time

    jobs = {
        "fine": lambda: [1],
        "raises": lambda: 1 // 0,
        "dies": lambda: os._exit(3),
        "hangs": lambda: time.sleep(60),
    }
    found = dict(forked(jobs, workers=2, limit=2.0))
    assert found == {
        "fine": [1],
        "raises": "ZeroDivisionError: integer division or modulo by zero",
        "dies": "the process ended with 3",
        "hangs": "took more than 2 s",
    }
    assert survivors({"dies": []}) == ["dies"]
