"""Refusals that both sides share: what an argument must look like, said by name, got and expected."""

from collections.abc import Sequence

import torch


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Refuse an argument that is not a tensor of this shape, dtype and device.

    Args:
        name: the argument as the caller knows it.
        value: what was passed.
        shape: one entry an axis; an int is the size it must have, a string names an axis of any size.
        dtypes: the dtypes that are allowed.
        device: the device it must be on; None allows any.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: of another shape, or on another device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")
    fits = value.ndim == len(shape) and all(
        isinstance(want, str) or got == want for got, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected [{', '.join(map(str, shape))}]")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got device {value.device}, expected {device}")
