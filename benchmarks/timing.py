"""How a time is taken: samples of many calls, contenders in turns, medians with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

Sample = TypeVar("Sample")
Call = Callable[[int], Any]  # runs call number i, on inputs of its own, and gives its outputs


@dataclass(frozen=True)
class Spread:
    """Say where samples lie.

    Attributes:
        median: of all samples.
        low: the lower quartile.
        high: the upper quartile.
        least: the smallest sample.
        samples: how many there are.
    """

    median: float
    low: float
    high: float
    least: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Sum samples up; quartiles are interpolated linearly."""
        low, median, high = np.percentile(samples, [25, 50, 75]).tolist()
        return cls(median, low, high, float(min(samples)), len(samples))


def take_turns(samplers: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Draw one sample of every contender a round; whoever begins a round ends the next.

    A clock that drifts, or a neighbour that comes and goes, then touches all of them alike.
    """
    taken: dict[str, list[Sample]] = {name: [] for name in samplers}
    for turn in range(rounds):
        for name in list(samplers)[:: -1 if turn % 2 else 1]:
            taken[name].append(samplers[name]())
    return taken


class Replay(Protocol):
    """Some calls that run as one."""

    last: Any  # what the last of the calls put out

    def run(self) -> None:
        """Run them all."""

    def seconds(self) -> float:
        """Run them all and give the seconds of one."""


class HostTimer:
    """Time calls by the clock: on the CPU, where a call has ended when it returns.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def wait(self) -> None:
        """Wait until all that was started has ended."""

    def eager(self, call: Call, calls: int) -> tuple[float, float]:
        """Make calls in a row; give the seconds until each returned, and until each had ended."""
        self.wait()
        start = self.clock()
        for number in range(calls):
            call(number)
        returned = self.clock()
        self.wait()
        return (returned - start) / calls, (self.clock() - start) / calls

    def record(self, call: Call, calls: int) -> Replay:
        """Make the calls one unit that runs again and again; on the CPU a plain loop."""
        return _Loop(self, call, calls)


class _Loop:
    def __init__(self, timer: HostTimer, call: Call, calls: int) -> None:
        self._timer, self._call, self._calls, self.last = timer, call, calls, None

    def run(self) -> None:
        for number in range(self._calls):
            self.last = self._call(number)

    def seconds(self) -> float:
        return self._timer.eager(self._call, self._calls)[1]
