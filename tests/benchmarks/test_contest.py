"""Laws of a contest: nothing is timed whose outputs were not compared, and the ratio is that of a round."""

import weakref

import pytest
import torch

from benchmarks.contest import Contest, Disagreement, case, measure, nearly_same, same_bits
from benchmarks.results import Label
from benchmarks.timing import HostTimer

LABEL = Label(question="q", name="n", series="s", axis="T", size=2, amount=8, unit="B")


def test_equal_outputs_are_timed_every_way() -> None:
    """Graph gives one case, eager two; all say that bits were compared."""
    call = lambda number: (torch.arange(4) + number,)  # noqa: E731
    found = list(measure(HostTimer(), 2, LABEL, Contest(call, call, 3)))
    assert [(one.way, one.agreement) for one in found] == [
        ("graph", "bits"), ("eager cpu", "bits"), ("eager wall", "bits"),
    ]  # fmt: skip
    assert all(one.ratio and one.ratio.samples == 2 for one in found)


@pytest.mark.parametrize("wrong", [0, 3, 7])
def test_one_wrong_element_of_any_set_stops_the_contest(wrong: int) -> None:
    """Every set of inputs that is timed is compared before."""
    right = lambda number: (torch.zeros(4, dtype=torch.int32),)  # noqa: E731

    def spoiled(number: int) -> tuple[torch.Tensor]:
        return (torch.tensor([0, 0, int(number % 8 == wrong), 0], dtype=torch.int32),)

    with pytest.raises(Disagreement, match="outputs differ: output 0"):
        list(measure(HostTimer(), 1, LABEL, Contest(spoiled, right, 8)))


def test_what_is_not_written_is_seen() -> None:
    """Right values that an earlier call left in the buffer are poisoned before the call that counts."""
    buffer = torch.zeros(4)
    calls = []

    def lazy(number: int) -> tuple[torch.Tensor]:
        if not calls:
            buffer.zero_()
        calls.append(number)
        return (buffer,)

    with pytest.raises(Disagreement):
        Contest(lazy, lambda number: (torch.zeros(4),), 1).compare()


def test_poisoned_memory_is_free_for_the_call_that_counts() -> None:
    """Outputs of the first call are gone when the second begins, or an allocator would give it clean memory."""
    alive: list[weakref.ref] = []

    def call(number: int) -> tuple[torch.Tensor]:
        assert all(old() is None for old in alive)
        output = torch.zeros(4)
        alive[:] = [weakref.ref(output)]
        return (output,)

    Contest(call, None, 1).compare()


def test_state_is_brought_back_before_each_compared_call() -> None:
    """A contender that counts its calls agrees with one that always begins anew."""
    count = torch.zeros(1)
    contest = Contest(lambda number: (count.add_(1).clone(),), lambda number: (torch.ones(1),), 4, reset=count.zero_)
    assert contest.compare() == "bits"


def test_bits_tell_minus_zero_from_zero_and_take_nan_for_itself() -> None:
    """Values would do neither."""
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, torch.zeros(1, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_nearly_the_same_is_a_few_bfloat16_steps() -> None:
    """2^-8 relative passes, 2^-6 does not; NaN is near nothing."""
    one = torch.tensor([100.0])
    assert nearly_same(one * (1 + 2**-8), one)
    assert not nearly_same(one * (1 + 2**-6), one)
    assert not nearly_same(torch.tensor([torch.nan]), one)


def test_the_ratio_is_that_of_each_round() -> None:
    """Two rounds, one on a machine ten times slower: ours is half the baseline in both."""
    found = case(LABEL, "graph", {"ours": [1.0, 10.0], "baseline": [2.0, 20.0]})
    assert found.ratio is not None
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == (0.5, 0.5, 0.5)
    assert found.rate == 8 / 5.5


def test_inputs_are_drawn_anew_before_every_sample() -> None:
    """Once to compare, then once a sample of each contender and way."""
    drawn: list[int] = []
    call = lambda number: (torch.zeros(1),)  # noqa: E731
    list(measure(HostTimer(), 3, LABEL, Contest(call, call, 1, refresh=lambda: drawn.append(1)), ("graph", "eager")))
    assert len(drawn) == 1 + 2 * 3 * 2
