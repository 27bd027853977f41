"""A layer's table that can be made anywhere: every byte follows from its row's number."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from parity.world import World
from reference.prime_layout import PrimeLayout

GROUP = 32  # elements under one scale
PAIRS = 1 << 16  # of a scale byte and a code
_CHUNK = 1 << 20  # rows that are filled at a time
_RESERVED = 24 << 30  # bytes of a card that the steps and the weights beside the table may take
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on; Linux's number


class Table:
    """Hold a table: on a CUDA device whole, on the CPU in memory that exists only where rows were asked for.

    Args:
        rows: of the table.
        dim: width of a row.
        device: where it lies.
        finite: whether values stay below 2 and scales within 2^-3 and 1, as a layer needs them; else every byte is
            equally likely, codes and scales of NaN among them.

    Attributes:
        weight: [rows, dim] float8_e4m3fn.
        scales: [rows, dim/32] uint8.

    Raises:
        OSError: the host refuses so large a map.
    """

    def __init__(self, rows: int, dim: int, device: torch.device, *, finite: bool) -> None:
        self.rows, self.dim, self.device, self.finite = rows, dim, device, finite
        self.codes, self.scales = _bytes(rows, dim, device), _bytes(rows, dim // GROUP, device)
        self.weight = self.codes.view(torch.float8_e4m3fn)
        self._definition = torch.from_numpy(pair_bits()).to(device).flatten()
        if device.type == "cuda":
            for start in range(0, rows, _CHUNK):
                numbers = torch.arange(start, min(start + _CHUNK, rows), device=device)
                self.codes[start : start + len(numbers)], self.scales[start : start + len(numbers)] = self._row(numbers)

    def ask_for(self, ids: torch.Tensor) -> None:
        """Fill the rows of ids that are about to be looked up; ids of other tables are passed over."""
        if self.device.type != "cuda":
            numbers = ids[(ids >= 0) & (ids < self.rows)].unique().long()
            self.codes[numbers], self.scales[numbers] = self._row(numbers)

    def defined(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the bfloat16 bits [.., dim] int16 of rows by the definition, and the pairs that they are made of.

        A pair is 256 * scale byte + code.
        """
        pairs = self.scales[rows].int().repeat_interleave(GROUP, dim=-1) * 256 + self.codes[rows]
        return self._definition[pairs], pairs

    def describe(self, row: int, element: int) -> str:
        """Write the bytes of an element."""
        code, scale = int(self.codes[row, element]), int(self.scales[row, element // GROUP])
        return f"code 0x{code:02X}, scale byte 0x{scale:02X}"

    def _row(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.dim // 8 + -(-self.dim // GROUP // 8)
        words = mix(numbers[:, None] * width + torch.arange(width, device=self.device)).view(torch.uint8)
        codes, scales = words[:, : self.dim], words[:, self.dim : self.dim + self.dim // GROUP]
        return (codes & 0xBF, (scales & 3) + 124) if self.finite else (codes, scales)


def pair_table(dim: int, device: torch.device) -> Table:
    """Give a table in which each code stands under each scale byte, block after block; the last row may repeat some."""
    blocks = torch.arange(-(-(PAIRS // GROUP) * GROUP // dim) * dim // GROUP, device=device)  # of 32 codes
    codes = (blocks[:, None] % (256 // GROUP)) * GROUP + torch.arange(GROUP, device=device)
    table = Table(len(blocks) * GROUP // dim, dim, device, finite=False)
    table.codes.copy_(codes.view(-1, dim))
    table.scales.copy_((blocks // (256 // GROUP) % 256).view(-1, dim // GROUP))
    return table


def pair_bits() -> np.ndarray:
    """Give [256, 256] int16, the bfloat16 bits of e4m3(code) * 2^(byte - 127) for every byte and code.

    Python's integers and `ldexp` are exact, so is float32 for four significant bits down to 2^-136; what is left is one
    rounding of 32 bits to 16, to nearest even.
    """
    values = np.empty((256, 256), dtype=np.float32)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        whole, power = (8 + mantissa, exponent - 10) if exponent else (mantissa, -9)
        for byte in range(256):
            value = math.nan if code & 127 == 127 or byte == 255 else math.ldexp(whole, power + byte - 127)
            values[byte, code] = math.copysign(value if value < 2.0**128 else math.inf, -1 if code & 128 else 1)
            if math.isnan(value):
                values[byte, code] = math.nan
    wide = values.view(np.uint32)
    narrow = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, narrow).astype(np.uint16).view(np.int16)


def mix(numbers: torch.Tensor) -> torch.Tensor:
    """Scatter int64 numbers over all int64: multiply and fold, twice; the same on every device.

    Source: the finalizer of SplitMix64, with its odd constants (Steele, Lea and Flood, 2014).
    """
    mixed = numbers * -0x61C8864680B583EB
    mixed ^= (mixed >> 30) & 0x3FFFFFFFF
    mixed *= -0x40A7B892E31B1A47
    mixed ^= (mixed >> 27) & 0x1FFFFFFFFF
    mixed *= -0x6B2FB644ECCEEE15
    mixed ^= (mixed >> 31) & 0x1FFFFFFFF
    return mixed


def noise(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Draw float32 about normal, mean 0 and deviation 1, the same on every device: the sums of eight bytes."""
    count = torch.Size(shape).numel()
    out = torch.empty(count, device=device)
    for start in range(0, count, 1 << 24):
        part = out[start : start + (1 << 24)]
        numbers = torch.arange(start, start + len(part), device=device) + (seed + 1) % 2**22 * 2**40
        part.copy_(mix(numbers).view(torch.uint8).view(-1, 8).sum(dim=1) - 1020)
    return out.mul_(1 / 209).view(shape)  # a GPU divides by multiplying, which rounds elsewhere


def fitting(world: World, device: torch.device) -> tuple[World, str]:
    """Give the world whose tables the device can hold, and a line that says so where it is another than asked for."""
    rows, dim = int(world.layout.rows.max()), world.config.engram_head_dim
    if device.type != "cuda":
        return world, ""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    room = max(free - _RESERVED, free // 4) // (dim + dim // GROUP)
    if room >= rows:
        return world, ""
    smaller = reduced(world, int(room))
    have = int(smaller.layout.rows.max())
    return smaller, f"table: {have:,} rows for {rows:,}, as {device} has {free / 2**30:.1f} GiB free"


def reduced(world: World, rows: int, *, hidden_size: int | None = None, copies: int | None = None) -> World:
    """Give the world with fewer rows a table, about nine tenths of `rows` at most, and maybe a narrower stream."""
    config = world.config
    size = min(config.engram_vocab_size, max(rows * 9 // 10 // config.columns, 2))
    sparse = (2**31 - 1,) * len(config.engram_layer_ids)
    config = replace(
        config,
        engram_vocab_size=size,
        engram_num_embeddings=sparse,
        hidden_size=min(config.hidden_size, hidden_size or config.hidden_size),
        hc_mult=min(config.hc_mult, copies or config.hc_mult),
    )
    used = tuple(PrimeLayout(config).rows.tolist())
    return replace(world, config=replace(config, engram_num_embeddings=used))


def _bytes(rows: int, width: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.empty(rows, width, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a row is to cost a page of 4 KiB, not one of 2 MiB
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, width)
