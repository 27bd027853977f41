"""Mistakes in the lookup: formats, scales and roundings."""

from __future__ import annotations

from typing import Any

import torch

from parity.faults.fault import plant
from reference.quantization import decode_e4m3, decode_ue8m0

_LOOKUP = "embedding.lookup"


def _look_up(
    weight: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    decode: Any = None,
    code: Any = None,
    cast: Any = None,
) -> torch.Tensor:
    """Look rows of the whole table up by the formula, with one part of it replaced.

    Args:
        weight, scales, ids: as a lookup has them; an id without a row gives zeros.
        decode: `[rows, dim/32]` scale bytes -> float32.
        code: `[rows, dim]` code bytes -> float32.
        cast: `[.., dim]` float32 -> bfloat16.
    """
    held = (ids >= 0) & (ids < len(weight))
    rows = torch.where(held, ids, 0).long()
    codes, bytes_ = weight.view(torch.uint8)[rows], scales.view(torch.uint8)[rows]
    factors = (decode or decode_ue8m0)(bytes_).repeat_interleave(32, -1)
    values = (code or decode_e4m3)(codes) * factors * held[..., None]
    return values.bfloat16() if cast is None else cast(values)


@plant("T1", "the scale byte is multiplied as a number, not as a power of two", offers=_LOOKUP)
def scale_byte_as_a_number(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The ue8m0 bytes are loaded as integers and converted to float.

    Source: vllm#51946. Law: lookup.
    """
    return _look_up(weight, scales, ids, decode=torch.Tensor.float)


@plant("T2", "scale byte 0 is read as 0.0", offers=_LOOKUP)
def byte_0_is_zero(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The byte is shifted into a float32's exponent, where 0 means zero and not 2^-127.

    Law: lookup.
    """
    return _look_up(weight, scales, ids, decode=lambda b: torch.where(b == 0, 0.0, decode_ue8m0(b)))


@plant("T2b", "scale byte 255 is read as infinity", offers=_LOOKUP)
def byte_255_is_infinity(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The byte is shifted into a float32's exponent, where 255 means infinity and not NaN.

    Law: lookup.
    """
    return _look_up(weight, scales, ids, decode=lambda b: torch.where(b == 255, torch.inf, decode_ue8m0(b)))


@plant("T3", "every block is scaled by the scale of the block after it", offers=_LOOKUP)
def next_blocks_scale(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The index of the scale counts from one.

    Law: lookup.
    """
    return _look_up(weight, scales, ids, decode=lambda b: decode_ue8m0(b.roll(-1, -1)))


@plant("T4", "the scales are read as if they were stored transposed", offers=_LOOKUP)
def scales_transposed(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """A converter for matrix kernels stores scales column by column, and the lookup reads rows.

    Law: lookup.
    """
    return _look_up(weight, scales.view(torch.uint8).t().reshape(scales.shape), ids)


@plant("T7", "a scale that was never loaded shadows the real one", offers=_LOOKUP)
def unloaded_scale_shadows(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The module registers a scale under a name that no checkpoint has; it keeps the ones that it was made with.

    Source: vllm#53896. Law: lookup.
    """
    return _look_up(weight, scales, ids, decode=lambda b: torch.ones(b.shape))


@plant("T14", "the product is rounded to float16 on its way to bfloat16", offers=_LOOKUP)
def rounded_twice(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """The kernel decodes to half precision: what is below 2^-24 or above 65504 is lost.

    Law: lookup.
    """
    return _look_up(weight, scales, ids, cast=lambda values: values.half().bfloat16())


@plant("T15", "e4m3 code 0x7F is read as 480, where it is NaN", offers=_LOOKUP)
def code_7f_is_480(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """A table of values is filled by formula to its end, and the format's only NaN becomes a number.

    Law: lookup.
    """

    def decode(codes: torch.Tensor) -> torch.Tensor:
        values = torch.where(codes & 127 == 127, torch.where(codes > 127, -480.0, 480.0), decode_e4m3(codes))
        return values

    return _look_up(weight, scales, ids, code=decode)


@plant("T8", "ids of other ranks give rows of this one, not zeros", offers=_LOOKUP)
def foreign_rows_are_read(
    weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, *, first_row: int = 0, **_: Any
) -> torch.Tensor:
    """Ids outside the rank's rows are clamped into it, and the sum over ranks then adds up rows that nobody asked for.

    Law: lookup.
    """
    return _look_up(weight, scales, (ids - first_row).clamp(0, len(weight) - 1))
