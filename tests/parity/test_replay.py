"""Recorded runs, played on implementations in this process and in others."""

import dataclasses
import hashlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given

from parity.__main__ import main
from parity.actions import Action
from parity.corpus import Corpus, encoder, read_texts
from parity.player import check_rows, constants, replay, replay_command, world_of
from parity.protocol import Implementation, load_implementation
from parity.record import record, record_run
from parity.runs import all_runs
from parity.strategies import Shape, workloads
from parity.workload import Workload, run
from parity.world import World, toy
from reference.hash_state import HashState
from serving.step import Piece, Step
from serving.tensor_file import Refused, unpack
from serving.trace import Trace, TracedStep, map_digest, pack_trace, write_trace
from serving.trace_reader import read_trace, unpack_trace

CPU = torch.device("cpu")
RUNS = (
    "stateless",
    "prompt only",
    "known ids",
    "lagging",
    "slots only",
    "another pad",
    "tokens alike",
    "one-token blocks",
    "large blocks",
)
TOY = toy()
PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
DIGESTS = {
    "stateless": "a4814e17581c364c",
    "prompt only": "1c252613cb27b12e",
    "known ids": "994c27edd3d0c7b4",
    "lagging": "5643f92f10f98c3a",
    "slots only": "8d2b3f4e3636ad2c",
    "another pad": "b068645c3cfa12ea",
    "tokens alike": "fa7d545c82cd1837",
    "one-token blocks": "2199789c7d242015",
    "large blocks": "9be09ed28ab3d077",
    "flash": "4ae407bc0b6bada8",
}
WRONG_PORT = '''
"""A port that writes no slot for a token at the end of a block."""
from reference.hash_state import HashState as Right


class HashState(Right):
    def forward(self, input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
                slot_mapping, block_table):
        slots = slot_mapping.where(slot_mapping % self.block_size != self.block_size - 1, -1)
        return super().forward(input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
                               slots, block_table)
'''


@pytest.fixture(scope="module")
def traces(worlds: dict[str, World]) -> dict[str, Trace]:
    """Each run of the main job over bytes, and one of the published model."""
    toy, flash = worlds["toy"], worlds["flash"]
    corpus = Corpus(read_texts(), encoder(toy, None), toy)
    found = {one.name: record_run(one, corpus, rows=400, seed=5) for one in all_runs(toy)}
    lagging = next(one for one in all_runs(flash) if one.name == "lagging")
    return found | {"flash": record_run(lagging, Corpus(read_texts(), encoder(flash, None), flash), rows=300, seed=1)}


@pytest.fixture
def port(tmp_path: Path) -> Path:
    """The program that docs/traces.md shows."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "port.py").write_text(program, encoding="utf-8")
    return tmp_path / "port.py"


def command(port: Path) -> str:
    """The command line that runs it."""
    return f"'{sys.executable}' '{port}' {{inputs}} {{outputs}}"


def by_hand(world: World) -> Trace:
    """A request, a fork that goes on from copied slots, another KV cache, a dead token in the window, a dummy step."""
    stream, none = np.array([65, 66, 67, 68, 69, 70, 71], np.int64), [-1, -1]
    config, digest = dataclasses.asdict(world.config), map_digest(world.token_map)
    trace = Trace("by hand", config, [], world.token_map, None, digest, constants(world))
    copies = ((0, 4), (1, 5), (2, 6))
    plan = [
        (0, 0, 3, 0, (), [[0]], none),
        (1, 3, 5, 0, copies, [[1, 2]], none),
        (0, 0, 7, 1, (), [[3, 0]], none),
        (2, 2, 4, 1, (), [[1]], [66, 65]),
        (3, 0, 0, 1, (), [[0]], none),
    ]
    for index, (request, start, end, binding, copied, table, window) in enumerate(plan):
        tokens, dead = stream[start:end], np.arange(7) == (0 if request == 2 else 9)
        positions = np.arange(start, end)
        piece = Piece(request, stream, dead, start, tokens, dead[start:end], 0, 1, frozenset({"decode"}))
        step = Step(
            index=index,
            input_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            dead_mask=torch.from_numpy(dead[start:end]),
            lookback_token_ids=torch.tensor([window]),
            lookback_dead_mask=torch.tensor([window]) == 65,
            slot_mapping=torch.from_numpy(np.array(table)[0][positions // 4] * 4 + positions % 4),
            block_table=torch.tensor(table, dtype=torch.int32),
            pieces=(piece,) if end > start else (),
            num_tokens=end - start,
            slot_copies=copied,
            binding=binding,
        )
        trace.steps.append(TracedStep(0, 4, 3 + binding, step, world.alone(stream, dead)[start:end]))
    return trace


@pytest.mark.parametrize("name", [*RUNS, "flash"])
def test_the_reference_agrees_with_every_recorded_run(name: str, traces: dict[str, Trace]) -> None:
    """A run that went through its file gives a right state all rows right, and the file is the same again."""
    data = pack_trace(traces[name])
    trace = unpack_trace(data)
    world = world_of(trace)
    check_rows(trace, world, CPU)
    outcome = replay(trace, world, load_implementation("reference"), CPU)
    assert outcome.equal
    assert sum(len(one) for one in outcome.wrong) == trace.num_rows >= 300
    assert pack_trace(trace) == data


@pytest.mark.parametrize("name", [*RUNS, "flash"])
def test_expected_rows_follow_from_the_file_alone(name: str, traces: dict[str, Trace]) -> None:
    """Every row is the hash of its token and history by the formula, in plain integers, from the arrays of the file."""
    trace = traces[name]
    arrays, _ = unpack(pack_trace(trace, token_map=world_of(trace).token_map))
    config = json.loads(arrays["story"].tobytes())["config"]
    compress = arrays["token_map"].tolist()
    pad = compress[config["engram_pad_token_id"]]
    multipliers, primes, offsets = (arrays[key].tolist() for key in ("multipliers", "primes", "offsets"))
    begins: dict[int, int] = {}
    checked = 0
    for at, (step, _, start, length, _, _) in enumerate(arrays["pieces"].tolist()):
        begin = begins.get(step, 0)
        begins[step] = begin + length
        before = [
            (token, dead) for token, dead in zip(arrays["history_ids"][at], arrays["history_dead"][at], strict=True)
        ]
        ids, dead_mask = arrays[f"{step}/input_ids"], arrays[f"{step}/dead_mask"]
        for place in {0, 1, 2, 3, length - 1} & set(range(length)):
            assert arrays[f"{step}/positions"][begin + place] == start + place
            past = [(ids[t], dead_mask[t]) for t in range(begin + place, begin - 1, -1)] + before
            values, blocked = [], False
            for token, dead in past[: len(multipliers[0])]:
                blocked = blocked or dead or token < 0
                values.append(pad if blocked else compress[token])
            for layer, row in enumerate(arrays[f"{step}/rows"][begin + place].tolist()):
                mixes, mix = [], 0
                for value, factor in zip(values, multipliers[layer], strict=True):
                    mix ^= value * factor
                    mixes.append(mix)
                heads = config["engram_n_heads"]
                want = [mixes[1 + c // heads] % primes[layer][c] + offsets[layer][c] for c in range(len(primes[layer]))]
                assert row == want
            checked += 1
    assert checked >= len(arrays["pieces"])


@pytest.mark.parametrize("name", [*RUNS, "flash"])
def test_the_port_on_the_page_is_right(name: str, traces: dict[str, Trace], port: Path) -> None:
    """The program of docs/traces.md, run as another process, gives all rows right in every way."""
    outcome = replay_command(traces[name], world_of(traces[name]), command(port))
    assert outcome.reason is None
    assert outcome.equal


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("q < 0 or source < 0", "q < 0"),
        ("blocked = blocked or", "blocked ="),
        ("first - 1 - q]]\n", "first - 2 - q]]\n"),
        ("source = -1 if dead else", "source ="),
        ("q // block_size] * block_size", "0] * block_size"),
        ("for t in range(live):\n            if", "for t in range(live - 1):\n            if"),
        ("pad = token_map[", "pad = np.arange(999)["),
        ("bound.get(engine) != binding", "engine not in bound"),
        ("slots[engine][targets] =", "_ ="),
    ],
)
def test_a_port_with_a_mistake_is_caught(right: str, wrong: str, worlds: dict[str, World], port: Path) -> None:
    """Each mistake planted in the program of the page makes some trace unequal."""
    program = port.read_text(encoding="utf-8")
    assert program.count(right) == 1, right
    port.write_text(program.replace(right, wrong), encoding="utf-8")
    toy = worlds["toy"]
    corpus = Corpus(read_texts(), encoder(toy, None), toy)
    runs = [one for one in all_runs(toy) if one.name == "slots only"]
    tried = [by_hand(toy), *(record_run(one, corpus, rows=500, seed=2) for one in runs)]
    outcomes = [replay_command(trace, toy, command(port)) for trace in tried]
    if "bound" in wrong:  # the new KV cache is larger than the slots that the port kept
        assert "IndexError" in (outcomes[0].reason or "")
    else:
        assert [one.reason for one in outcomes] == [None, None]
        assert any(one.first is not None for one in outcomes)


def test_copied_slots_and_new_bindings_are_played(worlds: dict[str, World], port: Path) -> None:
    """A fork reads copied slots, and a new KV cache is bound with its own size; without either a row is wrong."""
    trace, toy = by_hand(worlds["toy"]), worlds["toy"]
    reference = load_implementation("reference")
    assert replay(trace, toy, reference, CPU).equal
    assert replay_command(trace, toy, command(port)).equal
    assert pack_trace(unpack_trace(pack_trace(trace))) == pack_trace(trace)
    second = replace(trace.steps[1], step=replace(trace.steps[1].step, slot_copies=()))
    without = replace(trace, steps=[trace.steps[0], second, *trace.steps[2:]])
    outcome = replay(without, toy, reference, CPU)
    assert outcome.first is not None
    assert (outcome.first.step.index, outcome.first.index) == (1, 0)

    bound = []

    class Spy(HashState):
        def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
            bound.append(kv_cache)
            return super().ensure_cache(kv_cache)

    assert replay(trace, toy, Implementation("spy", type("Port", (), {"HashState": Spy})), CPU).equal
    assert [len(one) for one in bound] == [3, 3, 4, 4, 4]
    assert bound[0] is bound[1] is not bound[2] is bound[3]


def test_a_wrong_state_fails_the_replay_and_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: record, replay rightly with status 0, wrongly with 1, the row and its slot named."""
    (tmp_path / "forgetful_port.py").write_text(WRONG_PORT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(tmp_path / "a.trace")
    assert main(["record", path, "--run", "slots only", "--rows", "400", "--seed", "3", "--config", "toy"]) == 0
    assert "rows in" in capsys.readouterr().out
    assert main(["replay", path, "--impl", "reference", "--device", "cpu"]) == 0
    assert "all equal" in capsys.readouterr().out
    assert main(["replay", path, "--impl", "reference", "--impl", "forgetful_port", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "reference:" in printed
    assert "forgetful_port: first wrong row in run 'slots only', engine" in printed
    assert re.search(r"request \d+, position \d+", printed)
    assert re.search(r"look back 1: position \d+ from slot \d+ \(block \d+\)", printed)
    assert re.search(r"NOT EQUAL {2}forgetful_port: [\d,]+ of [\d,]+ live rows differ", printed)
    assert f"REPRO: python -m parity replay {path} --device cpu --impl forgetful_port" in printed


def test_the_first_wrong_row_is_the_first(traces: dict[str, Trace]) -> None:
    """The row that is explained is the first of all that differ, and what came is what the implementation gave."""

    class Off(HashState):
        def forward(self, *step: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            return super().forward(*step, **named).where(named["positions"][:, None, None] < 40, 0)

    trace = traces["lagging"]
    outcome = replay(trace, world_of(trace), Implementation("off", type("Port", (), {"HashState": Off})), CPU)
    wrong = [one.step.positions[: one.step.num_tokens].numpy() >= 40 for one in trace.steps]
    assert [one.tolist() for one in outcome.wrong] == [one.tolist() for one in wrong]
    first = next(number for number, one in enumerate(wrong) if one.any())
    assert outcome.first is not None
    assert outcome.first.step is trace.steps[first].step
    row = int(np.flatnonzero(wrong[first])[0])
    assert outcome.first.piece.start + outcome.first.index == trace.steps[first].step.positions[row]
    assert (outcome.first.got == 0).all()
    assert np.array_equal(outcome.first.expected, trace.steps[first].rows[row])


def test_tokens_in_disguise_are_recorded_in_disguise(traces: dict[str, Trace], worlds: dict[str, World]) -> None:
    """A run of tokens alike is the run under other ids, and has the same rows."""
    toy, differ = worlds["toy"], 0
    corpus = Corpus(read_texts(), encoder(toy, None), toy)
    disguised = next(one for one in all_runs(toy) if one.alike)
    plain = record_run(replace(disguised, alike=False), corpus, rows=400, seed=5)
    for one, other in zip(plain.steps, traces[disguised.name].steps, strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(toy.alike[one.step.input_ids.numpy()], other.step.input_ids.numpy())
        differ += int((one.step.input_ids != other.step.input_ids).sum())
    assert differ > 50


def test_an_implementation_cannot_spoil_the_trace(traces: dict[str, Trace]) -> None:
    """What an implementation does to its tensors is its own affair: the next one gets them as they were."""

    class Spoiler(HashState):
        def forward(self, *step: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            rows = super().forward(*step, **named)
            for tensor in named.values():
                if tensor is not None:
                    tensor.zero_()
            return rows

    trace = traces["slots only"]
    before = pack_trace(trace)
    assert replay(trace, world_of(trace), Implementation("s", type("Port", (), {"HashState": Spoiler})), CPU).equal
    assert pack_trace(trace) == before


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('out of luck')", "ended with status 1: out of luck"),
        ("pass", "outputs: .*No such file"),
        ("open(sys.argv[2], 'wb').write(b'123')", "outputs: file: got 3 bytes"),
        ("save_file({}, sys.argv[2])", "0/rows: missing"),
        ("save_zeros((999, 2, 4), np.int64)", "0/rows: got int64"),
        ("save_zeros((999, 2, 5), np.int32)", r"0/rows: got int32 of \[999, 2, 5\]"),
        ("save_zeros((0, 2, 4), np.int32)", r"0/rows: got int32 of \[0, 2, 4\]"),
        ("import time; time.sleep(60)", "took more than"),
    ],
)  # fmt: skip
def test_a_command_that_gives_no_rows_fails(
    program: str, reason: str, traces: dict[str, Trace], tmp_path: Path
) -> None:
    """A crash, a missing or misshapen array and a program that hangs are named; none of them is a pass."""
    head = "import sys\nimport numpy as np\nfrom safetensors.numpy import save_file\n"
    head += "def save_zeros(shape, dtype):\n"
    head += "    save_file({f'{s}/rows': np.zeros(shape, dtype) for s in range(99)}, sys.argv[2])\n"
    (tmp_path / "broken.py").write_text(head + program, encoding="utf-8")
    timeout = 2 if "sleep" in program else None
    outcome = replay_command(traces["lagging"], world_of(traces["lagging"]), command(tmp_path / "broken.py"), timeout)
    assert not outcome.equal
    assert re.search(reason, outcome.reason or ""), outcome.reason


def test_a_command_never_sees_the_rows(traces: dict[str, Trace], tmp_path: Path) -> None:
    """The inputs hold the whole trace with its map, but not what is expected; padded rows may come back."""
    trace = traces["flash"]
    assert "token_map" not in unpack(pack_trace(trace))[0]
    (tmp_path / "copy.py").write_text("import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])", encoding="utf-8")
    outcome = replay_command(trace, world_of(trace), command(tmp_path / "copy.py"))
    assert outcome.reason == "0/rows: missing, expected the rows of every step"
    inputs = unpack(pack_trace(trace, with_rows=False, token_map=world_of(trace).token_map))[0]
    assert map_digest(inputs["token_map"]) == trace.token_map_sha256
    assert not any(name.endswith("rows") for name in inputs)


def test_a_command_without_places_is_refused(traces: dict[str, Trace]) -> None:
    """The command line has to say where the paths go."""
    trace, world = traces["lagging"], world_of(traces["lagging"])
    with pytest.raises(ValueError, match=r"command: got 'port \{inputs\}', expected \{outputs\}"):
        replay_command(trace, world, "port {inputs}")
    absent = replay_command(trace, world, "./nothing {inputs} {outputs}")
    assert absent.reason == "./nothing: got 'No such file or directory', expected a program"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {}}, "config: "),
        ({"config": {"engram_n_heads": 3}}, "config: |expected"),
        ({"token_map": None, "token_map_name": "nobody's"}, 'token_map: got the name "nobody\'s"'),
        ({"token_map": None, "token_map_name": "deepseek-v4.1-flash"}, "token_map: got SHA-256 c60a8632"),
        ({"token_map": np.arange(256, dtype=np.int32)}, "token_map: got SHA-256"),
    ],
)
def test_a_trace_in_contradiction_is_refused(change: dict, message: str, traces: dict[str, Trace]) -> None:
    """Configuration and map must be those that the trace says."""
    with pytest.raises(Refused, match=message):
        world_of(replace(traces["lagging"], **change))


@pytest.mark.parametrize("name", ["multipliers", "primes", "offsets"])
def test_constants_follow_from_the_configuration(name: str, traces: dict[str, Trace]) -> None:
    """Constants that are not those of the configuration are refused."""
    constants = dict(traces["lagging"].constants)
    constants[name] = constants[name] + 2
    with pytest.raises(Refused, match=f"{name}: got other values"):
        world_of(replace(traces["lagging"], constants=constants))


def test_a_wrong_trace_accuses_nobody(traces: dict[str, Trace], tmp_path: Path) -> None:
    """Rows that do not follow from the tokens, and inputs without rows, are refused with status 2."""
    trace = traces["lagging"]
    number = next(number for number, one in enumerate(trace.steps) if one.step.num_tokens > 3)
    rows = trace.steps[number].rows.copy()
    rows[3, 1, 2] += 1
    steps = list(trace.steps)
    steps[number] = replace(steps[number], rows=rows)
    write_trace(tmp_path / "wrong.trace", replace(trace, steps=steps))
    wrong = read_trace(tmp_path / "wrong.trace")
    with pytest.raises(Refused, match=f"{number}/rows: got rows that do not follow"):
        check_rows(wrong, world_of(wrong), CPU)
    (tmp_path / "inputs.trace").write_bytes(pack_trace(trace, with_rows=False))
    with pytest.raises(Refused, match="rows: missing"):
        check_rows(read_trace(tmp_path / "inputs.trace"), world_of(trace), CPU)
    for name in ("wrong.trace", "inputs.trace", "absent.trace"):
        with pytest.raises(SystemExit) as exit_info:
            main(["replay", str(tmp_path / name), "--impl", "reference", "--device", "cpu"])
        assert exit_info.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "nothing"], "run: got 'nothing', expected one of"),
        (["--rows", "0"], "rows, seed: got 0"),
        (["--config", "missing.json"], "missing.json"),
    ],
)
def test_bad_options_of_record_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option exits 2, says what was expected, and writes nothing."""
    with pytest.raises(SystemExit) as exit_info:
        main(["record", str(tmp_path / "a.trace"), *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_second_recording_is_the_same_file(traces: dict[str, Trace], worlds: dict[str, World]) -> None:
    """The same run, rows and seed give the same bytes, and another seed gives others."""
    toy = worlds["toy"]
    corpus = Corpus(read_texts(), encoder(toy, None), toy)
    for one in all_runs(toy):
        assert pack_trace(record_run(one, corpus, rows=400, seed=5)) == pack_trace(traces[one.name])
        assert pack_trace(record_run(one, corpus, rows=400, seed=6)) != pack_trace(traces[one.name])


def test_recorded_runs_are_pinned(traces: dict[str, Trace]) -> None:
    """A seed gives the same file on every machine and version; a change of engine, texts or format shows here."""
    assert {name: hashlib.sha256(pack_trace(traces[name])).hexdigest()[:16] for name in DIGESTS} == DIGESTS


@given(workload=workloads(TOY, Shape(prompts=(1, 4), actions=tuple(Action), features=True)))
def test_any_run_goes_through_its_file(workload: Workload) -> None:
    """Whatever befell an engine, its run is read as it was written, and the reference agrees with it."""
    trace = record("drawn", TOY, run(workload, TOY.vocabulary))
    data = pack_trace(trace)
    again = unpack_trace(data)
    assert pack_trace(again) == data
    for one, other in zip(trace.steps, again.steps, strict=True):
        assert one.step.slot_copies == other.step.slot_copies
        assert (one.step.binding, one.step.events) == (other.step.binding, other.step.events)
        for piece, same in zip(one.step.pieces, other.step.pieces, strict=True):
            for name in ("request_id", "start", "offset", "handle", "num_drafts", "num_sampled", "events"):
                assert getattr(piece, name) == getattr(same, name), name
    check_rows(again, world_of(again), CPU)
    assert replay(again, world_of(again), load_implementation("reference"), CPU).equal


def test_ten_thousand_rows_load_in_a_second(traces: dict[str, Trace], tmp_path: Path) -> None:
    """A trace of 10,000 rows and more, of many small steps, is read and checked in under a second of processor time."""
    steps = [one for one in traces["flash"].steps if one.engine == 0]
    times = -(-10_000 // sum(one.step.num_tokens for one in steps))
    many = replace(traces["flash"], steps=[replace(one, engine=at) for at in range(times) for one in steps])
    write_trace(tmp_path / "large.trace", many)
    begin = time.process_time()
    assert read_trace(tmp_path / "large.trace").num_rows >= 10_000
    assert time.process_time() - begin < 1


@pytest.mark.gpu
def test_the_device_replays_as_the_host_does(traces: dict[str, Trace], device: torch.device) -> None:
    """Kernels on the GPU give every row of every recorded run."""
    for name, trace in traces.items():
        assert replay(trace, world_of(trace), load_implementation("optimized"), device).equal, name


def test_the_kernels_replay_a_trace(traces: dict[str, Trace], device: torch.device) -> None:
    """The optimized state gives every row of a recorded run with slots."""
    trace = traces["lagging"]
    short = replace(trace, steps=trace.steps[:12])
    assert replay(short, world_of(trace), load_implementation("optimized"), device).equal
