"""The lookup part of the main job: rows of the real layout, by ids of real steps, in every way of asking for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from parity.compare import strided
from parity.corpus import Corpus
from parity.finding import Finding
from parity.live import live_steps
from parity.protocol import Implementation
from parity.runs import Size
from parity.table import Table, fitting, pair_table
from parity.truth import Truth
from parity.world import World


@dataclass(frozen=True)
class Way:
    """Say how rows are asked for.

    Attributes:
        ids: changes the step's ids [T, C] int32; the second argument is the number of rows of the table.
        options: of the call, from C.
        third: whether only the middle third of the table is handed over, as a rank's shard.
        fill: whether `out` is given, full of NaN.
    """

    name: str
    meaning: str
    ids: Callable[[torch.Tensor, int], torch.Tensor] = lambda ids, rows: ids
    options: Callable[[int], dict[str, Any]] = lambda columns: {}
    third: bool = False
    fill: bool = False


FOREIGN = torch.tensor([-1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)


def _with_foreign(ids: torch.Tensor, rows: int) -> torch.Tensor:
    foreign = torch.cat([FOREIGN, torch.tensor([rows], dtype=torch.int32)]).to(ids.device)
    place = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    return torch.where(place % 3 == 0, foreign[place % 5], ids)


WAYS = (
    Way("all columns", "int32 ids as the hash gives them"),
    Way("strided int64", "ids as a strided view of int64", lambda ids, rows: strided(ids.long())),
    Way("head window", "a rank's columns", options=lambda c: {"head_start": c // 3, "local_heads": max(c // 3, 1)}),
    Way("past the heads", "columns past C are zero rows", options=lambda c: {"head_start": c - 1, "local_heads": 3}),
    Way("foreign ids", "dead ids and ids past the table give zero rows", _with_foreign),
    Way("shard of rows", "a third of the table, the other ids are foreign", third=True),
    Way("background", "half of the device, into rows that were NaN", options=lambda c: {"background": True}, fill=True),
)  # fmt: skip
EVERY_PAIR = Way("code pairs", "each code under each scale byte, NaN where NaN")


@dataclass(frozen=True)
class Amount:
    """Say how much is looked up: tokens of steps, and the longest step."""

    tokens: int
    budget: int


AMOUNTS = {"cpu": Amount(192, 96), "cuda": Amount(65_536, 8192)}


def judge_lookup(
    world: World,
    corpus: Corpus,
    implementations: Sequence[Implementation],
    device: torch.device,
    *,
    size: Size,
    seed: int,
    progress: Callable[[int], None] = lambda rows: None,
    say: Callable[[str], None] = print,
) -> list[Finding]:
    """Compare every implementation's `embedding.lookup` with the definition, bit for bit and NaN where NaN.

    Args:
        world: the layout; on a card with too little memory a smaller one takes its place, and `say` is told.
        corpus: what the engine is asked.
        implementations: each must offer `embedding.lookup`.
        device: where table and ids lie.
        size: of the engine.
        seed: of the run.
        progress: told the tokens that were looked up.
        say: told what is other than asked for.

    Returns:
        one finding for each way of asking, and one for the pairs of code and scale byte.
    """
    world, note = fitting(world, device)
    if note:
        say(note)
    dim = world.config.engram_head_dim
    judge = Judge(Table(int(world.layout.rows.max()), dim, device, finite=False), implementations)
    judge.feed_pairs(pair_table(dim, device))
    truth = Truth(world, device, seed)
    amount = AMOUNTS[device.type]
    for _, step in live_steps(world, corpus, size, tokens=amount.tokens, seed=seed, budget=amount.budget):
        ids = truth.rows(step.pieces)  # [T, L, C]
        for layer in range(ids.shape[1]):
            judge.feed(ids[:, layer].contiguous(), f"step {step.index}, layer {world.config.engram_layer_ids[layer]}")
        progress(step.num_tokens)
    return judge.findings


@dataclass
class Judge:
    """Hold a table and what implementations made of it: a finding for each way, and one for the pairs."""

    table: Table
    implementations: Sequence[Implementation]
    findings: list[Finding] = field(
        default_factory=lambda: [Finding("lookup", way.name, way.meaning) for way in (*WAYS, EVERY_PAIR)]
    )

    def feed(self, ids: torch.Tensor, where: str) -> None:
        """Look [T, C] int32 ids up in every way, by every implementation."""
        first, end = _third(self.table)
        self.table.ask_for(ids)
        # On a CPU, rows that nobody asked for are zeros, as foreign ids must be: fill those that mistakes would read.
        self.table.ask_for(torch.cat([(ids - first) % (end - first) + first, ids.clamp(first, end - 1)]))
        self.table.ask_for(FOREIGN.to(ids.device) % self.table.rows)
        self.table.ask_for(torch.tensor([0, self.table.rows - 1], device=ids.device))
        for way, finding in zip(WAYS, self.findings, strict=False):
            self._compare(self.table, way, finding, ids, where)

    def feed_pairs(self, pairs: Table) -> None:
        """Look every row of `pair_table` up."""
        ids = torch.arange(pairs.rows, dtype=torch.int32, device=pairs.device)[:, None]
        self._compare(pairs, EVERY_PAIR, self.findings[-1], ids, "a table of every pair")

    def _compare(self, table: Table, way: Way, finding: Finding, given: torch.Tensor, where: str) -> None:
        ids, options = way.ids(given, table.rows), way.options(given.shape[1])
        first, end = _third(table) if way.third else (0, table.rows)
        start, heads = options.get("head_start", 0), options.get("local_heads", ids.shape[1])
        expected, rows = _expected(table, ids, first, end, start, heads)
        for one in self.implementations:
            if way.fill:
                options["out"] = torch.full(expected.shape, math.nan, dtype=torch.bfloat16, device=ids.device)
            ask = partial(
                one.require("embedding.lookup"), table.weight[first:end], table.scales[first:end],
                way.ids(given.clone(), table.rows), first_row=first, **options,
            )  # fmt: skip
            finding.rows += rows.numel()
            got = finding.call(one.name, ask, like=expected.view(torch.bfloat16))
            if got is None:
                continue
            if way.fill and got.data_ptr() != options["out"].data_ptr():
                finding.wrong(one.name, len(ids), ["gave rows that do not lie in `out`"])
                continue
            actual = got.view(torch.int16)
            unequal = (actual != expected) & ~(_is_nan(actual) & _is_nan(expected))
            if count := int(unequal.any(dim=2).sum()):
                at = int(unequal.flatten().nonzero()[0])
                finding.wrong(one.name, count, _explain(table, at, ids, rows, start, where, expected, actual))


def _third(table: Table) -> tuple[int, int]:
    return table.rows // 3, 2 * (table.rows // 3)


def _expected(
    table: Table, ids: torch.Tensor, first: int, end: int, start: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give [T, heads, dim] int16 bits by the definition, and the rows [T, heads] they are of, -1 for none."""
    wanted = start + torch.arange(heads, device=ids.device)
    rows = ids[:, wanted.clamp(max=ids.shape[1] - 1)].long()
    held = (rows >= first) & (rows < end) & (wanted < ids.shape[1])
    rows = torch.where(held, rows, -1)
    expected, _ = table.defined(rows.clamp(min=0))
    expected[~held] = 0
    return expected, rows


def _explain(
    table: Table, at: int, ids: torch.Tensor, rows: torch.Tensor, start: int, where: str, expected: torch.Tensor,
    actual: torch.Tensor,
) -> list[str]:  # fmt: skip
    token, head, element = (int(i) for i in np.unravel_index(at, expected.shape))
    column, row = start + head, int(rows[token, head])
    name = f"id {int(ids[token, column])}" if column < ids.shape[1] else "past the last column"
    source = table.describe(row, element) if row >= 0 else "no row of the table, so zeros"
    want, got = (int(x[token, head, element]) & 0xFFFF for x in (expected, actual))
    differing = int((actual[token, head] != expected[token, head]).sum())
    return [
        f"{where}: token {token}, column {column} ({name}), element {element}: {source}",
        f"expected 0x{want:04X}, got 0x{got:04X}; {differing} of {expected.shape[2]} elements of the row differ",
    ]


def _is_nan(bits: torch.Tensor) -> torch.Tensor:
    return bits & 0x7FFF > 0x7F80
