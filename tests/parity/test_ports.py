"""Ports from outside: the examples obey the laws, mistakes in them are caught, and the command line is strict."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings

from parity.actions import Action
from parity.adapter import PortLayout
from parity.compare import Comparison
from parity.corpus import Corpus, encoder, read_texts
from parity.expected import outcomes, read_expected_failures, without_expected
from parity.finding import Finding
from parity.laws import LAWS, Bench, Law, LawBroken
from parity.player import replay_command, world_of
from parity.protocol import OFFERED, Implementation, load_implementation
from parity.record import record, record_run
from parity.runs import all_runs
from parity.strategies import Shape, workloads
from parity.workload import Workload, run
from parity.world import World, toy
from serving.trace import Trace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
FORTY, IN_C = ROOT / "examples" / "port_in_40_lines.py", ROOT / "examples" / "port.c"
CPU = torch.device("cpu")
TOY = toy()
# What is right, what is wrong in its place, and the law that tells them apart.
MISTAKES = {
    "no latch": ("blocked = blocked | (q < 0)", "blocked = (q < 0)", "dead_span"),
    "window turned round": ("- k, (k - 1 - place)", "- k, (orders - k + place)", "chunks"),
    "first request's blocks": ("block_table[request, at", "block_table[0 * request, at", "company"),
    "pad not compressed": ("int(self.map[config.engram_pad_token_id])", "config.engram_pad_token_id", "agreement"),
    "slot beside": ("+ at % self.block_size", "+ (at + 1) % self.block_size", "prefix_hit"),
}
MISTAKES_IN_C = [
    ("blocked |= q < 0", "blocked = q < 0"),
    ("layer * n + k)", "layer * n + n - 1 - k)"),
    ("r * depth + first - 1 - q", "r * depth + depth - first + q"),
    ("at(table, r * table.shape[1]", "at(table, 0 * table.shape[1]"),
    ("slot[at(copies, 2 * i + 1)] = read[i]", "slot[at(copies, 2 * i)] = read[i]"),
    ("+ at(offsets, i))", "+ 0 * at(offsets, i))"),
]  # fmt: skip


@pytest.fixture(scope="module")
def forty() -> Implementation:
    """The port in forty lines."""
    return load_implementation("examples.port_in_40_lines")


@pytest.fixture(scope="module")
def traces(worlds: dict[str, World]) -> list[Trace]:
    """Every run of the main job, over bytes."""
    world = worlds["toy"]
    corpus = Corpus(read_texts(), encoder(world, None), world)
    return [record_run(one, corpus, rows=300, seed=3) for one in all_runs(world)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Compile a program in C and give the command line that runs it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc")
    folder = tmp_path_factory.mktemp("c")

    def build(source: str) -> str:
        path = folder / f"port{len(list(folder.iterdir()))}.c"
        path.write_text(source, encoding="utf-8")
        options = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(path.with_suffix(""))]
        subprocess.run([compiler, *options, str(path)], check=True)
        return f"'{path.with_suffix('')}' {{inputs}} {{outputs}}"

    return build


@pytest.fixture(scope="module")
def program_in_c(compiled) -> str:
    """The command line of the example."""
    return compiled(IN_C.read_text(encoding="utf-8"))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_port_in_forty_lines_obeys_every_law(law: Law, forty: Implementation, worlds) -> None:
    """With other integers, other axes and numbers within buckets, all by its three declarations."""
    _hold(law, Bench(worlds["another_pad"], forty, CPU), max(4, settings().max_examples // 10))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_port_is_caught_by_the_law_that_names_it(name: str, worlds) -> None:
    """The example does not pass because nobody looks."""
    right, wrong, law_name = MISTAKES[name]
    source = FORTY.read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    module: dict[str, object] = {}
    exec(compile(source.replace(right, wrong), name, "exec"), module)
    law = next(one for one in LAWS if one.name == law_name)
    port = Implementation(name, SimpleNamespace(**{key: module[key] for key in ("HashState", "ENGRAM_PORT")}))
    with pytest.raises((LawBroken, IndexError)):
        _hold(law, Bench(worlds["another_pad"], port, CPU), 200)


def test_without_its_declarations_the_port_is_wrong(forty: Implementation, worlds) -> None:
    """What the adapter does is not done elsewhere too."""
    for missing in ("rows", "local_ids"):
        declared = {key: value for key, value in forty.root.ENGRAM_PORT.items() if key != missing}
        port = Implementation("bare", SimpleNamespace(HashState=forty.root.HashState, ENGRAM_PORT=declared))
        law = next(one for one in LAWS if one.name == "chunks")
        with pytest.raises((LawBroken, ValueError)):
            _hold(law, Bench(worlds["flash"], port, CPU), 4)


def test_the_port_in_c_agrees_with_every_run(traces: list[Trace], program_in_c: str) -> None:
    """A process that shares nothing with this one gives every row."""
    for trace in traces:
        outcome = replay_command(trace, world_of(trace), program_in_c, 60)
        assert outcome.equal, (trace.name, outcome.reason, outcome.first)


def test_the_port_in_c_agrees_whatever_befell_an_engine(program_in_c: str) -> None:
    """Forks, other KV caches, dummy steps, splits: drawn."""

    @settings(max_examples=max(10, settings().max_examples // 4))
    @given(workload=workloads(TOY, Shape(prompts=(1, 4), actions=tuple(Action), features=True)))
    def holds(workload: Workload) -> None:
        trace = record("drawn", TOY, run(workload, TOY.vocabulary))
        assert replay_command(trace, world_of(trace), program_in_c, 60).equal

    holds()


@pytest.mark.parametrize(("right", "wrong"), MISTAKES_IN_C)
def test_a_mistake_in_the_port_in_c_is_caught(right: str, wrong: str, traces: list[Trace], compiled) -> None:
    """Some run shows every one of them as rows that differ, not as a failure to answer."""
    source = IN_C.read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    program = compiled(source.replace(right, wrong))
    found = [replay_command(trace, world_of(trace), program, 60) for trace in traces]
    assert any(one.first is not None for one in found)
    assert all(one.reason is None for one in found)


def test_a_program_that_cannot_read_says_so(traces: list[Trace], program_in_c: str, tmp_path: Path) -> None:
    """A missing array is a status and a name, which the replay shows."""
    program = program_in_c.split("'")[1]
    (tmp_path / "empty").write_bytes((2).to_bytes(8, "little") + b"{}")
    for path, message in (("empty", "token_map"), ("nothing", "cannot open the inputs")):
        done = subprocess.run([program, str(tmp_path / path), str(tmp_path / "out")], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr == f"port: {message}\n"
    outcome = replay_command(traces[0], world_of(traces[0]), f"'{program}' {{inputs}}x {{outputs}}", 60)
    assert outcome.reason == "the command ended with status 1: port: cannot open the inputs"


LIST = """
# a port of ours
tests/parity/test_laws.py::test_law_holds_on_the_implementation_under_test[1-chunks] | window turned round | tracker#1
tests/parity/test_laws.py::test_law_holds_on_the_implementation_under_test[9-compression] | not at all | tracker#2
"""


@pytest.fixture
def judged(tmp_path: Path):
    """Run pytest on a port and a list of expected failures; give the status and what was printed."""

    def run_pytest(port: str, expected: str | None = None, *words: str) -> tuple[int, str]:
        (tmp_path / "stranger.py").write_text(port, encoding="utf-8")
        if expected is not None:
            (tmp_path / "expected.txt").write_text(expected, encoding="utf-8")
            words = (*words, "--expected-failures", str(tmp_path / "expected.txt"))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--device", "cpu"]
        command += ["--impl", "stranger", "-m", "port", "tests/parity/test_laws.py", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return run_pytest


def test_expected_failures_fail_and_an_unexpected_pass_fails_the_run(judged) -> None:
    """Strict in both directions, and the header says on what the port was judged."""
    right, wrong, _ = MISTAKES["window turned round"]
    port = FORTY.read_text(encoding="utf-8").replace(right, wrong) + '\n__version__ = "0.7"\n'
    status, text = judged(port, LIST, "-k", "chunks or compression", "--seed", "4", "--profile", "mutation")
    assert status == 1
    assert "1 failed" in text
    assert "1 xfailed" in text
    assert "[XPASS(strict)] not at all (tracker#2)" in text
    header = " ".join(line for line in text.splitlines() if line.startswith("engram parity"))
    offered = "stranger 0.7; offers hash_state.HashState; lacks token_map.build_token_map"
    where = ("device cpu, profile", "seed 4", "Python 3.", "torch ", "triton ", "numpy ", "2 failures are expected")
    for word in (offered, "PortLayout(ids='int64'", *where):
        assert word in header, word


def test_a_stale_line_aborts(judged) -> None:
    """The id of a test that there is not stops the run before it begins."""
    line = "tests/parity/test_laws.py::test_law_holds_on_the_implementation_under_test[1-chunk] | renamed | tracker#3"
    status, text = judged(FORTY.read_text(encoding="utf-8"), line)
    assert status == 4
    assert "[1-chunk]', expected the id of a test that there is" in text


def test_what_a_port_lacks_is_skipped_and_counted(judged) -> None:
    """No law of hashing passes on a port that hashes nothing."""
    status, text = judged("from reference.gate import engram_gate\n")
    assert status == 0
    assert " passed" not in text
    count = re.search(r"NOT JUDGED: hash_state.HashState, which --impl lacks: (\d+) tests skipped", text)
    assert count
    assert int(count[1]) == len(LAWS)


def test_a_port_that_is_called_otherwise_is_refused_before_any_test(judged) -> None:
    """The status is that of a wrong command line, and the difference is shown."""
    status, text = judged(FORTY.read_text(encoding="utf-8").replace("block_table", "table"))
    assert status == 4
    assert "stranger: HashState.forward: got (input_ids, " in text
    assert text.rstrip().endswith("lacks block_table; asks for table, which nobody gives")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hash/lagging | only a reason", r":1: got 'hash/lagging \| only a reason', expected `id \| reason \| issue`"),
        ("\na | b | c\n#\na | d | e", r":4: got 'a' again, expected every id once"),
        ("a |  | c", r":1: got 'a \|  \| c'"),
    ],
)
def test_a_line_without_reason_or_issue_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """What nobody explains is not expected."""
    (tmp_path / "list").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_expected_failures(tmp_path / "list")


def test_the_main_job_takes_the_same_list(tmp_path: Path) -> None:
    """A failing run that is expected is no reason against, all else is, and so is a line that is passed or stale."""
    (tmp_path / "list").write_text("hash/lagging | a | 1\nhash/stateless | b | 2\ngate/odd | c | 3", encoding="utf-8")
    expected = read_expected_failures(tmp_path / "list")
    runs = [one for one in all_runs(TOY) if one.name in ("lagging", "stateless", "slots only")]
    results = [(one, Comparison(one.name)) for one in runs]
    for one, result in results:
        if one.name != "stateless":
            result.stray["port"] = 1
    ran = outcomes(results, [Finding("gate", "even", "")])
    assert ran == {"hash/stateless": False, "hash/lagging": True, "hash/slots only": True, "gate/even": False}
    reasons = (
        "lagging: port has 3 of 9 rows unequal",
        "slots only: port has 1 of 9 rows unequal",
        "fork: never reached",
    )
    left = without_expected(reasons, expected, ran)
    assert left == (
        "slots only: port has 1 of 9 rows unequal", "fork: never reached",
        "hash/stateless: passed, expected to fail: b (2); take its line out",
        f"gate/odd: expected to fail by {tmp_path / 'list'}, but there is no such feature",
    )  # fmt: skip
    for stale in ("hash/laggin", "hush/lagging", "hash", "gate"):
        (tmp_path / "list").write_text(f"{stale} | a | 1", encoding="utf-8")
        with pytest.raises(ValueError, match=f"got '{stale}', expected `part/name` of "):
            read_expected_failures(tmp_path / "list").require_known(["hash", "gate"], {"hash": ["lagging"]})


def test_the_page_names_all_that_a_port_may_offer_and_declare() -> None:
    """`docs/porting.md` has every name and every field, and the files that it points to are there."""
    for word in [*OFFERED, *(field.name for field in dataclasses.fields(PortLayout))]:
        assert f"`{word}`" in PAGE, word
    paths = re.findall(r"`((?:examples|docs|parity|tests|reference)/[\w/.]+)", PAGE)
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / path).exists(), path


def _hold(law: Law, bench: Bench, examples: int) -> None:
    # The smallest case that breaks a law takes longer than any.
    phases = [Phase.explicit, Phase.generate]

    @settings(max_examples=examples, database=None, phases=phases, report_multiple_bugs=False, derandomize=True)
    @given(law.cases(bench.world))
    def holds(case: object) -> None:
        law.check(bench, case)

    holds()
