"""The number formats against exact fractions, ml_dtypes and torch, over every code there is."""

import functools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.quantization import (
    decode_e4m3,
    decode_ue8m0,
    dequantize,
    encode_e4m3,
    encode_ue8m0,
    quantize_rows,
)

CODES = torch.arange(256, dtype=torch.uint8)
NAN = 0x7FC0


def e4m3_fraction(code: int) -> Fraction | None:
    """Read sign, exponent and mantissa as the format's table says; None is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    whole = Fraction(mantissa, 8) + (1 if exponent else 0)
    return (-1) ** sign * whole * Fraction(2) ** (max(exponent, 1) - 7)


def bfloat16_bits(value: Fraction, negative: bool) -> int:
    """Round to 8 significant bits, nearest even, subnormals in steps of 2^-133, infinity past the largest."""
    size = abs(value)
    power = (
        size.numerator.bit_length() - size.denominator.bit_length()
    )  # floor(log2): the denominator is a power of two
    binade = max(power, -126) if size else -126
    step = Fraction(2) ** (binade - 7)
    steps = round(size / step)  # round() of a Fraction takes a tie to the even number
    bits = steps + ((binade + 126) << 7)  # the leading one of a normal number counts its exponent up by one
    return min(bits, 0x7F80) | negative << 15


@functools.cache
def exact_bits() -> np.ndarray:
    """Give [scale byte, code] -> bits of the bfloat16 that the definition gives, uint16; every NaN is 0x7FC0."""
    table = np.full((256, 256), NAN, dtype=np.uint16)
    values = [e4m3_fraction(code) for code in range(256)]
    for byte in range(255):
        scale = Fraction(2) ** (byte - 127)
        for code, value in enumerate(values):
            if value is not None:
                table[byte, code] = bfloat16_bits(value * scale, code >= 128)
    return table


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Give a table that holds every code under every scale: weight [256, 256], scales [256, 8]; row = byte."""
    return CODES.repeat(256, 1), CODES[:, None].repeat(1, 8)


def test_dequantize_is_exact() -> None:
    """All 65,536 pairs of code and scale give the bits that exact fractions give."""
    got = dequantize(*all_pairs()).view(torch.uint16).numpy()
    np.testing.assert_array_equal(got, exact_bits())


def test_dequantize_agrees_with_ml_dtypes() -> None:
    """All 65,536 pairs agree with ml_dtypes' own e4m3fn, e8m0fnu and bfloat16; NaN stands where it has NaN."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (scales[:, None] * values).astype(ml_dtypes.bfloat16)
    got = dequantize(*all_pairs()).view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want.astype(np.float32)))
    numbers = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], want.view(np.uint16)[numbers])


def test_e4m3_is_torchs() -> None:
    """Every code decodes to what torch's dtype holds, signs of zero included; 0x7F and 0xFF are NaN."""
    got, want = decode_e4m3(CODES), CODES.view(torch.float8_e4m3fn).float()
    assert got.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))
    assert torch.equal(decode_e4m3(CODES.view(torch.float8_e4m3fn)).nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (128, 2.0), (254, 2.0**127), (255, math.nan)]
)
def test_ue8m0_is_a_power_of_two(byte: int, value: float) -> None:
    """A scale byte is 2^(byte - 127); 0 is 2^-127, not 0.0, and 255 is NaN (OCP Microscaling Formats v1.0, 5.4.1)."""
    got = decode_ue8m0(torch.tensor([byte], dtype=torch.uint8)).item()
    assert got == value or (math.isnan(value) and math.isnan(got))


def test_ue8m0_round_trips() -> None:
    """Every scale byte decodes and encodes back to itself, whichever of its two dtypes it comes in."""
    assert torch.equal(encode_ue8m0(decode_ue8m0(CODES)), CODES)
    assert torch.equal(encode_ue8m0(decode_ue8m0(CODES.view(torch.float8_e8m0fnu))), CODES)


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, 2.0**-128, math.inf, -math.inf, 1 + 2.0**-23])
def test_only_scales_of_the_format_encode(scale: float) -> None:
    """A scale that is no power of two in the format's range is refused by value."""
    with pytest.raises(ValueError, match=r"scales: got .*expected powers of two"):
        encode_ue8m0(torch.tensor([1.0, scale]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_encode_e4m3_agrees_with_ml_dtypes(dtype: torch.dtype) -> None:
    """All 65,536 half-precision values encode to ml_dtypes' code: ties to even, past 464 NaN, signs kept."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        want = values.double().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(encode_e4m3(values).view(torch.uint8).numpy(), want)


@given(st.floats(-500, 500, width=32))
def test_encode_e4m3_takes_the_nearest(value: float) -> None:
    """No code is nearer than the one that is given, and of two that are as near it is the even one."""
    code = int(encode_e4m3(torch.tensor(value)).view(torch.uint8)) & 0x7F
    grid = [e4m3_fraction(c) or Fraction(0) for c in range(127)] + [Fraction(480)]  # 480 is where NaN stands
    distance = [abs(g - abs(Fraction(value))) for g in grid]
    nearest = [c for c in range(128) if distance[c] == min(distance)]
    assert code == (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(-60, 60))
def test_quantize_rows_takes_the_smallest_scale(seed: int, dtype: torch.dtype, power: int) -> None:
    """A block's scale is the smallest that holds its largest value, and each value takes the nearest code under it."""
    rng = np.random.default_rng(seed)
    power = power if dtype is not torch.float16 else power % 8
    drawn = rng.standard_normal((3, 96)) * 2.0**power * (rng.random((3, 96)) < 0.8)
    drawn[1, 32:64] = 0
    rows = torch.from_numpy(drawn).to(dtype)
    weight, scales = quantize_rows(rows)
    assert weight.shape == (3, 96)
    assert scales.shape == (3, 3)
    blocks = rows.double().numpy().reshape(9, 32)
    codes = weight.view(torch.uint8).numpy().reshape(9, 32)
    grid = np.array([float(e4m3_fraction(code) or 0) for code in range(127)])
    for block, code, byte in zip(blocks, codes, scales.flatten().tolist(), strict=True):
        scaled, top = np.abs(block) * 2.0 ** (127 - byte), np.abs(block).max()  # exact
        assert byte == 127 if top == 0 else (224 < scaled.max() <= 448)
        assert ((code < 128) == ~np.signbit(block)).all()
        errors = np.abs(scaled[:, None] - grid)  # [32, 127]
        assert (errors[np.arange(32), code & 0x7F] == errors.min(axis=1)).all()


def test_dequantize_undoes_quantize_of_table_values() -> None:
    """Values that the table can hold come back as they were."""
    weight = torch.arange(126, 126 - 32, -1, dtype=torch.uint8).repeat(5, 1)
    weight[:, 1::2] |= 0x80
    scales = torch.tensor([[20], [100], [127], [180], [240]], dtype=torch.uint8)
    rows = dequantize(weight, scales)
    again = quantize_rows(rows)
    assert torch.equal(again[0].view(torch.uint8), weight)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: decode_e4m3(torch.zeros(2)), TypeError, "codes: got dtype torch.float32"),
        (lambda: decode_ue8m0(torch.zeros(2)), TypeError, "scales: got dtype torch.float32"),
        (lambda: encode_e4m3(CODES), TypeError, "values: got dtype torch.uint8"),
        (lambda: encode_ue8m0(CODES), TypeError, "scales: got dtype torch.uint8"),
        (lambda: dequantize(CODES, CODES[:7]), ValueError, r"scales: got shape \(7,\), expected \[8\]"),
        (lambda: dequantize(CODES[:40], CODES[:1]), ValueError, "weight: got .* multiple of 32"),
        (
            lambda: quantize_rows(torch.zeros(2, 33)),
            ValueError,
            r"rows: got shape \(2, 33\), expected .* multiple of 32",
        ),
        (lambda: quantize_rows(torch.full((1, 32), math.inf)), ValueError, "expected finite"),
        (lambda: quantize_rows(torch.zeros(32)), ValueError, "rows: got shape"),
    ],
)
def test_refusals_name_the_argument(call, error, message) -> None:
    """What does not fit is refused by name, with what came and what was expected."""
    with pytest.raises(error, match=message):
        call()
