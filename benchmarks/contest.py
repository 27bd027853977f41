"""Ours and a baseline at the same work: first whether they agree, then how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.results import Case, Label
from benchmarks.timing import Call, HostTimer, Replay, Spread, take_turns

Outputs = tuple[torch.Tensor, ...]
Agreement = Callable[[torch.Tensor, torch.Tensor], bool]

_POISON = 0x7F  # as bytes of int32 above any row of a table, of bfloat16 3.4e38
_SHORT, _LONG = 32, 128  # calls of a graph
_TRIAL = 3  # calls that tell how long a burst is to be
_BURST_SECONDS, _BURST_CALLS = 0.01, 50


class Disagreement(Exception):
    """Ours and the baseline put out different things: no time is worth anything."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def nearly_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree to bfloat16's precision: 2^-7 of the value, and 2^-7 where that is below 1."""
    return a.shape == b.shape and bool(((a.float() - b.float()).abs() <= 2**-7 * b.float().abs().clamp(min=1)).all())


@dataclass
class Contest:
    """Describe the work.

    Attributes:
        ours: runs call i, on inputs of its own, and gives all it puts out.
        baseline: the same work on the same inputs; None where there is nothing to compare with.
        sets: sets of inputs, at least as many as differ; call i takes set i mod sets.
        agree: judges one output of ours beside the baseline's.
        reset: brings back any state that the calls change.
        refresh: draws new inputs, before each sample and outside its time.
    """

    ours: Call
    baseline: Call | None
    sets: int
    agree: Agreement = same_bits
    reset: Callable[[], object] = lambda: None
    refresh: Callable[[], object] = lambda: None

    @property
    def calls(self) -> dict[str, Call]:
        """The contenders by name."""
        return {"ours": self.ours} | ({} if self.baseline is None else {"baseline": self.baseline})

    def compare(self) -> str | None:
        """Run both on every set, into poisoned memory, and say how they agree.

        Raises:
            Disagreement: they do not.
        """
        for number in range(self.sets):
            outputs = [_on_poison(call, number, self.reset) for call in self.calls.values()]
            self._judge(outputs, f"set {number}")
        return self._word()

    def compare_replays(self, replays: Sequence[Replay]) -> None:
        """Run each contender's graph once, from the same state, and compare what the last call put out."""
        outputs = []
        for replay in replays:
            self.reset()
            replay.run()
            outputs.append(replay.last)
        self._judge(outputs, "the last call of a replay")

    def _judge(self, outputs: Sequence[Outputs], where: str) -> None:
        if len(outputs) < 2:
            return
        for place, (a, b) in enumerate(zip(*outputs, strict=True)):
            if not self.agree(a, b):
                raise Disagreement(f"outputs differ: output {place} of {where}; expected equal ({self._word()})")

    def _word(self) -> str | None:
        if self.baseline is None:
            return None
        return "bits" if self.agree is same_bits else "close"


def measure(
    timer: HostTimer, rounds: int, label: Label, contest: Contest, ways: Sequence[str] = ("graph", "eager")
) -> Iterator[Case]:
    """Compare the contenders, then time them in turns.

    Args:
        timer: of the device.
        rounds: samples of each contender.
        label: what the cases are called.
        contest: the work.
        ways: `graph`, many calls replayed as one, and `eager`, which gives two cases: `eager cpu`, until the call
            returns, and `eager wall`, until its work has ended; `wall` gives the latter alone.

    Yields:
        one case a way.

    Raises:
        Disagreement: outputs differ.
    """
    contest.refresh()
    agreement = contest.compare()
    estimate = max(timer.eager(call, _TRIAL)[1] for call in contest.calls.values())
    if "graph" in ways:
        calls = _SHORT if estimate > 150e-6 else _LONG
        replays = {name: timer.record(call, calls) for name, call in contest.calls.items()}
        contest.compare_replays(list(replays.values()))
        samplers = {name: _fresh(contest.refresh, replay.seconds) for name, replay in replays.items()}
        yield case(label, "graph", take_turns(samplers, rounds), agreement)
    if "eager" in ways or "wall" in ways:
        calls = min(max(int(_BURST_SECONDS / estimate), 1), _BURST_CALLS)
        bursts = {
            name: _fresh(contest.refresh, lambda call=call: timer.eager(call, calls))
            for name, call in contest.calls.items()
        }
        taken = take_turns(bursts, rounds)
        for part, way in ((0, "eager cpu"), (1, "eager wall")) if "eager" in ways else ((1, "wall"),):
            times = {name: [sample[part] for sample in samples] for name, samples in taken.items()}
            yield case(label, way, times, agreement)


def case(label: Label, way: str, taken: dict[str, list[float]], agreement: str | None = None) -> Case:
    """Sum the samples of a case up; the ratio is that of the two samples of a round."""
    ours, baseline = taken["ours"], taken.get("baseline")
    return Case(
        **vars(label),
        way=way,
        ours=Spread.of(ours),
        baseline=Spread.of(baseline) if baseline else None,
        ratio=Spread.of([a / b for a, b in zip(ours, baseline, strict=True)]) if baseline else None,
        agreement=agreement,
    )


def _fresh(refresh, sample):  # type: ignore[no-untyped-def]
    def take():  # type: ignore[no-untyped-def]
        refresh()
        return sample()

    return take


def _on_poison(call: Call, number: int, reset: Callable[[], object]) -> Outputs:
    """Run a call whose outputs lie where poison lay: what it does not write is seen.

    The allocator gives a freed block back to the next request of its size.
    """
    reset()
    _poison(call(number))
    reset()
    return call(number)


def _poison(outputs: Outputs) -> None:  # a function of its own: nothing of them lives on
    for output in outputs:
        _bytes(output).fill_(_POISON)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
