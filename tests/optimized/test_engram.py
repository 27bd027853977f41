"""The module under the laws of one rank, and what only a GPU can show: graphs, overlap and the real width."""

import inspect
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

import optimized.engram
import reference.embedding
import reference.engram
import reference.hash_state
from optimized.hash_state import HashState
from parity.tolerances import assert_close
from reference.config import EngramConfig
from tests.distributed.layer import PREFIX, Layer, make_config, same_bits
from tests.reference.test_engram import EngramLaws
from tests.reference.test_gate import Case, exact_gate, plain_gate

# The interpreter computes in NumPy, which warns where infinities and NaN arise.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")


class TestOptimized(EngramLaws):
    engram = optimized.engram.Engram


def test_both_sides_have_one_signature() -> None:
    """A caller can exchange the two sides: same names, parameters and defaults."""
    for name in ("__init__", "prepare_embeddings", "embed", "forward", "load_checkpoint", "load_tensors"):
        sides = [getattr(side.Engram, name) for side in (reference.engram, optimized.engram)]
        assert inspect.signature(sides[0]) == inspect.signature(sides[1])


class Step:
    """Hold the tensors of a step of the stateless way at addresses that stay, and draw other values into them.

    T tokens of which some are padding, R requests of which some are empty.
    """

    def __init__(self, layer: Layer, tokens: int, requests: int, device: torch.device) -> None:
        self.layer, self.vocabulary = layer, layer.config.vocab_size
        depth = layer.config.lookback
        self.tensors = {
            "input_ids": torch.zeros(tokens, dtype=torch.int32),
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "query_start_loc": torch.zeros(requests + 1, dtype=torch.int32),
            "dead_mask": torch.zeros(tokens, dtype=torch.bool),
            "lookback_token_ids": torch.zeros(requests, depth, dtype=torch.int32),
            "lookback_dead_mask": torch.zeros(requests, depth, dtype=torch.bool),
        }
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.hidden = layer.stream(tokens, seed=0).to(device)
        self.place = torch.arange(tokens, device=device)

    def draw(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        tokens, (requests, depth) = len(self.place), self.tensors["lookback_token_ids"].shape
        bounds = np.sort(rng.integers(0, tokens + 1, requests + 1))
        bounds[0] = 0
        starts = rng.integers(0, 6, requests)
        positions = np.zeros(tokens, dtype=np.int64)
        for request, start in enumerate(starts):
            positions[bounds[request] : bounds[request + 1]] = start + np.arange(np.diff(bounds)[request])
        window = rng.integers(0, self.vocabulary, (requests, depth))
        known = np.arange(depth)[None, :] < starts[:, None]
        drawn = {
            "input_ids": rng.integers(0, self.vocabulary, tokens),
            "positions": positions,
            "query_start_loc": bounds,
            "dead_mask": rng.random(tokens) < 0.1,
            "lookback_token_ids": np.where(known, window, -1),
            "lookback_dead_mask": known & (rng.random(known.shape) < 0.1),
        }
        for name, array in drawn.items():
            self.tensors[name].copy_(torch.from_numpy(array))
        self.hidden.copy_(self.layer.stream(tokens, seed=seed))

    def hash(self, state: HashState) -> torch.Tensor:
        return state.forward(**self.tensors, slot_mapping=None, block_table=None)

    def keep(self) -> torch.Tensor:
        return (self.place < self.tensors["query_start_loc"][-1]) & ~self.tensors["dead_mask"]

    def run(self, state: HashState, module: torch.nn.Module, stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
        """Go from ids to the gated stream: hashes [T, 1, C] and out [T, hc, M]."""
        hashes = self.hash(state)
        module.prepare_embeddings(hashes[:, 0], stream=stream)
        return [hashes, module(self.hidden, hashes[:, 0], self.keep())]


def hash_states(layer: Layer, device: torch.device) -> list[HashState]:
    """Make two states of the kernel on the device, and the reference's on the CPU."""
    token_map = np.arange(layer.config.vocab_size, dtype=np.int32)
    kinds = ((HashState, device), (HashState, device), (reference.hash_state.HashState, "cpu"))
    return [kind(layer.config, token_map, slot_cache=False, block_size=None, device=where) for kind, where in kinds]


def captured(run: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Warm up and capture, and give the graph with what it writes."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_layer_follows_its_inputs(device: torch.device, overlap: bool) -> None:
    """From token ids to the gated stream, captured once: 120 replays over changed inputs are 120 eager steps."""
    layer, tokens = Layer.drawn(make_config(24, dim=64, width=256, copies=4), seed=4), 32
    replayed, eager = (layer.module(optimized.engram.Engram, max_tokens=tokens, device=device) for _ in range(2))
    state, eager_state, on_cpu = hash_states(layer, device)
    step = Step(layer, tokens, 5, device)
    step.draw(0)
    stream = torch.cuda.Stream(device) if overlap else None
    graph, (hashes, out) = captured(lambda: step.run(state, replayed, stream))
    address, before = replayed.staged_rows[0].data_ptr(), None
    for seed in range(1, 121):
        step.draw(seed)
        replayed.staged_rows[0].fill_(float("nan"))
        hashes.fill_(-7)
        out.fill_(float("nan"))
        graph.replay()
        want_hashes, want = step.run(eager_state, eager, None)
        live = int(step.tensors["query_start_loc"][-1])
        assert torch.equal(hashes[:live], want_hashes[:live])
        assert same_bits(out, want)
        assert before is None or not same_bits(out, before)
        before = out.clone()
        if seed % 10 == 0:
            host = {name: tensor.cpu() for name, tensor in step.tensors.items()}
            exact = on_cpu.forward(**host, slot_mapping=None, block_table=None)[:live]
            assert torch.equal(hashes[:live].cpu(), exact)
            assert same_bits(replayed.staged_rows[0][:live], layer.rows(exact[:, 0]))
    assert replayed.staged_rows[0].data_ptr() == address


@pytest.mark.gpu
def test_overlapped_steps_are_serial_steps(device: torch.device) -> None:
    """Lookups on a side stream, one step ahead and delayed at random on either stream, give what serial ones give."""
    layer, rng = Layer.drawn(make_config(24, dim=64, width=256, copies=4), seed=5), random.Random(1)
    module = layer.module(optimized.engram.Engram, max_tokens=300, microbatches=2, device=device)
    serial = layer.module(optimized.engram.Engram, max_tokens=300, device=device)
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    steps = [(layer.ids(tokens, seed=tokens), layer.stream(tokens, seed=tokens)) for tokens in range(241, 301)]
    steps = [(ids.to(device), hidden.to(device)) for ids, hidden in steps]

    def delay(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(rng.choice([0, 0, 100_000, 3_000_000]))

    def prepare(step: int) -> None:
        module.staged_rows[step % 2].fill_(float("nan"))
        delay(side)
        ids = steps[step][0].clone()  # gone before the side stream has read it
        module.prepare_embeddings(ids, microbatch=step % 2, stream=side)

    got = []
    prepare(0)
    for step, (ids, hidden) in enumerate(steps):
        if step + 1 < len(steps):
            prepare(step + 1)
        delay(main)
        got.append(module(hidden, ids, microbatch=step % 2))
    for (ids, hidden), out in zip(steps, got, strict=True):
        serial.prepare_embeddings(ids)
        assert same_bits(out, serial(hidden, ids))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_half_an_overlap_is_not_captured(device: torch.device) -> None:
    """A graph that would replay without the side stream's lookup is refused, and so is an eager step on a graph's."""
    layer = Layer.drawn(make_config(24), seed=6)
    module = layer.module(optimized.engram.Engram, max_tokens=4, device=device)
    ids, stream = layer.ids(4, seed=1).to(device), torch.cuda.Stream(device)
    module.prepare_embeddings(ids, stream=stream)
    module.embed(ids)
    torch.cuda.synchronize(device)
    with pytest.raises(RuntimeError, match="outside of a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module.embed(ids)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        module.prepare_embeddings(ids, stream=stream)
        module.embed(ids)
    with pytest.raises(RuntimeError, match="inside of a CUDA graph"):
        module.embed(ids)
    module.prepare_embeddings(ids)
    assert same_bits(module.embed(ids), layer.rows(ids))


def real_config() -> EngramConfig:
    """Give V4.1-Flash's layer with buckets of about 100,000 rows: 2.4 million in all."""
    return make_config(24, dim=256, width=5120, copies=4, buckets=100_000)


def real_tensors(config: EngramConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw the layer on the device: finite codes and scales of all sizes, normal weights."""
    generator = torch.Generator(device).manual_seed(7)
    rows, (copies, width) = config.engram_num_embeddings[0], (config.hc_mult, config.hidden_size)
    weight = torch.empty(rows, 256, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, 8, dtype=torch.uint8, device=device).random_(115, 126, generator=generator)
    for part in weight.split(1 << 20):
        part.random_(0, 0x7F, generator=generator)
        part += 128 * torch.randint_like(part, 2)
    wkv = torch.empty((copies + 1) * width, 24 * 256, device=device).normal_(0, 1 / 80, generator=generator)
    tensors = {"embed.weight": weight.view(torch.float8_e4m3fn), "embed.scale": scales, "wkv.weight": wkv.bfloat16()}
    for name in ("q_weight", "k_weight"):
        drawn = 1 + 0.3 * torch.randn(copies, width, generator=generator, device=device)
        tensors[name] = drawn.bfloat16()
    return {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.gpu
def test_the_real_width_is_its_definition(device: torch.device) -> None:
    """At M 5120, 4 copies, 24 columns of 256 and millions of rows: rows by bits, the stream by its tolerance."""
    config = real_config()
    tensors = real_tensors(config, device)
    modules = {
        "plain": optimized.engram.Engram(config, 0, max_tokens=1024, device=device),
        "pinned": optimized.engram.Engram(config, 0, max_tokens=1024, device=device, placement="pinned"),
        "reference": reference.engram.Engram(config, 0, max_tokens=1024, device=device),
    }
    for module in modules.values():
        module.load_tensors(tensors, PREFIX)
    table, scales = tensors[f"{PREFIX}.embed.weight"], tensors[f"{PREFIX}.embed.scale"]
    sizes, generator = modules["plain"].plan, torch.Generator(device).manual_seed(8)
    for tokens in (1, 17, 1000):
        ids = torch.randint(-1, sizes.rows, (tokens, 24), dtype=torch.int32, device=device, generator=generator)
        hidden = torch.randn(tokens, 4, 5120, device=device, generator=generator).bfloat16()
        mask = torch.rand(tokens, device=device, generator=generator) < 0.8
        rows = reference.embedding.lookup(table, scales, ids)
        kv = torch.nn.functional.linear(rows.flatten(1), tensors[f"{PREFIX}.wkv.weight"])
        for name, module in modules.items():
            module.prepare_embeddings(ids)
            assert same_bits(module.embed(ids), rows), name
            got = module(hidden, ids, mask)
            assert same_bits(got[~mask], hidden[~mask]), name
            for start in range(0, tokens, 250):
                part = slice(start, start + 250)
                weights = (tensors[f"{PREFIX}.{weight}"] for weight in ("q_weight", "k_weight"))
                case = Case(hidden[part], kv[part], *weights, mask[part])
                exact, magnitude = exact_gate(case)
                plain = case.call(plain_gate)
                assert_close("gate", got[part], plain, exact, magnitude=magnitude, axes=("T", "hc", "M"))
