"""What the values of a run came to: one finding a row of the report."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")
CLOSE_AXES = ("token", "copy", "element")


@dataclass
class Finding:
    """Count what one feature saw and keep the first thing that was wrong of every implementation.

    Attributes:
        what: the part of the main job: lookup, gate or layer.
        feature: how the report calls it.
        meaning: in a few words.
        cases: calls that were judged, of all implementations.
        rows: rows of those calls.
        unequal: by implementation, its wrong rows, or the calls that it did not answer.
        worst: the largest error as a share of what is allowed; None where bits are compared.
        first: by implementation, the explanation of its first wrong row.
        missing: what should have been reached and was not.
    """

    what: str
    feature: str
    meaning: str
    cases: int = 0
    rows: int = 0
    unequal: Counter[str] = field(default_factory=Counter)
    worst: float | None = None
    first: dict[str, str] = field(default_factory=dict)
    missing: str = ""

    def wrong(self, implementation: str, count: int, lines: Iterable[str]) -> None:
        """Count wrong rows; the lines explain the first of them and are kept if none is yet."""
        self.unequal[implementation] += count
        if implementation not in self.first:
            head = f"{implementation}: first wrong row in {self.what}, {self.feature}"
            self.first[implementation] = "\n".join([head, *(f"  {line}" for line in lines)])

    def ask(self, implementation: str, question: Callable[[], T]) -> T | None:
        """Ask an implementation; None where it raises: on a legal call that is an answer, and a wrong one."""
        try:
            with warnings.catch_warnings():
                # Triton's interpreter computes in NumPy, which warns where infinities and NaN arise, as they do here.
                warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
                return question()
        except Exception as error:
            self.wrong(implementation, 1, [f"raised {type(error).__name__}: {error}"])
            return None

    def call(
        self, implementation: str, question: Callable[[], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor | None:
        """Ask for a case, an answer of the shape, dtype and device of `like`; None where it has not."""
        self.cases += 1
        already = self.unequal[implementation]
        got = self.ask(implementation, question)
        if isinstance(got, torch.Tensor) and _kind(got) == _kind(like):
            return got
        if self.unequal[implementation] == already:
            was = _kind(got) if isinstance(got, torch.Tensor) else type(got).__name__
            self.wrong(implementation, 1, [f"gave {was}, expected {_kind(like)}"])
        return None

    def reasons(self) -> list[str]:
        """Say what stands against a clean report."""
        names = f"{self.what}, {self.feature}"
        found = [f"{names}: {name} has {count} rows or calls wrong" for name, count in self.unequal.items() if count]
        if not self.cases or not self.rows:
            found.append(f"{names}: never reached")
        return found + ([f"{names}: {self.missing}"] if self.missing else [])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a floating tensor as the integers that it is stored as."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def hexadecimal(tensor: torch.Tensor) -> str:
    """Write one element's bits."""
    digits = 2 * tensor.element_size()
    return f"0x{int(bits(tensor)) % (1 << 4 * digits):0{digits}X}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
