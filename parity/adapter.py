"""What a port may declare to be other than here, and the thin layer that translates: `ENGRAM_PORT` beside its names."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from reference.prime_layout import PrimeLayout

_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
_PER_TOKEN = ("input_ids", "positions", "slot_mapping")  # what stands past the live tokens belongs to nobody


@dataclass(frozen=True)
class PortLayout:
    """Declare how a port's tensors differ from the reference's; the defaults differ in nothing.

    Attributes:
        ids: `int32` or `int64`, which every integer tensor is given as; None: as the engine has it, either one.
        rows: axes of the rows that it gives, `TLC` or `LTC` (layer-major).
        local_ids: whether its rows are numbers within their bucket, to which the column's offset has to be added.
        contiguous: whether it takes contiguous tensors only.
        device: where it takes its step tensors, such as `cpu`; None: on the device of the run.
    """

    ids: str | None = None
    rows: str = "TLC"
    local_ids: bool = False
    contiguous: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("ids", self.ids, (None, "int32", "int64")),
            ("rows", self.rows, ("TLC", "LTC")),
            ("local_ids", self.local_ids, (False, True)),
            ("contiguous", self.contiguous, (False, True)),
        ):
            if value not in allowed:
                raise ValueError(f"ENGRAM_PORT: got {name} {value!r}, expected one of {allowed}")

    @classmethod
    def of(cls, root: Any) -> PortLayout:
        """Give what a port declares in `ENGRAM_PORT`: a PortLayout or a dict of its fields, or nothing.

        Raises:
            ValueError: a field that there is not, or a value that it cannot have.
        """
        declared = getattr(root, "ENGRAM_PORT", None)
        if declared is None or isinstance(declared, cls):
            return declared or cls()
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(declared, Mapping) or not declared.keys() <= set(known):
            raise ValueError(f"ENGRAM_PORT: got {declared!r}, expected a PortLayout or a dict with some of {known}")
        return cls(**declared)

    def adapt(self, path: str, offered: Any) -> Any:
        """Give what is offered under a path as the judge calls it; unchanged where nothing is declared for it."""
        if self == PortLayout():
            return offered
        if path == "hash_state.HashState":
            return partial(AdaptedState, self, offered)
        if path == "embedding.lookup":
            return _lookup(self, offered)
        return offered

    def give(self, name: str, tensor: torch.Tensor, live: int | None = None) -> torch.Tensor:
        """Give one argument as the port takes it; only its first `live` entries have to fit its integers.

        Raises:
            ValueError: a live value that the port's integers do not hold.
        """
        if self.device is not None:
            tensor = tensor.to(self.device)
        if self.ids is not None and tensor.dtype in _INTEGERS.values():
            wanted = _INTEGERS[self.ids]
            if wanted != tensor.dtype and self.ids == "int32":
                _require_int32(name, tensor[:live])
            tensor = tensor.to(wanted)
        return tensor.contiguous() if self.contiguous else tensor


class AdaptedState:
    """Stand between the judge and a port's hash state.

    Args:
        layout: what the port declares.
        make: the port's `HashState`.
        config, token_map, options, device: what it is made with.
    """

    def __init__(
        self, layout: PortLayout, make: Callable[..., Any], config: Any, token_map: Any, *, device: Any, **options: Any
    ) -> None:
        self._layout, self._device = layout, torch.device(device)
        self._state = make(config, token_map, device=torch.device(layout.device or device), **options)
        self._offsets = torch.from_numpy(PrimeLayout(config).offsets).to(self._device)  # [L, C]
        self._bound: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        """Bind the same tensor again as the same, also where the port sees a copy on another device."""
        if self._layout.device is None or kv_cache.device == torch.device(self._layout.device):
            return self._state.ensure_cache(kv_cache)
        if self._bound is None or self._bound[0]() is not kv_cache:
            self._bound = weakref.ref(kv_cache), kv_cache.to(self._layout.device)
        return self._state.ensure_cache(self._bound[1])

    def forward(self, query_start_loc: torch.Tensor, **step: torch.Tensor | None) -> torch.Tensor:
        """Hash a step: `[T, L, C]` int32 on the device of the run."""
        live = int(query_start_loc[-1]) if self._layout.ids == "int32" else None
        given = {
            name: None if tensor is None else self._layout.give(name, tensor, live if name in _PER_TOKEN else None)
            for name, tensor in step.items()
        }
        starts = self._layout.give("query_start_loc", query_start_loc)
        tokens = step["input_ids"]
        assert tokens is not None
        return self._rows(self._state.forward(query_start_loc=starts, **given), len(tokens))

    @property
    def dummy_hashes(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Give dead rows `[T, L, C]` and keep `[T]` for ids; missing where the port lacks it."""
        ask = self._state.dummy_hashes

        def dummy_hashes(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows, keep = ask(self._layout.give("input_ids", input_ids, 0))
            return self._rows(rows, len(input_ids)), keep.to(self._device)

        return dummy_hashes

    def _rows(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        layers, columns = self._offsets.shape
        sizes = {"T": tokens, "L": layers, "C": columns}
        expected = [sizes[axis] for axis in self._layout.rows]
        if list(rows.shape) != expected or rows.dtype not in _INTEGERS.values():
            raise ValueError(
                f"forward: got {rows.dtype} of {list(rows.shape)}, expected int32 or int64 of {expected} "
                f"({', '.join(self._layout.rows)})"
            )
        rows = rows.to(self._device).long()
        if self._layout.rows == "LTC":
            rows = rows.transpose(0, 1)
        if self._layout.local_ids:
            rows = torch.where(rows < 0, rows, rows + self._offsets)
        # No table has a row that int32 does not hold: it stays wrong as -1, which no live row is.
        return torch.where((rows < -1) | (rows >= 2**31), -1, rows).int()


def _lookup(layout: PortLayout, offered: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # A table stays where it is: it may be larger than what is beside it.
    on_the_spot = dataclasses.replace(layout, device=None)

    @wraps(offered)
    def lookup(weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return offered(weight, scales, on_the_spot.give("ids", ids), **options)

    return lookup


def _require_int32(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() and not -(2**31) <= int(tensor.min()) <= int(tensor.max()) < 2**31:
        raise ValueError(
            f"{name}: got {int(tensor.min())} .. {int(tensor.max())}, expected values of int32, which the port asks for"
        )
