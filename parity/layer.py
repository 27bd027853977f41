"""The layer part of the main job: real steps, hashed, staged, looked up and gated into a stream by whole modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import linear

from parity.corpus import Corpus
from parity.finding import Finding
from parity.gate import PADDING, Case, judge_open, judge_shut, poison
from parity.live import Hasher, live_steps, owner
from parity.lookup import Amount
from parity.protocol import Implementation, load_implementation
from parity.runs import Size
from parity.table import Table, fitting, noise, reduced
from parity.truth import Truth
from parity.workload import Session
from parity.world import World
from serving.step import Step

AMOUNTS = {"cpu": Amount(240, 48), "cuda": Amount(120_000, 8192)}
MICROBATCHES = 2
_PREFIX = "engram"
_SMALL_ROWS, _SMALL_WIDTH, _SMALL_COPIES = 20_000, 96, 2  # what Triton's interpreter gates in seconds


def judge_layer(
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
    """Run steps of the serving engine through every implementation's hash state and `engram.Engram` modules.

    All layers of the model read one table. Steps are prepared two at a time, each as a microbatch, before any of them
    is gated. Rows are compared bit for bit; out by the gate's tolerance, with the keys and value that one `nn.Linear`
    of the model's weight makes of the right rows; what is dead or padding, bit for bit.

    Args:
        world: the model; on the CPU a smaller table and a narrower stream take its place.
        corpus: what the engine is asked.
        implementations: each must offer `engram.Engram`; one without a `HashState` is given the reference's rows.
        device: where everything lies.
        size: of the engine.
        seed: of the run.
        progress: told the tokens of each step.
        say: told what is other than asked for.

    Returns:
        for each layer a finding of rows and one of the stream, and one for the tokens that pass.
    """
    if device.type == "cuda":
        world, note = fitting(world, device)
    else:
        world = reduced(world, _SMALL_ROWS, hidden_size=_SMALL_WIDTH, copies=_SMALL_COPIES)
        copies, width, rows = world.config.hc_mult, world.config.hidden_size, int(world.layout.rows.max())
        note = f"layer: on a CPU {copies} copies of {width}, and tables of {rows:,} rows"
    if note:
        say(note)
    amount = AMOUNTS[device.type]
    judge = _Judge(world, implementations, device, amount.budget, seed)
    steps = live_steps(world, corpus, size, tokens=amount.tokens, seed=seed, budget=amount.budget)
    for together in _groups(steps, MICROBATCHES):
        judge.feed(together)
        progress(sum(step.num_tokens for _, step in together))
    return judge.findings


class _Judge:
    """Hold the table, the weights and every implementation's modules."""

    def __init__(
        self, world: World, implementations: Sequence[Implementation], device: torch.device, longest: int, seed: int
    ) -> None:
        self.world, self.device, self._seed, self._number = world, device, seed, 0
        layers = world.config.engram_layer_ids
        self.rows = [Finding("layer", f"rows of layer {one}", "staged rows, bit for bit") for one in layers]
        close = "error against float64 by the table of tolerances"
        self.streams = [Finding("layer", f"stream of layer {one}", close, worst=0.0) for one in layers]
        self.passes = Finding("layer", "dead and padding", "copied bit for bit")
        self.truth = Truth(world, device, seed)
        self.table = Table(int(world.layout.rows.max()), world.config.engram_head_dim, device, finite=True)
        if device.type != "cuda":
            self.table.ask_for(torch.arange(self.table.rows))
        self.weights = [_weights(world, 8 * seed + layer, device) for layer in range(len(layers))]
        self.sides = [side for one in implementations if (side := self._side(one, longest))]

    @property
    def findings(self) -> list[Finding]:
        """Give all findings, layer by layer."""
        return [*(one for pair in zip(self.rows, self.streams, strict=True) for one in pair), self.passes]

    def feed(self, together: Sequence[tuple[Session, Step]]) -> None:
        """Prepare steps as microbatches, then embed and gate each, and compare."""
        hashed = {
            side.name: self.rows[0].ask(side.name, partial(_hash_all, side.hasher, together)) for side in self.sides
        }
        sides = [(side, ids) for side in self.sides if (ids := hashed[side.name]) is not None]
        for layer in range(len(self.rows)):
            for side, ids in sides:
                self.rows[layer].ask(side.name, partial(_prepare_all, side.modules[layer], ids, layer))
        expected = [self.truth.rows(step.pieces) for _, step in together]  # [live, L, C] each
        for layer in range(len(self.rows)):
            for microbatch, (_, step) in enumerate(together):
                given = {side.name: (side.modules[layer], ids[microbatch][:, layer]) for side, ids in sides}
                self._compare(layer, microbatch, step, expected[microbatch][:, layer].long(), given)

    def _compare(
        self,
        layer: int,
        microbatch: int,
        step: Step,
        expected: torch.Tensor,
        given: dict[str, tuple[Any, torch.Tensor]],
    ) -> None:
        live, tokens = step.num_tokens, len(step.input_ids)
        wanted = self.table.defined(expected)[0]  # [live, C, dim]
        whole = wanted.new_zeros(tokens, *wanted.shape[1:])
        whole[:live] = wanted
        for name, (module, ids) in given.items():
            rows = self.rows[layer].call(
                name, partial(module.embed, ids, microbatch=microbatch), like=whole.view(torch.bfloat16)
            )
            self.rows[layer].rows += wanted.shape[0] * wanted.shape[1]
            if rows is not None:
                self._compare_rows(layer, name, step, expected, ids, wanted, rows[:live].view(torch.int16))
        case = self._case(layer, step, whole.view(torch.bfloat16))
        outs = {}
        for name, (module, ids) in given.items():
            ask = partial(module, case.hidden.clone(), ids, case.token_mask.clone(), microbatch=microbatch)
            out = self.streams[layer].call(name, ask, like=case.hidden)
            if out is not None:
                outs[name] = out
        layer_id = self.world.config.engram_layer_ids[layer]
        judge_open(self.streams[layer], case, outs, lambda token: f"{owner(step, token)}: ")
        judge_shut(self.passes, case, outs, lambda token: f"layer {layer_id}, {owner(step, token)}: ")

    def _compare_rows(
        self, layer: int, name: str, step: Step, expected: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:  # fmt: skip
        unequal = rows != wanted
        if not (count := int(unequal.any(dim=2).sum())):
            return
        token, column, element = unequal.nonzero()[0].tolist()
        want, got = (int(x[token, column, element]) & 0xFFFF for x in (wanted, rows))
        row = int(expected[token, column])
        hashed = int(ids[token, column])
        lines = [
            f"{owner(step, token)}: token {token}, column {column}: id {row} expected, hashed to {hashed}",
            f"element {element}: {self.table.describe(row, element)}: expected 0x{want:04X}, got 0x{got:04X}",
        ]
        self.rows[layer].wrong(name, count, lines)

    def _case(self, layer: int, step: Step, rows: torch.Tensor) -> Case:
        """Draw a stream for a step, with rows to spare; what is dead or nobody's must pass."""
        config, weights, self._number = self.world.config, self.weights[layer], self._number + 1
        seed = 1024 * (self._seed + 1) + self._number
        hidden = noise((len(rows) + PADDING, config.hc_mult, config.hidden_size), seed, self.device).bfloat16()
        mask = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        mask[: step.num_tokens] = ~step.dead_mask[: step.num_tokens].to(self.device)
        # As long as a module's product, so that every row is summed in the same order.
        kv = linear(rows.flatten(1), weights["wkv.weight"])
        case = Case(hidden, kv, weights["q_weight"], weights["k_weight"], mask, float(config.rms_norm_eps))
        poison(hidden, case.passes())
        return case

    def _side(self, one: Implementation, longest: int) -> _Side | None:
        make = one.find("hash_state.HashState") or load_implementation("reference").require("hash_state.HashState")
        layers = range(len(self.rows))
        modules = self.rows[0].ask(one.name, lambda: [self._module(one, layer, longest) for layer in layers])
        return None if modules is None else _Side(one.name, Hasher(make, self.world, self.device), modules)

    def _module(self, one: Implementation, layer: int, longest: int) -> Any:
        module = one.require("engram.Engram")(
            self.world.config, layer, max_tokens=longest, microbatches=MICROBATCHES, device=self.device
        )
        rows = int(self.world.layout.rows[layer])
        table = {"embed.weight": self.table.weight[:rows], "embed.weight_scale_inv": self.table.scales[:rows]}
        tensors = {f"{_PREFIX}.{name}": tensor for name, tensor in {**table, **self.weights[layer]}.items()}
        module.load_tensors(tensors, _PREFIX)
        return module


@dataclass(frozen=True, eq=False)
class _Side:
    name: str
    hasher: Hasher
    modules: list[Any]


def _weights(world: World, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw wkv so that keys and value are about 1, and q and k about 1."""
    config = world.config
    inputs = config.columns * config.engram_head_dim
    outputs = (config.hc_mult + 1) * config.hidden_size
    wkv = noise((outputs, inputs), 4 * seed, device) * (4 * inputs**-0.5)
    q_weight, k_weight = 1 + 0.3 * noise((2, config.hc_mult, config.hidden_size), 4 * seed + 1, device)
    named = {"wkv.weight": wkv, "q_weight": q_weight, "k_weight": k_weight}
    return {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}


def _hash_all(hasher: Hasher, together: Sequence[tuple[Session, Step]]) -> list[torch.Tensor]:
    return [hasher.rows(session, step) for session, step in together]


def _prepare_all(module: Any, ids: Sequence[torch.Tensor], layer: int) -> None:
    for microbatch, one in enumerate(ids):
        module.prepare_embeddings(one[:, layer], microbatch=microbatch)


def _groups(steps: Iterator[tuple[Session, Step]], count: int) -> Iterator[list[tuple[Session, Step]]]:
    while group := list(islice(steps, count)):
        yield group
