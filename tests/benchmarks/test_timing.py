"""Laws of taking a time, by a clock that the test moves."""

import pytest

from benchmarks.timing import HostTimer, Spread, take_turns


class Clock:
    """Give the seconds that were spent so far."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Device(HostTimer):
    """Queue work as a GPU does: a call costs 1 s to launch and 10 s to run."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.queued = 0

    def launch(self, number: int) -> tuple:
        self.clock.spend(1)  # type: ignore[attr-defined]
        self.queued += 1
        return (number,)

    def wait(self) -> None:
        self.clock.spend(10 * self.queued)  # type: ignore[attr-defined]
        self.queued = 0


def test_an_eager_call_costs_its_launch_and_takes_until_its_work_ends() -> None:
    """Of 4 calls each is launched in 1 s; all have ended after 4 + 40 s."""
    timer = Device(Clock())
    assert timer.eager(timer.launch, 4) == (1, 11)


def test_work_from_before_is_in_no_time() -> None:
    """What was still queued is waited for before the clock is read."""
    timer = Device(Clock())
    timer.launch(0)
    assert timer.eager(timer.launch, 4) == (1, 11)


def test_a_recording_makes_every_call_in_order_and_keeps_the_last_output() -> None:
    """Calls are numbered from 0, so that each takes its own inputs."""
    made: list[int] = []
    replay = HostTimer(Clock()).record(lambda number: made.append(number) or (number,), 3)
    replay.run()
    assert (made, replay.last) == ([0, 1, 2], (2,))


def test_contenders_take_turns_and_none_is_always_first() -> None:
    """Rounds go forth and back: a b, b a, a b."""
    order: list[str] = []
    samplers = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert take_turns(samplers, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(order) == "abbaab"


def test_a_slow_drift_of_the_clock_speeds_nobody_up() -> None:
    """A machine that gets slower by 1 s a sample gives equal medians over an even number of rounds."""
    clock = Clock()

    def sample() -> float:
        clock.spend(1)
        return clock.now

    taken = take_turns({"a": sample, "b": sample}, 4)
    assert Spread.of(taken["a"]).median == Spread.of(taken["b"]).median


def test_a_spread_says_where_samples_lie() -> None:
    """Of 1, 2, 3, 4, 100 the median is 3, the quartiles 2 and 4: one outlier moves none of them."""
    assert Spread.of([100, 3, 1, 4, 2]) == Spread(median=3, low=2, high=4, least=1, samples=5)


@pytest.mark.gpu
def test_a_graph_takes_as_long_as_its_calls(device) -> None:  # type: ignore[no-untyped-def]
    """A fill of 1 GiB writes at no more than 8 TB/s on a card of today, whether a graph holds 4 or 8 of them."""
    import torch

    from benchmarks.cuda_timing import CudaTimer

    memory = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    timer = CudaTimer(device)
    for calls in (4, 8):
        replay = timer.record(lambda number: (memory.fill_(number),), calls)
        replay.run()
        assert replay.seconds() > (1 << 30) / 8e12
        assert int(replay.last[0][0]) == calls - 1
