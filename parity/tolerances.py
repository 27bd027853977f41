"""The one table of tolerances, a reason each, and the one judge of closeness.

Ids, offsets, hashes, casts, gathers and copies are compared by bits and have no line here. Only a real reduction is
judged by closeness, against float64, beside plain PyTorch in the same precision:

    |actual - exact| <= factor * |plain - exact| + floor * 2^-24 * magnitude        for every element
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

HALF_ULP = 2.0**-24  # of float32, relative


@dataclass(frozen=True)
class Tolerance:
    """How far from exact a result may be: `factor` plain errors, and `floor` float32 half-ulps of the magnitude."""

    factor: float
    floor: float
    reason: str


TOLERANCES = {
    "gate": Tolerance(
        factor=2.0,
        floor=16.0,
        reason="Another order of three float32 sums (about 4 half-ulps), and the GPU's approximate rsqrt (2 of 2), "
        "sqrt (2), exp (4) and division (4), make about 16 where all go wrong together. The dtype of the stream needs "
        "no floor: its one rounding differs from plain PyTorch's only beside a tie, where that errs as much.",
    ),
}


@dataclass(frozen=True, eq=False)
class Closeness:
    """Hold, for every element, how far from exact it is, how far it may be, and whether that is too far."""

    error: torch.Tensor
    allowed: torch.Tensor
    bad: torch.Tensor

    @property
    def worst(self) -> float:
        """The largest error as a share of what is allowed; above 1 where an element is too far, 0 where none is off."""
        judged = self.bad | (self.error <= self.allowed)
        share = torch.where(judged & (self.error > 0), self.error / self.allowed, 0.0)
        return float(share.max()) if share.numel() else 0.0


def closeness(
    operation: str, actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor
) -> Closeness:
    """Measure a result by its line of the table; see `assert_close` for the arguments."""
    tolerance = TOLERANCES[operation]
    floor = tolerance.floor * HALF_ULP * magnitude
    allowed = tolerance.factor * _error(plain, exact) + floor
    allowed = torch.where(allowed.isfinite(), allowed, floor).nan_to_num(0.0, 0.0, 0.0)
    error = _error(actual, exact)
    return Closeness(error, allowed, (error > allowed) & ~_same(actual, plain))


def assert_close(
    operation: str,
    actual: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    *,
    magnitude: torch.Tensor,
    axes: Sequence[str],
) -> None:
    """Refuse a result that is further from exact than its line of the table allows.

    Equal infinities, and NaN beside NaN, are no error. Where float32 overflows, `plain` is not finite and is granted no
    error: there actual must be what plain is, or lie within the floor.

    Args:
        operation: the line of `TOLERANCES`.
        actual: the result to judge, any shape.
        plain: the same shape and dtype, from plain PyTorch in the same precision.
        exact: float64, same shape.
        magnitude: float64, same shape: the sum of the absolute terms behind an element, each times its effect on it.
        axes: one letter or word an axis, for the message.

    Raises:
        AssertionError: another shape or dtype, or an element beyond its bound: says how many, the first and the worst.
    """
    assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype), (
        f"{operation}: got {actual.dtype} {tuple(actual.shape)}, expected {plain.dtype} {tuple(plain.shape)}"
    )
    found = closeness(operation, actual, plain, exact, magnitude)
    error, allowed, bad = found.error, found.allowed, found.bad
    if not bad.any():
        return
    first = int(bad.flatten().nonzero()[0])
    worst = int(torch.where(bad, error - allowed, -torch.inf).argmax())
    lines = [
        f"{operation}: {int(bad.sum())} of {bad.numel()} elements are beyond the tolerance {TOLERANCES[operation]}"
    ]
    for name, flat in (("first", first), ("worst", worst)):
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), bad.shape)]
        place = ", ".join(f"{axis}={i}" for axis, i in zip(axes, index, strict=True))
        values = (x.flatten()[flat].item() for x in (actual, exact, plain, error, allowed))
        lines.append(
            "{} at [{}]: got {!r}, exact {!r}, plain {!r}; error {:.3g}, allowed {:.3g}".format(name, place, *values)
        )
    raise AssertionError("\n".join(lines))


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _error(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    error = (x.double() - exact).abs().nan_to_num(torch.inf, torch.inf)
    return torch.where(_same(x.double(), exact), 0.0, error)
