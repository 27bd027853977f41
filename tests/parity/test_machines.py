"""The engine's state machine on the step model and on the implementation under test."""

from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from parity.actions import Action
from parity.laws import Bench
from parity.machines import EngineMachine
from serving.step import EVENTS

RULES = (
    "add", "follow", "pack", "move", "preempt, reload", "preempt, recompute", "fork", "reorder", "abort", "sleep",
    *(f"step, {way}" for way in (Action.NOTHING, Action.SPLIT, Action.AHEAD, Action.DUMMY, Action.ABORT_IN_FLIGHT)),
)  # fmt: skip
# A program of small requests has no block of 256 slots, no position past 2^31 and no request of the model's length.
OUT_OF_REACH = {"large blocks", "long position", "model's limit"}


def test_no_program_of_requests_steps_and_moves_breaks_parity_on_the_step_model(worlds, model) -> None:
    """Whatever two engines are asked in whatever order, every live row is that of its request alone."""
    _run(Bench(worlds["another_pad"], *model), settings().max_examples)


def test_no_program_breaks_parity_on_the_implementation_under_test(worlds, under_test) -> None:
    """The same for `--impl`."""
    implementation, device = under_test
    slow = device.type == "cpu" and implementation.name != "reference"
    examples = max(2, settings().max_examples // 40) if slow else settings().max_examples
    _run(Bench(worlds["another_pad"], implementation, device), examples)


def test_programs_use_every_rule_and_reach_every_event(worlds, model) -> None:
    """A fixed set of programs carries out every rule and sees every event that small requests can have."""
    fixed = settings(
        max_examples=250,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    uses: Counter[str] = Counter()
    _run(Bench(worlds["toy"], *model), 0, fixed, uses)
    wanted = {*RULES, *EVENTS} - OUT_OF_REACH
    missing = wanted - uses.keys()
    assert not missing, f"never: {sorted(missing)}; seen: {dict(uses)}"


def _run(bench: Bench, examples: int, how: settings | None = None, uses: Counter[str] | None = None) -> None:
    steering = settings().max_examples >= 1000
    fields = {"bench": bench, "steering": steering, "uses": Counter() if uses is None else uses}
    machine = type("BoundMachine", (EngineMachine,), fields)
    run_state_machine_as_test(machine, settings=how or settings(max_examples=examples, stateful_step_count=20))
