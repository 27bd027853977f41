"""The laws of values, single moves and binding on the implementation under test."""

import pytest
from hypothesis import given, settings

from parity.engine_laws import ENGINE_LAWS
from parity.laws import Bench, Law
from parity.value_laws import NEEDS, VALUE_LAWS, in_child
from parity.world import World


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")
@pytest.mark.parametrize("law", [*ENGINE_LAWS, *VALUE_LAWS], ids=lambda law: law.name)
def test_law_holds_on_the_implementation_under_test(law: Law, worlds: dict[str, World], under_test) -> None:
    """Each law that the kill matrix uses holds for `--impl`, where it offers what the law asks for."""
    implementation, device = under_test
    path = NEEDS.get(law.name, "hash_state.HashState")
    if implementation.find(path) is None:
        pytest.skip(f"{implementation.name} offers no {path}")
    if law.name == "far_rows" and device.type != "cpu":
        pytest.skip("a process that uses CUDA cannot fork; the GPU's own test reads the full table")
    slow = device.type == "cpu" and implementation.name != "reference"
    bench = Bench(worlds["another_pad"], implementation, device)

    @settings(max_examples=max(2, settings().max_examples // 100) if slow else settings().max_examples)
    @given(law.cases(bench.world))
    def holds(case: object) -> None:
        law.check(bench, case)

    holds()


def test_a_child_may_die_and_may_raise() -> None:
    """The end of a child by a signal is told as its status, a result comes back, and an error stays an error."""
    import os

    assert in_child(lambda: [1, 2]) == (0, [1, 2])
    assert in_child(lambda: os.kill(os.getpid(), 11))[0] == 11
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0)
