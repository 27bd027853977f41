"""The file of a trace: what goes in comes out, equal runs are equal bytes, and a doubt is a refusal."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from serving.engine import Engine, EngineConfig
from serving.runner import Policy
from serving.step import Piece, Step
from serving.tensor_file import digest, pack, unpack
from serving.trace import Trace, TracedStep, pack_trace, write_trace
from serving.trace_reader import Refused, read_trace, unpack_trace
from tests.serving.world import VOCABULARY, answers, propose_with

DEPTH = 3
TINY_DIGEST = "e83018d55e1479ebead6b8ec983dd3299004e8a2b2cdaeafdf6cb2c70867d3a9"


def recorded(policy: Policy, seed: int = 3) -> Trace:
    """A run with chunks, drafts, imports and padding; its rows are any numbers."""
    config = EngineConfig(
        policy, block_size=4, num_blocks=40, token_budget=9, max_requests=4, lookback=DEPTH, num_drafts=2,
        pad_tokens=(8, 16), pad_requests=(2, 4), ids_dtype=torch.int32, seed=seed,
    )  # fmt: skip
    engine = Engine(config, propose_with(2))
    for number in range(4):
        prompt = (np.arange(12 + number) * (number // 2 + 1)) % VOCABULARY
        engine.add(prompt, dead=prompt % 7 == 5, max_new_tokens=6, imported=5 * (number == 3))
    trace = empty()
    while (step := engine.step()) is not None:
        rows = (np.arange(step.num_tokens * 4, dtype=np.int32) + step.index).reshape(-1, 2, 2)
        trace.steps.append(TracedStep(0, 4 if policy.slot_cache else 0, 40, step, rows))
        engine.update(answers(step))
    return trace


def empty() -> Trace:
    """A trace of no steps, over a map of its own."""
    token_map = np.arange(VOCABULARY, dtype=np.int32) // 2
    ones = np.ones((2, DEPTH + 1), np.int64)
    constants = {"multipliers": ones, "primes": 7 * ones[:, :2], "offsets": 0 * ones[:, :2]}
    return Trace(
        "run", {"engram_n_heads": 1}, [{"policy": "any"}], token_map, None,
        hashlib.sha256(token_map.tobytes()).hexdigest(), constants,
    )  # fmt: skip


def tiny() -> Trace:
    """Two steps of a request that was forked in between, at positions past 2^31."""
    far, trace = 2**31, empty()
    stream = np.array([1, 2, 3, 4, 5, 6], np.int64)
    for index, (start, end) in enumerate([(0, 4), (4, 6)]):
        piece = Piece(
            index, stream[: start + 2], np.zeros(start + 2, np.bool_), start, stream[start:end],
            np.zeros(end - start, np.bool_), 1, 2, frozenset({"verify", "decode"}), offset=far,
        )  # fmt: skip
        step = Step(
            index=index,
            input_ids=torch.tensor(stream[start:end]),
            positions=torch.arange(far + start, far + end),
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            dead_mask=torch.zeros(end - start, dtype=torch.bool),
            lookback_token_ids=torch.full((1, DEPTH), -1),
            lookback_dead_mask=torch.zeros((1, DEPTH), dtype=torch.bool),
            slot_mapping=torch.arange(start, end),
            block_table=torch.tensor([[0, 1]], dtype=torch.int32),
            pieces=(piece,),
            num_tokens=end - start,
            slot_copies=((2, 6), (3, 7)) if index else (),
            binding=index,
        )
        trace.steps.append(TracedStep(0, 4, 2 + index, step, np.zeros((end - start, 2, 2), np.int32)))
    return trace


def forge(change: Callable[[dict, dict], None], trace: Trace | None = None) -> bytes:
    """The tiny trace with a change, and a digest that fits it."""
    arrays, metadata = unpack(pack_trace(trace or tiny()))
    metadata.pop("sha256")
    change(arrays, metadata)
    return pack(arrays, {"sha256": digest(arrays)} | metadata)


@pytest.mark.parametrize("policy", Policy)
def test_what_goes_in_comes_out(policy: Policy, tmp_path: Path) -> None:
    """Every tensor with its dtype, every piece, its history and every row is read as it was written."""
    trace = recorded(policy)
    write_trace(tmp_path / "a.trace", trace)
    again = read_trace(tmp_path / "a.trace")
    assert len(again.steps) == len(trace.steps) > 10
    for number, (one, got) in enumerate(zip(trace.steps, again.steps, strict=True)):
        assert (one.engine, one.block_size, one.blocks) == (got.engine, got.block_size, got.blocks)
        assert got.step.index == number
        assert np.array_equal(one.rows, got.rows)
        for name, tensor in one.step.arguments().items():
            other = got.step.arguments()[name]
            if tensor is None:
                assert other is None
            else:
                assert tensor.dtype == other.dtype, name
                assert torch.equal(tensor, other), name
        for piece, other in zip(one.step.pieces, got.step.pieces, strict=True):
            assert np.array_equal(piece.tokens, other.tokens)
            assert np.array_equal(piece.token_dead, other.token_dead)
            for at in range(max(0, piece.start - DEPTH), piece.start):
                assert (piece.stream[at], piece.dead[at]) == (other.stream[at], other.dead[at])
            plain = [
                field.name for field in fields(Piece) if field.name not in ("stream", "dead", "tokens", "token_dead")
            ]
            assert all(getattr(piece, name) == getattr(other, name) for name in plain)
    assert pack_trace(again) == (tmp_path / "a.trace").read_bytes()
    assert (again.name, again.config, again.engines) == (trace.name, trace.config, trace.engines)
    assert np.array_equal(again.token_map, trace.token_map)


@pytest.mark.parametrize("policy", Policy)
def test_equal_runs_are_equal_bytes(policy: Policy) -> None:
    """A second run of one seed gives the same file; another seed gives another."""
    assert pack_trace(recorded(policy)) == pack_trace(recorded(policy))
    assert pack_trace(recorded(policy)) != pack_trace(recorded(policy, seed=4))


def test_the_bytes_are_pinned() -> None:
    """The same content is the same file on every machine and version."""
    assert hashlib.sha256(pack_trace(tiny())).hexdigest() == TINY_DIGEST


def test_others_read_the_file(tmp_path: Path) -> None:
    """The safetensors library reads the same arrays, and the digest follows from them by the rule of the page."""
    write_trace(tmp_path / "a.trace", recorded(Policy.LAGGING))
    arrays, metadata = unpack((tmp_path / "a.trace").read_bytes())
    total = hashlib.sha256()
    with safe_open(tmp_path / "a.trace", "np") as file:
        assert file.metadata() == metadata
        assert metadata["format"] == "engram-trace"
        assert metadata["version"] == "1"
        names = sorted(file.keys(), key=lambda name: name.encode())
        assert names == sorted(arrays, key=str.encode)
        for name in names:
            array = file.get_tensor(name)
            assert array.dtype == arrays[name].dtype
            assert np.array_equal(array, arrays[name])
            kind = {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}[str(array.dtype)]
            total.update(f"{name} {kind} {','.join(str(size) for size in array.shape)}\n".encode() + array.tobytes())
    assert total.hexdigest() == metadata["sha256"]


def test_every_array_is_aligned() -> None:
    """An array begins at a multiple of its item, so that a C program may point at it."""
    data = pack_trace(recorded(Policy.SLOTS_ONLY))
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    for name, entry in header.items():
        if name != "__metadata__":
            assert (body + entry["data_offsets"][0]) % {"I64": 8, "I32": 4}.get(entry["dtype"], 1) == 0, name


def test_forks_bindings_and_far_positions_are_kept() -> None:
    """Slot copies, bindings and positions past 2^31 come back, the latter without a stream of that length."""
    first, second = unpack_trace(pack_trace(tiny())).steps
    assert (first.step.slot_copies, first.step.binding, first.blocks) == ((), 0, 2)
    assert (second.step.slot_copies, second.step.binding, second.blocks) == (((2, 6), (3, 7)), 1, 3)
    assert second.step.positions.tolist() == [2**31 + 4, 2**31 + 5]
    assert (second.step.pieces[0].offset, second.step.pieces[0].start) == (2**31, 4)
    assert unpack(pack_trace(tiny()))[0]["pieces"][1].tolist() == [1, 1, 2**31 + 4, 2, 1, 2]


def test_a_stream_knows_its_last_tokens_alone() -> None:
    """What the file does not hold of a stream is an error, not a guess."""
    stream = unpack_trace(pack_trace(recorded(Policy.LAGGING))).steps[-1].step.pieces[0].stream
    assert len(stream) > DEPTH + 1
    assert len(stream[len(stream) - DEPTH : len(stream)]) == DEPTH
    with pytest.raises(IndexError, match="what the trace holds"):
        stream[0]
    with pytest.raises(IndexError, match="what the trace holds"):
        stream[len(stream) - DEPTH - 1 :]


def test_a_step_without_rows_to_expect_is_no_trace() -> None:
    """Rows are written for every step or, in a file of inputs, for none."""
    trace = tiny()
    assert all(one.rows is None for one in unpack_trace(pack_trace(trace, with_rows=False)).steps)
    trace.steps[1] = replace(trace.steps[1], rows=None)
    with pytest.raises(ValueError, match="1/rows: got None"):
        pack_trace(trace)


def test_a_file_that_is_cut_short_is_refused() -> None:
    """No beginning of a trace is a trace, nor is one with bytes behind it."""
    data = pack_trace(tiny())
    for length in range(len(data)):
        with pytest.raises(Refused):
            unpack_trace(data[:length])
    with pytest.raises(Refused, match="file: got"):
        unpack_trace(data + b"\0")


def test_a_flipped_bit_is_refused() -> None:
    """A trace with any bit flipped is refused (every third bit is tried)."""
    data = pack_trace(tiny())
    for bit in range(0, 8 * len(data), 3):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Refused):
            unpack_trace(bytes(damaged))


def _set(name: str, value: object) -> Callable[[dict, dict], None]:
    return lambda arrays, metadata: arrays.update({name: value})


def _drop(name: str) -> Callable[[dict, dict], None]:
    return lambda arrays, metadata: arrays.pop(name)


def _meta(**values: str) -> Callable[[dict, dict], None]:
    return lambda arrays, metadata: metadata.update(values)


def _edit(name: str, *at: int, value: int) -> Callable[[dict, dict], None]:
    return lambda arrays, metadata: arrays[name].__setitem__(at, value)


def _tell(key: str, value: object) -> Callable[[dict, dict], None]:
    def change(arrays: dict, metadata: dict) -> None:
        story = json.loads(arrays["story"].tobytes()) | {key: value}
        arrays["story"] = np.frombuffer(json.dumps(story).encode(), np.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_meta(format="other"), "format: got 'other', expected 'engram-trace'"),
        (_meta(version="2"), "version: got '2', expected '1'"),
        (_meta(sha256="0"), "sha256: got '0', expected"),
        (_meta(more="x"), "__metadata__: got more"),
        (_set("extra", np.zeros(1, np.int64)), "extra: got 1 arrays that no trace has"),
        (_set("2/input_ids", np.zeros(1, np.int64)), "2/input_ids: got 1 arrays"),
        (_set("0/positions", np.arange(4, dtype=np.uint8)), "0/positions: got uint8, expected int32 or int64"),
        (_set("1/positions", np.arange(4)), r"1/positions: got shape \[4\], expected \[2\]"),
        (_set("1/rows", np.zeros((2, 2, 3), np.int32)), r"1/rows: got shape \[2, 2, 3\], expected \[2, 2, 2\]"),
        (_set("1/slot_copies", np.zeros((2, 3), np.int64)), r"1/slot_copies: got shape \[2, 3\]"),
        (_set("multipliers", np.ones((2, 1), np.int64)), "multipliers: got N 1"),
        (_set("steps", np.zeros((0, 4), np.int64)), "steps: got none"),
        (_set("story", np.frombuffer(b"{", np.uint8)), "story: got bytes that are no JSON"),
        (_set("story", np.frombuffer(b"{}", np.uint8)), "story: got"),
        (_edit("steps", 0, 0, value=-1), "steps: got -1"),
        (_edit("steps", 0, 3, value=2), "steps: got engine 0 with falling bindings"),
        (_edit("steps", 0, 1, value=2), "steps: got engine 0 with falling bindings or two block sizes"),
        (_edit("steps", 0, 3, value=1), "steps: got engine 0 with another number of blocks"),
        (_edit("pieces", 1, 0, value=0), "pieces: got lengths"),
        (_edit("pieces", 1, 0, value=2), "pieces: got steps"),
        (_edit("pieces", 0, 0, value=1), "pieces: got lengths"),
        (_edit("pieces", 0, 3, value=3), r"pieces: got lengths \[3\] in step 0, expected \[4\]"),
        (_edit("pieces", 0, 2, value=2**31 + 1), "pieces: got start 2147483649"),
        (_edit("pieces", 0, 4, value=5), "pieces: got start .* and 5 drafts"),
        (_edit("0/query_start_loc", 0, value=1), "0/query_start_loc: got"),
        (_edit("0/query_start_loc", 1, value=5), "0/query_start_loc: got"),
        (_edit("token_map", 0, value=9), "token_map: got SHA-256"),
        (_tell("name", 3), "story.name: got int, expected str"),
        (_tell("token_map", {}), "story.token_map: got"),
        (_tell("events", []), "events: got those of 0 pieces, expected 2"),
        (_tell("events", ["chunk", "chunk"]), "events: got what is no list"),
        (_tell("step_extras", {"0": {"gravity": 1}}), "extras: got 'gravity' of step 0"),
        (_tell("piece_extras", {"1": {"gravity": 1}}), "extras: got 'gravity' of piece 1"),
        (_tell("piece_extras", {"one": {}}), "story.piece_extras: got"),
        *(
            (_drop(name), f"{name}: missing")
            for name in sorted(unpack(pack_trace(tiny()))[0])
            if not name.endswith("slot_copies")
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_trace_is_named(change: Callable[[dict, dict], None], message: str) -> None:
    """A trace that is of another version, incomplete, misshapen or in contradiction is refused by name."""
    with pytest.raises(Refused, match=message):
        unpack_trace(forge(change))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[]", "header: got list"),
        ('{"a":1}', "a: got 1, expected dtype, shape and two data_offsets"),
        ('{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}', "a: got dtype F16"),
        ('{"a":{"dtype":"I32","shape":[2],"data_offsets":[0,4]}}', "a: got 4 bytes"),
        ('{"a":{"dtype":"I32","shape":[-1],"data_offsets":[0,4]}}', "a: got {"),
        ('{"a":{"dtype":"I32","shape":[0],"data_offsets":[0,0]}}', "file: got 4 bytes of data, expected 0"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', "a: got data from byte 2 on, expected 0"),
        ('{"a":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}', "a: got a byte above 1"),
        ('{"a":{},"a":{}}', "a: got the name twice"),
        ('{"__metadata__":{"a":1}}', "__metadata__: got"),
    ],
)
def test_a_header_that_fits_nothing_is_refused(header: str, message: str) -> None:
    """The layout itself is checked: types, sizes, gaps, names."""
    text = header.encode()
    with pytest.raises(Refused, match=message):
        unpack(len(text).to_bytes(8, "little") + text + b"\2\0\0\0")


def test_the_name_of_the_file_is_in_the_refusal(tmp_path: Path) -> None:
    """Whoever reads many traces learns which one it was."""
    (tmp_path / "short.trace").write_bytes(b"12345")
    with pytest.raises(Refused, match=r"short\.trace: file: got 5 bytes"):
        read_trace(tmp_path / "short.trace")
