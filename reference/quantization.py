"""The table's number formats: e4m3fn values with one ue8m0 scale for every 32 of them.

A table is `[rows, dim]` float8_e4m3fn beside `[rows, dim/32]` scale bytes, and an element is worth

    value = e4m3(code) * 2^(byte - 127)                                                        (dequantize)

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 5.4. Its rules at the edges are kept:
scale byte 0 is 2^-127, byte 255 is NaN; e4m3 codes 0x7F and 0xFF are NaN, and there is no infinity.
"""

import math

import torch

from reference.checks import check_tensor

BLOCK = 32
E4M3_MAX = 448.0
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _e4m3_magnitude(code: int) -> float:
    """Give the value of an e4m3 code without its sign; 127 counts on to 480, where the format has NaN."""
    exponent, mantissa = divmod(code, 8)
    if exponent == 0:
        return mantissa * 2.0**-9
    return (8 + mantissa) * 2.0 ** (exponent - 10)


_MAGNITUDES = torch.tensor([_e4m3_magnitude(code) for code in range(128)], dtype=torch.float64)
_POSITIVE = torch.cat([_MAGNITUDES[:127], torch.tensor([math.nan], dtype=torch.float64)])
_E4M3 = torch.cat([_POSITIVE, -_POSITIVE]).float()
_UE8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float32)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Decode e4m3fn: (-1)^s * (8 + m) * 2^(e - 10), or (-1)^s * m * 2^-9 where e = 0.

    Args:
        codes: float8_e4m3fn, or its bytes as uint8, any shape.

    Returns:
        float32 of that shape; NaN for 0x7F and 0xFF.

    Raises:
        TypeError: another dtype.
    """
    check_tensor("codes", codes, ["..."] * codes.ndim, [torch.float8_e4m3fn, torch.uint8])
    return _E4M3.to(codes.device)[codes.view(torch.uint8).int()]


def decode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Decode ue8m0: 2^(byte - 127).

    Args:
        scales: float8_e8m0fnu, or its bytes as uint8, any shape.

    Returns:
        float32 of that shape; 2^-127 for byte 0 (a float32 subnormal), NaN for 255.

    Raises:
        TypeError: another dtype.
    """
    check_tensor("scales", scales, ["..."] * scales.ndim, [torch.float8_e8m0fnu, torch.uint8])
    return _UE8M0.to(scales.device)[scales.view(torch.uint8).int()]


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3fn value, a tie to the even code; what rounds past 448 becomes NaN.

    Args:
        values: float32, bfloat16 or float16, any shape.

    Returns:
        float8_e4m3fn of that shape; the sign of zero and NaN is kept.

    Raises:
        TypeError: another dtype.
    """
    check_tensor("values", values, ["..."] * values.ndim, _FLOATS)
    magnitudes = _MAGNITUDES.to(values.device)
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2  # [127], tie i lies between code i and code i + 1
    exact = values.double().abs().contiguous()
    below, above = torch.searchsorted(ties, exact), torch.searchsorted(ties, exact, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 128 * torch.signbit(values)).to(torch.uint8).view(torch.float8_e4m3fn)


def encode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Encode exact powers of two: byte = log2(scale) + 127.

    Args:
        scales: float32, each a power of two from 2^-127 to 2^127, or NaN (byte 255); any shape.

    Returns:
        uint8 of that shape.

    Raises:
        TypeError: another dtype.
        ValueError: a scale that the format does not have.
    """
    check_tensor("scales", scales, ["..."] * scales.ndim, [torch.float32])
    mantissa, exponent = torch.frexp(scales.double())  # a power of two is 0.5 * 2^exponent
    encodable = scales.isnan() | ((mantissa == 0.5) & (exponent >= -126))
    if not encodable.all():
        got = scales[~encodable].flatten()[0].item()
        raise ValueError(f"scales: got {got!r}, expected powers of two from 2^-127 to 2^127, or NaN")
    return torch.where(scales.isnan(), 255, exponent + 126).to(torch.uint8)


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Give value = e4m3(code) * 2^(byte - 127), rounded once to bfloat16, nearest even.

    The product has four significant bits and none below 2^-136, so float32 holds it exactly and the cast alone rounds.

    Args:
        weight: [.., dim] float8_e4m3fn or uint8.
        scales: [.., dim/32] float8_e8m0fnu or uint8.

    Returns:
        [.., dim] bfloat16; every NaN has the bits 0x7FC0.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not belong together.
    """
    values, factors = decode_e4m3(weight), decode_ue8m0(scales)
    _check_dim("weight", weight)
    check_tensor("scales", scales, [*weight.shape[:-1], weight.shape[-1] // BLOCK], [scales.dtype])
    blocks = values.unflatten(-1, (-1, BLOCK)) * factors.unsqueeze(-1)  # [.., dim/32, 32]
    rows = blocks.flatten(-2).to(torch.bfloat16)
    return rows.masked_fill_(rows.isnan(), math.nan)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows: per 32 values the smallest scale 2^k with max |value| <= 448 * 2^k, then the nearest code.

    A block of zeros has scale 1; k stops at -127.

    Args:
        rows: [rows, dim] float32, bfloat16 or float16, finite; dim a multiple of 32.

    Returns:
        weight [rows, dim] float8_e4m3fn and scales [rows, dim/32] uint8.

    Raises:
        TypeError: another dtype.
        ValueError: not two axes, dim no multiple of 32, or a value that is not finite.
    """
    check_tensor("rows", rows, ["rows", "dim"], _FLOATS)
    _check_dim("rows", rows)
    if not rows.isfinite().all():
        raise ValueError("rows: got NaN or infinity, expected finite values")
    blocks = rows.double().unflatten(1, (-1, BLOCK))  # [rows, dim/32, 32]
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=2))
    power = exponent - 9 + (mantissa > 0.875).int()  # 448 = 0.875 * 2^9
    power = torch.where(mantissa == 0, 0, power.clamp(min=-127))
    weight = encode_e4m3((blocks * torch.exp2(-power.double()).unsqueeze(2)).flatten(1).float())
    return weight, (power + 127).to(torch.uint8)


def _check_dim(name: str, rows: torch.Tensor) -> None:
    if rows.ndim == 0 or rows.shape[-1] % BLOCK:
        raise ValueError(f"{name}: got shape {tuple(rows.shape)}, expected a last axis that is a multiple of {BLOCK}")
