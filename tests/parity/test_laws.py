"""Every law on the step model and on the implementation under test."""

import pytest
from hypothesis import given, settings

from parity.laws import LAWS, Bench, Law
from parity.world import World

LAW = pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.number}-{law.name}")
WORLD = pytest.mark.parametrize("world_name", ["flash", "another_pad"])


@LAW
@WORLD
def test_law_holds_on_the_step_model(law: Law, world_name: str, worlds: dict[str, World], model) -> None:
    """Each law holds for the reference's model of one step: many cases."""
    _check(law, Bench(worlds[world_name], *model), settings().max_examples)


@LAW
def test_law_holds_on_the_implementation_under_test(law: Law, worlds: dict[str, World], under_test) -> None:
    """Each law holds for `--impl`: as many cases on a GPU as on the model, a few in the interpreter."""
    implementation, device = under_test
    slow = device.type == "cpu" and implementation.name != "reference"
    examples = max(2, settings().max_examples // 40) if slow else settings().max_examples
    _check(law, Bench(worlds["another_pad"], implementation, device), examples)


def _check(law: Law, bench: Bench, examples: int) -> None:
    @settings(max_examples=examples)
    @given(law.cases(bench.world))
    def holds(case: object) -> None:
        law.check(bench, case)

    holds()
