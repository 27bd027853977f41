"""The laws of what is no hash state: layout, map, lookup, gate, shards and the layer's module."""

from __future__ import annotations

import faulthandler
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from parity.gate import formula
from parity.laws import Bench, Law, LawBroken
from parity.oracle import prime_table
from parity.plain_map import bytes_of_letters, plain_map
from parity.table import Table, pair_bits
from parity.tolerances import assert_close
from parity.world import World
from reference.config import EngramConfig
from reference.prime_layout import PrimeLayout
from reference.shard_plan import ShardPlan

FULL_ROWS, DIM = 384_016_682, 256  # of DeepSeek-V4.1-Flash's larger table
_STREAMS = ((torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float32,) * 2, (torch.float16,) * 2)
_ATOMS = [*" \t\n.,?'aAbBÉé\u0301\ue000\u3000ﬁ", "fi", "ℌ", "H", "℡", "tel", "Σ", "a .", "a.", "  "]
_LETTERS = [*"aAĠĊÃ¦æï¿½ģĢ", "Ã©", "é", "ĠA"]


def _broken(bench: Bench, what: str, case: object) -> LawBroken:
    return LawBroken(f"{bench.implementation.name}: {what}; case {case}")


def _bucket_cases(world: World) -> st.SearchStrategy:
    primes = st.sampled_from([3, 5, 7, 11, 13, 31, 101, 331, 1009, 1999])
    near = st.tuples(primes | primes.map(lambda p: p * p), st.integers(-2, 2)).map(sum).filter(lambda n: n > 1)
    return st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), near | st.integers(2, 100_000))


def _hands_primes_out(bench: Bench, case: tuple[int, int, int, int]) -> None:
    layers, orders, heads, start = case
    fields = {"engram_layer_ids": range(layers), "engram_max_ngram_size": orders + 1}
    config = SimpleNamespace(**fields, engram_n_heads=heads, engram_vocab_size=start)
    layout, want = bench.implementation.require("prime_layout.PrimeLayout")(config), prime_table(*case)
    if np.asarray(layout.primes).tolist() != want:
        raise _broken(bench, f"primes {np.asarray(layout.primes).tolist()} are not {want}", case)
    sizes = np.array(want).reshape(layers, -1)
    if not np.array_equal(layout.offsets, np.cumsum(sizes, 1) - sizes):
        raise _broken(bench, "a column does not start where the ones before it end", case)


@dataclass(frozen=True)
class Vocabulary:
    """Stand where a transformers tokenizer is expected: token i is tokens[i]."""

    tokens: tuple[str, ...]
    byte_level: bool

    @property
    def backend_tokenizer(self) -> Any:
        """The Rust tokenizer of these tokens."""
        from tokenizers import Tokenizer, decoders, models

        backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(self.tokens)}, unk_token=self.tokens[0]))
        if self.byte_level:
            backend.decoder = decoders.ByteLevel()
        return backend

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self) -> list[str]:
        """Decode every token by itself, in plain Python."""
        letters = bytes_of_letters()
        if not self.byte_level:
            return list(self.tokens)
        return [bytes(letters[c] for c in token).decode("utf-8", "replace") for token in self.tokens]


def _vocabularies(world: World) -> st.SearchStrategy[Vocabulary]:
    def of(atoms: list[str], byte_level: bool) -> st.SearchStrategy[Vocabulary]:
        token = st.lists(st.sampled_from(atoms), min_size=1, max_size=3).map("".join)
        return st.lists(token, min_size=2, max_size=30, unique=True).map(lambda t: Vocabulary(tuple(t), byte_level))

    return of(_ATOMS, False) | of(_LETTERS, True)


def _maps_by_definition(bench: Bench, vocabulary: Vocabulary) -> None:
    got, size = bench.implementation.require("token_map.build_token_map")(vocabulary)
    want = plain_map(vocabulary.texts(), vocabulary.tokens)
    if list(got) != want or size != max(want) + 1:
        raise _broken(bench, f"map {list(got)} of {size} is not {want}", vocabulary)


@cache
def _definition() -> np.ndarray:
    return pair_bits()


def _bits(rows: torch.Tensor) -> np.ndarray:
    return rows.contiguous().view(torch.int16).cpu().numpy()


def _lookup_cases(world: World) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "rows": st.sampled_from([1, 2, 40]),
            "dim": st.sampled_from([64, 96, 256]),
            "tokens": st.integers(1, 9),
            "columns": st.integers(1, 6),
            "first_row": st.sampled_from([0, 1, 1000, 384_000_000]),
            "seed": st.integers(0, 2**32 - 1),
        }
    )


def _looks_up_by_definition(bench: Bench, case: dict[str, int]) -> None:
    rng = np.random.default_rng(case["seed"])
    rows, dim, first = case["rows"], case["dim"], case["first_row"]
    codes, scales = (rng.integers(0, 256, (rows, width), dtype=np.uint8) for width in (dim, dim // 32))
    scales[rng.random(scales.shape) < 0.3] = rng.choice([0, 127, 255])
    shape = (case["tokens"], case["columns"])
    ids = rng.integers(first, first + rows, shape)
    edge = rng.choice([-1, first - 1, first + rows, first + rows - 1, 2**31 - 1], shape)
    ids = np.where(rng.random(shape) < 0.7, ids, edge)
    weight, factors = (torch.from_numpy(part).to(bench.device) for part in (codes, scales))
    got = bench.implementation.require("embedding.lookup")(
        weight.view(torch.float8_e4m3fn),
        factors,
        torch.from_numpy(ids.astype(np.int32)).to(bench.device),
        first_row=first,
    )
    held = (ids >= first) & (ids < first + rows)
    row = np.where(held, ids - first, 0)
    want = _definition()[scales[row].repeat(32, -1), codes[row]] * held[..., None]
    if not np.array_equal(_bits(got), want):
        wrong = int((_bits(got) != want).any(-1).sum())
        raise _broken(bench, f"{wrong} of {held.size} rows are not the definition's", case)


@cache
def _full_table() -> Table:
    return Table(FULL_ROWS, DIM, torch.device("cpu"), finite=False)


def _far_cases(world: World) -> st.SearchStrategy:
    edges = [2**31 // DIM, 2**32 // DIM, 2**31 // (DIM // 32), 2**33 // DIM, FULL_ROWS - 2]
    near = st.tuples(st.sampled_from(edges), st.integers(-2, 1)).map(sum)
    return st.lists(near | st.integers(0, FULL_ROWS - 1), min_size=1, max_size=6)


def _reaches_far_rows(bench: Bench, rows: list[int]) -> None:
    table, ids = _full_table(), torch.tensor(rows, dtype=torch.int32)[:, None]
    table.ask_for(ids)
    lookup = bench.implementation.require("embedding.lookup")
    died, got = in_child(lambda: _bits(lookup(table.weight, table.scales, ids)))
    if died:
        raise _broken(bench, f"the process of the lookup ended with {died}", rows)
    if not np.array_equal(got, table.defined(ids.long())[0].numpy()):
        raise _broken(bench, "rows past 2^31 bytes are not the table's", rows)


def in_child(call: Callable[[], Any]) -> tuple[int, Any]:
    """Call in a child process, which may die of a stray access; give its wait status, 0 if it lived, and the result.

    Raises:
        RuntimeError: the call raised; the message is its traceback.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(source)
            faulthandler.disable()  # how it dies is told by the parent
            try:
                answer = (True, call())
            except BaseException:
                answer = (False, traceback.format_exc())
            with open(sink, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    if status or not data:
        return status or -1, None
    lived, result = pickle.loads(data)
    if not lived:
        raise RuntimeError(result)
    return 0, result


@st.composite
def _gate_cases(draw: st.DrawFn, world: World) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tokens, copies = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    width = draw(st.sampled_from([2, 31, 96, 257]))
    kind = draw(st.sampled_from(["plain", "plain", "zero dot", "small dot", "large"]))
    stream, keys = draw(st.sampled_from(_STREAMS))
    hidden = torch.randn(tokens, copies, width, generator=generator)
    parts = torch.randn(tokens, copies + 1, width, generator=generator)
    weights = 1 + 0.3 * torch.randn(2, copies, width, generator=generator)
    if kind == "zero dot":
        hidden[..., 1::2], parts[:, :copies, 0::2] = 0.0, 0.0
    if kind == "small dot":
        weights[1] *= 2.0**-22
    if kind == "large" and stream is torch.float32:
        hidden *= 2.0**20
    return {
        "hidden": hidden.to(stream), "kv": parts.flatten(1).to(keys), "q_weight": weights[0].bfloat16(),
        "k_weight": weights[1].bfloat16(), "eps": draw(st.sampled_from([0.0, 1e-20, 1e-6, 0.5])),
    }  # fmt: skip


def _gates_by_definition(bench: Bench, case: dict[str, Any]) -> None:
    tensors = [case[name].to(bench.device) for name in ("hidden", "kv", "q_weight", "k_weight")]
    out = bench.implementation.require("gate.engram_gate")(*tensors, eps=case["eps"])
    hidden, kv, q, k = tensors
    exact, magnitude = formula(hidden.double(), kv.double(), q.double(), k.double(), case["eps"])
    plain = formula(hidden.float(), kv.float(), q.float(), k.float(), case["eps"])[0].to(hidden.dtype)
    try:
        assert_close("gate", out, plain, exact, magnitude=magnitude, axes=("T", "hc", "M"))
    except AssertionError as error:
        raise _broken(bench, str(error), {k: v for k, v in case.items() if k == "eps"}) from error


def _leaks_nothing(bench: Bench, case: dict[str, Any]) -> None:
    tensors = {name: case[name].to(bench.device).clone() for name in ("hidden", "kv", "q_weight", "k_weight")}
    shut = torch.arange(len(tensors["kv"]), device=bench.device) % 2 == 0
    tensors["kv"][shut] = torch.nan
    tensors["kv"][shut, -1] = torch.inf
    out = bench.implementation.require("gate.engram_gate")(**tensors, token_mask=~shut, eps=case["eps"])
    if not torch.equal(out[shut], tensors["hidden"][shut]):
        raise _broken(bench, "a shut row is not its stream, bit for bit", tuple(out.shape))


def _refuses_a_mask_of_one(bench: Bench, case: dict[str, Any]) -> None:
    double = {name: torch.cat([case[name], case[name]]).to(bench.device) for name in ("hidden", "kv")}
    weights = {name: case[name].to(bench.device) for name in ("q_weight", "k_weight")}
    one = torch.zeros(1, dtype=torch.bool, device=bench.device)
    try:
        bench.implementation.require("gate.engram_gate")(**double, **weights, token_mask=one, eps=case["eps"])
    except (ValueError, TypeError):
        return
    raise _broken(bench, "a mask of length 1 was taken for all tokens", tuple(double["hidden"].shape))


def _shard_cases(world: World) -> st.SearchStrategy:
    sizes = st.lists(st.integers(1, 6), min_size=2, max_size=25)
    return st.tuples(sizes, st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))


def _parts_are_the_whole(bench: Bench, case: tuple[list[int], int, int, int]) -> None:
    sizes, ranks, tokens, seed = case
    rng, rows = np.random.default_rng(seed), sum(sizes)
    codes = rng.choice([0x00, 0x80, 0x38, 0xB9], (rows, 32)).astype(np.uint8)
    scales = rng.integers(100, 150, (rows, 1), dtype=np.uint8)
    ends = np.cumsum(sizes)
    ids = np.stack([rng.integers(e - s, e, tokens) for e, s in zip(ends, sizes, strict=True)], 1)
    given_ids, parts, shard = torch.from_numpy(ids.astype(np.int32)).to(bench.device), [], None
    for rank in range(ranks):
        plan = ShardPlan.of(sizes, ranks=ranks, rank=rank)
        shard = bench.implementation.require("embedding.EngramEmbedding")(plan, 32, device=bench.device)
        shard.load_weight(torch.from_numpy(codes).to(bench.device).view(torch.float8_e4m3fn))
        shard.load_scales(torch.from_numpy(scales).to(bench.device))
        parts.append(shard.lookup(given_ids))
    assert shard is not None
    whole = shard.gather(parts)
    want = _definition()[scales[ids].repeat(32, -1), codes[ids]]
    if tuple(whole.shape) != want.shape or not np.array_equal(_bits(whole), want):
        raise _broken(bench, f"the parts of {ranks} ranks, {tuple(whole.shape)}, are not the whole {want.shape}", case)


def _window_cases(world: World) -> st.SearchStrategy:
    return st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**32 - 1))


def _windows_are_the_step(bench: Bench, case: tuple[int, int, int, int]) -> None:
    ranks, tokens, local, seed = case
    size = -(-tokens // ranks)
    words = np.random.default_rng(seed).integers(0, 2**15, (ranks, tokens, local, 32), dtype=np.int16)
    gathered = torch.from_numpy(words.reshape(-1, local, 32)).view(torch.bfloat16).to(bench.device)
    select = bench.implementation.require("sharding.select_rows")
    got = [
        select(gathered, ranks=ranks, first_token=min(rank * size, tokens), tokens=size, columns=ranks * local)
        for rank in range(ranks)
    ]
    want = np.zeros((ranks * size, ranks * local, 32), np.int16)
    want[:tokens] = np.concatenate(list(words), axis=1)
    if not np.array_equal(np.concatenate([_bits(part) for part in got]), want):
        raise _broken(bench, "the ranks' windows, end to end, are not the step", case)


def _staging_cases(world: World) -> st.SearchStrategy:
    length = st.sampled_from([0, 1, 2, 5, 8])
    return st.tuples(st.lists(st.tuples(length, length), min_size=1, max_size=4), st.integers(0, 2**32 - 1))


@cache
def _small_layer() -> tuple[EngramConfig, dict[str, torch.Tensor]]:
    config = EngramConfig(
        vocab_size=100, engram_layer_ids=(1,), engram_num_embeddings=(600,), engram_max_ngram_size=3, engram_n_heads=2,
        engram_head_dim=32, engram_vocab_size=100, engram_compressed_vocab_size=100, engram_pad_token_id=7,
        hidden_size=32, hc_mult=1, rms_norm_eps=1e-20,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {"wkv.weight": torch.zeros(64, 4 * 32), "q_weight": torch.ones(1, 32), "k_weight": torch.ones(1, 32)}
    tensors = {name: tensor.bfloat16() for name, tensor in weights.items()}
    tensors["embed.weight"] = torch.from_numpy(rng.integers(0, 0x7F, (600, 32), dtype=np.uint8)).view(
        torch.float8_e4m3fn
    )
    tensors["embed.scale"] = torch.from_numpy(rng.integers(120, 130, (600, 1), dtype=np.uint8))
    return config, {f"layer.{name}": tensor for name, tensor in tensors.items()}


def _stages_its_own_rows(bench: Bench, case: tuple[list[tuple[int, int]], int]) -> None:
    rounds, seed = case
    rng, (config, tensors) = np.random.default_rng(seed), _small_layer()
    make = bench.implementation.require("engram.Engram")
    module = make(config, 0, max_tokens=8, microbatches=2, device=bench.device)
    module.load_tensors({name: tensor.to(bench.device) for name, tensor in tensors.items()}, "layer")
    rows = int(PrimeLayout(config).rows[0])
    codes, scales = (tensors[f"layer.embed.{name}"].view(torch.uint8).numpy() for name in ("weight", "scale"))
    for lengths in rounds:
        ids = [rng.integers(-1, rows, (length, config.columns)) for length in lengths]
        given_ids = [torch.from_numpy(one.astype(np.int32)).to(bench.device) for one in ids]
        for microbatch, one in enumerate(given_ids):
            module.prepare_embeddings(one, microbatch=microbatch)
        for microbatch, one in enumerate(given_ids):
            got, row = module.embed(one, microbatch=microbatch), np.maximum(ids[microbatch], 0)
            want = _definition()[scales[row].repeat(32, -1), codes[row]] * (ids[microbatch] >= 0)[..., None]
            if not np.array_equal(_bits(got), want):
                raise _broken(bench, f"microbatch {microbatch} does not get the rows that it prepared", case)


VALUE_LAWS = (
    Law(13, "buckets", "Primes and offsets are those that the definition hands out.", _bucket_cases, _hands_primes_out),
    Law(14, "token_map", "Which ids share a compressed id, and in what order they come, follows from the definition.",
        _vocabularies, _maps_by_definition),
    Law(15, "lookup", "A row is its definition bit for bit, and zeros where the rank has none.",
        _lookup_cases, _looks_up_by_definition),
    Law(15, "far_rows", "Rows past 2^31 bytes of weight or scales are found; tried in a child, which may die.",
        _far_cases, _reaches_far_rows),
    Law(16, "gate", "The stream is gated within the tolerance.", _gate_cases, _gates_by_definition),
    Law(16, "shut_gate", "A shut row passes bit for bit, whatever stands behind it.", _gate_cases, _leaks_nothing),
    Law(16, "mask_of_one", "A mask of another length than the tokens is refused, never broadcast.",
        _gate_cases, _refuses_a_mask_of_one),
    Law(12, "shards", "The parts of P ranks put together are the whole.", _shard_cases, _parts_are_the_whole),
    Law(12, "windows", "The ranks' windows of a step, end to end, are the step.",
        _window_cases, _windows_are_the_step),
    Law(17, "staging", "Each microbatch gets the rows that it prepared, at any length, step after step.",
        _staging_cases, _stages_its_own_rows),
)  # fmt: skip
# What a port must offer to be tried under a law; those that are not here ask for a hash state.
NEEDS = {
    "buckets": "prime_layout.PrimeLayout", "token_map": "token_map.build_token_map", "lookup": "embedding.lookup",
    "far_rows": "embedding.lookup", "gate": "gate.engram_gate", "shut_gate": "gate.engram_gate",
    "mask_of_one": "gate.engram_gate", "shards": "embedding.EngramEmbedding", "windows": "sharding.select_rows",
    "staging": "engram.Engram",
}  # fmt: skip
