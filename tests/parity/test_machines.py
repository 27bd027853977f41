"""The engine's state machine on the step model and on the implementation under test."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from parity.laws import Bench
from parity.machines import EngineMachine


def test_no_program_of_requests_steps_and_moves_breaks_parity_on_the_step_model(worlds, model) -> None:
    """Whatever two engines are asked in whatever order, every live row is that of its request alone."""
    _run(Bench(worlds["another_pad"], *model), settings().max_examples)


def test_no_program_breaks_parity_on_the_implementation_under_test(worlds, under_test) -> None:
    """The same for `--impl`."""
    implementation, device = under_test
    slow = device.type == "cpu" and implementation.name != "reference"
    examples = max(2, settings().max_examples // 40) if slow else settings().max_examples
    _run(Bench(worlds["another_pad"], implementation, device), examples)


def _run(bench: Bench, examples: int) -> None:
    machine = type("BoundMachine", (EngineMachine,), {"bench": bench})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20))
