"""What a checkpoint holds of an Engram layer beside its table: names, shapes, dtypes, and 32 x 32 scale blocks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from reference.checkpoint import SCALE_DTYPES
from reference.quantization import BLOCK, dequantize

_CHUNK = 1024  # rows that are dequantized at a time


class Described(Protocol):
    """Anything that tells a tensor's dtype and shape, with or without its data."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Give the dtype; None where it is none that is read."""

    @property
    def shape(self) -> Sequence[int]:
        """Give the size of each axis."""


def find_scales(found: Mapping[str, Described], prefix: str) -> str | None:
    """Give the name of the scales of `{prefix}.weight`, `weight_scale_inv` or `scale`; None where there are none.

    Raises:
        ValueError: both are there.
    """
    names = [name for name in (f"{prefix}.weight_scale_inv", f"{prefix}.scale") if name in found]
    if len(names) > 1:
        raise ValueError(f"{prefix}: got scales under both {' and '.join(names)}, expected one of them")
    return names[0] if names else None


def check_weights(found: Mapping[str, Described], prefix: str, wkv: torch.Tensor, q_weight: torch.Tensor) -> str | None:
    """Refuse `{prefix}.wkv.weight`, `.q_weight` and `.k_weight` that do not fit, before anything is read.

    Args:
        found: what there is.
        prefix: such as "layers.1.engram".
        wkv: [(hc+1)*M, C*dim] what will be filled; it may be given in its dtype or in float8_e4m3fn.
        q_weight: [hc, M], as k is too.

    Returns:
        the name of wkv's scales, None where it has and needs none.

    Raises:
        KeyError: a tensor is missing. TypeError: another dtype, or scales without float8_e4m3fn. ValueError: another
        shape, or scales under two names.
    """
    rows, columns = wkv.shape
    weight, scale = f"{prefix}.wkv.weight", find_scales(found, f"{prefix}.wkv")
    wanted = [(weight, [rows, columns], [wkv.dtype, torch.float8_e4m3fn])]
    wanted += [(f"{prefix}.{name}", list(q_weight.shape), [q_weight.dtype]) for name in ("q_weight", "k_weight")]
    if scale is not None:
        wanted.append((scale, [-(-rows // BLOCK), columns // BLOCK], SCALE_DTYPES))
    for name, shape, dtypes in wanted:
        if name not in found:
            raise KeyError(f"{name}: got no such tensor, expected one of shape {shape}")
        if found[name].dtype not in dtypes:
            raise TypeError(f"{name}: got dtype {found[name].dtype}, expected {' or '.join(map(str, dtypes))}")
        if list(found[name].shape) != shape:
            raise ValueError(f"{name}: got shape {list(found[name].shape)}, expected {shape}")
    quantized = found[weight].dtype == torch.float8_e4m3fn
    if quantized and scale is None:
        raise KeyError(f"{weight}: got float8_e4m3fn without scales, expected weight_scale_inv or scale beside it")
    if scale is not None and not quantized:
        raise TypeError(f"{weight}: got dtype {found[weight].dtype} beside {scale}, expected torch.float8_e4m3fn")
    return scale


@torch.no_grad()
def fill_wkv(wkv: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Fill wkv, dequantized where there are scales.

        wkv[o, i] = e4m3(weight[o, i]) * 2^(scales[o // 32, i // 32] - 127),   rounded once to bfloat16

    Args:
        wkv: [O, I] bfloat16 or float32, to be filled.
        weight: [O, I] its dtype, or float8_e4m3fn.
        scales: [ceil(O/32), I/32] uint8 or float8_e8m0fnu; None for a weight that is no float8_e4m3fn.
    """
    if scales is None:
        wkv.copy_(weight)
        return
    codes, factors = weight.view(torch.uint8), scales.view(torch.uint8)
    for start in range(0, len(codes), _CHUNK):
        part = codes[start : start + _CHUNK]
        rows = factors[start // BLOCK :][: -(-len(part) // BLOCK)].repeat_interleave(BLOCK, dim=0)[: len(part)]
        wkv[start : start + _CHUNK] = dequantize(part, rows)
