"""Checkpoints: tensors of safetensors files read by slices, and the shard of a table that is filled from them.

A safetensors file is 8 bytes of header length (little endian), that much JSON (name -> dtype, shape, data_offsets), and
the data. Rows are read straight to where they will stay: nothing but the shard's own bytes is read, mapped or copied.
Source: the format description in the safetensors repository, github.com/huggingface/safetensors.
"""

import json
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from reference.checks import check_tensor
from reference.quantization import BLOCK
from reference.shard_plan import ShardPlan, check_count

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
WEIGHT_DTYPES = [torch.float8_e4m3fn]
SCALE_DTYPES = [torch.uint8, torch.float8_e8m0fnu]
_CHUNK = 32 << 20  # bytes on their way to a device


@dataclass(frozen=True)
class Entry:
    """Say where a tensor of a checkpoint lies: file, dtype (None: not one of DTYPES), shape, first byte and bytes."""

    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """List the tensors of a checkpoint and read rows of them.

    Args:
        path: a safetensors file; or a directory, of which `model.safetensors.index.json` names the files, and where
            there is none, every `*.safetensors` in it counts.

    Attributes:
        entries: name -> Entry.

    Raises:
        FileNotFoundError: no such file, or a directory without any.
        ValueError: a file that is no safetensors, is cut short, or a name that stands in two files.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        index = path / "model.safetensors.index.json"
        if index.is_file():
            named: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = [path / name for name in sorted(set(named.values()))]
        else:
            files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"{path}: got no safetensors file, expected at least one")
        self.entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self.entries:
                    raise ValueError(f"{name}: got it in {self.entries[name].path} and {file}, expected it once")
                self.entries[name] = entry

    def read(self, name: str, out: torch.Tensor, first_row: int = 0) -> None:
        """Read rows [first_row, first_row + len(out)) of a tensor into `out`.

        Args:
            name: the tensor.
            out: [n, ...] contiguous, the dtype and the row shape of the tensor, on any device.
            first_row: first_row + n <= rows of the tensor.

        Raises:
            KeyError: no such tensor.
            TypeError, ValueError: `out` does not fit, or the file ends early.
        """
        entry = self.entries[name]
        check_count("first_row", first_row, 0, entry.shape[0] - out.shape[0])
        if entry.dtype is None:
            raise TypeError(f"{name}: got a dtype that is not read, expected one of {', '.join(DTYPES)}")
        check_tensor("out", out, [out.shape[0], *entry.shape[1:]], [entry.dtype])
        flat = out.view(-1).view(torch.uint8)  # refuses strides
        row_bytes = entry.nbytes // max(entry.shape[0], 1)
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.offset + first_row * row_bytes)
            for part in flat.split(_CHUNK):
                host = part if part.device.type == "cpu" else torch.empty(part.numel(), dtype=torch.uint8)
                rest = memoryview(host.numpy().data)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise ValueError(f"{name}: {entry.path} ends {len(rest)} bytes early")
                    rest = rest[count:]
                if host is not part:
                    part.copy_(host)


def _read_header(path: Path) -> dict[str, Entry]:
    """Read where a safetensors file has its tensors, and refuse a file that is not whole."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: got {size} bytes, expected a safetensors file with a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: got a header that is no JSON, expected a safetensors file") from error
    entries = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        dtype, shape = DTYPES.get(tensor["dtype"]), tuple(tensor["shape"])
        if 8 + length + end > size:
            raise ValueError(f"{path}: got {size} bytes, expected {8 + length + end} for {name}")
        if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: got {end - begin} bytes in {path}, expected shape {list(shape)} of {dtype}")
        entries[name] = Entry(path, dtype, shape, 8 + length + begin, end - begin)
    return entries


class TableShard:
    """Hold a rank's shard of a layer's table: nothing until both parts are loaded, and then just the plan's rows.

    Weight and scales come in either order from tensors (`load_weight`, `load_scales`), or both from files
    (`load_checkpoint`).

    Args:
        plan: what the rank holds.
        dim: width of a row, a multiple of 32.
        device: where ids and looked-up rows are.
        placement: "device", or "pinned": host memory that a CUDA device reads; changes no bit.

    Raises:
        TypeError, ValueError: dim or placement that is not as said, or pinned memory for another device than CUDA's.
    """

    _lookup: ClassVar[Callable[..., torch.Tensor]]

    def __init__(
        self,
        plan: ShardPlan,
        dim: int,
        *,
        device: torch.device | str = "cpu",
        placement: Literal["device", "pinned"] = "device",
    ) -> None:
        check_count("dim", dim, BLOCK)
        if dim % BLOCK:
            raise ValueError(f"dim: got {dim}, expected a multiple of {BLOCK}")
        if placement not in ("device", "pinned"):
            raise ValueError(f"placement: got {placement!r}, expected 'device' or 'pinned'")
        self.plan, self.dim, self.placement = plan, dim, placement
        self.device = torch.empty(0, device=device).device  # "cuda" means one of them
        if placement == "pinned" and self.device.type != "cuda":
            raise ValueError(f"placement: got 'pinned' for {self.device}, expected it for a CUDA device only")
        self._parts: dict[str, torch.Tensor] = {}

    @property
    def weight(self) -> torch.Tensor:
        """Give the loaded weight, [local rows, dim] float8_e4m3fn; RuntimeError before."""
        return self._part("weight")

    @property
    def scales(self) -> torch.Tensor:
        """Give the loaded scales, [local rows, dim/32] uint8 or float8_e8m0fnu; RuntimeError before."""
        return self._part("scales")

    def load_weight(self, weight: torch.Tensor) -> None:
        """Take the shard's rows of the layer's weight: shared where it is the whole tensor in place, copied otherwise.

        Args:
            weight: [rows, dim] float8_e4m3fn, of the whole layer; rows past the plan's are surplus and never taken.

        Raises:
            TypeError, ValueError: another dtype or width, or too few rows. RuntimeError: loaded already.
        """
        self._take("weight", weight, self.dim, WEIGHT_DTYPES)

    def load_scales(self, scales: torch.Tensor) -> None:
        """Take the shard's rows of the layer's scales, as `load_weight` does.

        Args:
            scales: [rows, dim/32] uint8 or float8_e8m0fnu, of the whole layer.

        Raises:
            TypeError, ValueError: another dtype or width, or too few rows. RuntimeError: loaded already.
        """
        self._take("scales", scales, self.dim // BLOCK, SCALE_DTYPES)

    def load_checkpoint(self, checkpoint: Checkpoint | str | Path, prefix: str) -> None:
        """Read the shard's rows, and no other byte, of `{prefix}.weight` and its scales.

        Args:
            checkpoint: what holds them, in whatever files.
            prefix: such as "layers.1.engram.embed"; the scales are `{prefix}.weight_scale_inv` or `{prefix}.scale`.

        Raises:
            KeyError: the weight or its scales are missing. ValueError: both names of the scales, too few rows, another
            width. TypeError: another dtype. RuntimeError: loaded already.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        weight, names = f"{prefix}.weight", [f"{prefix}.weight_scale_inv", f"{prefix}.scale"]
        scales = [name for name in names if name in checkpoint.entries]
        if weight not in checkpoint.entries or not scales:
            raise KeyError(f"{weight} and {' or '.join(names)}: got {scales or 'no scales'}, expected both parts")
        if len(scales) > 1:
            raise ValueError(f"{prefix}: got scales under both {' and '.join(scales)}, expected one of them")
        parts = [("weight", weight, self.dim, WEIGHT_DTYPES), ("scales", scales[0], self.dim // BLOCK, SCALE_DTYPES)]
        for part, name, width, dtypes in parts:  # nothing is read before everything fits
            entry = checkpoint.entries[name]
            if entry.dtype not in dtypes:
                raise TypeError(f"{name}: got dtype {entry.dtype}, expected {' or '.join(map(str, dtypes))}")
            self._check_part(part, name, entry.shape, width)
        loaded = {}
        for part, name, width, _ in parts:
            dtype = checkpoint.entries[name].dtype
            assert dtype is not None
            rows = self._empty(width, dtype)
            checkpoint.read(name, rows, self.plan.first_row)
            loaded[part] = rows
        self._parts.update(loaded)  # both or none

    def lookup(self, ids: torch.Tensor, *, out: torch.Tensor | None = None, background: bool = False) -> torch.Tensor:
        """Look the rank's part up: see `lookup` of this module for the formula.

        Args:
            ids: [T, C] int32 or int64, rows of the whole layer.
            out: [T, local_heads, dim] bfloat16 to be filled; None makes one.
            background: leave at least half of the device to others.

        Returns:
            [T, local_heads, dim] bfloat16; `gather` puts the ranks' parts together.

        Raises:
            TypeError, ValueError: an argument that does not fit. RuntimeError: weight or scales not loaded.
        """
        plan = self.plan
        check_tensor("ids", ids, ["T", plan.columns], [torch.int32, torch.int64], self.device)
        return type(self)._lookup(
            self.weight,
            self.scales,
            ids,
            out=out,
            first_row=plan.first_row,
            head_start=plan.head_start,
            local_heads=plan.local_heads,
            background=background,
        )

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the parts [T, local_heads, dim] of all ranks together to [T, C, dim]: see `ShardPlan.combine`."""
        return self.plan.combine(parts)

    def _part(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            raise RuntimeError(f"{name}: not loaded, expected weight and scales to be loaded before they are read")
        return self._parts[name]

    def _check_part(self, part: str, name: str, shape: Sequence[int], width: int) -> None:
        if part in self._parts:
            raise RuntimeError(f"{name}: got it a second time, expected {part} to be loaded once")
        if len(shape) != 2 or shape[1] != width or shape[0] < self.plan.rows:
            raise ValueError(f"{name}: got shape {list(shape)}, expected at least {self.plan.rows} rows of {width}")

    def _take(self, part: str, tensor: torch.Tensor, width: int, dtypes: Sequence[torch.dtype]) -> None:
        check_tensor(part, tensor, ["rows", width], dtypes)
        self._check_part(part, part, tensor.shape, width)
        rows = tensor[self.plan.first_row : self.plan.end_row]
        placed = rows.is_pinned() if self.placement == "pinned" else rows.device == self.device
        if not placed or rows.shape != tensor.shape or not rows.is_contiguous():
            rows = self._empty(width, tensor.dtype).copy_(rows)
        self._parts[part] = rows

    def _empty(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.plan.local_rows, width)
        if self.placement == "device":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return pinned_bytes(self.plan.local_rows * width, self.device).view(dtype).view(shape)


class _Registered(mmap.mmap):
    """Host memory that CUDA unregisters when the last tensor over it is gone."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate page-locked bytes; torch's own pool would round a table up to the next power of two."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = _Registered(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    rows = torch.frombuffer(memory, dtype=torch.uint8)
    portable = 1  # every device may read it
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), nbytes, portable))
    memory.address = rows.data_ptr()
    return rows
