"""`python -m parity` from the outside: what it prints and what it exits with."""

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from parity.__main__ import main
from parity.compare import Comparison
from parity.corpus import read_texts
from parity.report import print_report
from parity.runs import all_runs
from parity.world import World
from serving.runner import Policy

FAULTY = '''
"""A port that takes the window oldest first."""
from reference.hash_state import HashState as Right


class HashState(Right):
    def forward(
        self, input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask, slot_mapping,
        block_table,
    ):
        window = lookback_token_ids.flip(1)
        return super().forward(
            input_ids, positions, query_start_loc, dead_mask, window, lookback_dead_mask, slot_mapping, block_table
        )
'''


@pytest.fixture
def faulty_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with one planted mistake."""
    (tmp_path / "reversed_window_port.py").write_text(FAULTY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "reversed_window_port"


def test_the_reference_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """A right implementation exits 0, with every law reached and every run in the table."""
    assert main(["--impl", "reference", "--rows", "14000", "--device", "cpu", "--what", "hash"]) == 0
    printed = capsys.readouterr().out
    assert "all equal" in printed
    assert "NOT REACHED" not in printed
    for name in ("stateless", "prompt only", "known ids", "lagging", "slots only", "another pad", "tokens alike"):
        assert name in printed


def test_a_planted_bug_fails_the_run_and_is_explained(faulty_port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A window in the wrong order exits 1 and shows the row, its lookbacks, both hashes and how to see it again."""
    assert main(["--impl", faulty_port, "--rows", "700", "--device", "cpu", "--seed", "3", "--what", "hash"]) == 1
    printed = capsys.readouterr().out
    assert f"{faulty_port}: first wrong row in run 'stateless'" in printed
    assert "window column 0" in printed
    assert "expected [" in printed
    assert "got      [" in printed
    repro = "REPRO: python -m parity --what hash --device cpu --seed 3 --config deepseek-v4.1-flash --impl "
    assert repro + f"{faulty_port} --rows 700" in printed


SCALE_AS_NUMBER = """
import torch
from reference.quantization import decode_e4m3


def lookup(weight, scales, ids, *, out=None, first_row=0, head_start=0, local_heads=None, background=False):
    heads = ids.shape[1] - head_start if local_heads is None else local_heads
    padded = torch.nn.functional.pad(ids.long(), (0, heads), value=-1)
    rows = padded[:, head_start : head_start + heads] - first_row
    held = (rows >= 0) & (rows < len(weight))
    rows = torch.where(held, rows, 0)
    factors = scales[rows].float().repeat_interleave(32, dim=2)
    found = (decode_e4m3(weight.view(torch.uint8)[rows]) * factors * held[..., None]).bfloat16()
    return found if out is None else out.copy_(found)
"""
SIGN_OF_DOT = """
from tests.reference.test_gate import plain_gate


def engram_gate(hidden, kv, q_weight, k_weight, token_mask=None, *, eps, clamp=1e-6):
    return plain_gate(hidden, kv, q_weight, k_weight, token_mask, eps=eps, clamp=clamp, fault="G2 sign of dot")
"""
ONE_BUFFER = """
from reference.engram import Engram as Right


class Engram(Right):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.staged_rows = self.staged_rows[:1] * len(self.staged_rows)
"""
MASK_LENGTH = """
from reference.engram import Engram as Right


class Engram(Right):
    def forward(self, hidden, hash_ids, token_mask=None, *, microbatch=0):
        token_mask[-(token_mask.shape[0] // 4) :] = True
        return super().forward(hidden, hash_ids, token_mask, microbatch=microbatch)
"""


@pytest.mark.parametrize(
    ("what", "source", "said"),
    [
        (
            "lookup",
            SCALE_AS_NUMBER,
            ["first wrong row in lookup, all columns", "code 0x", "scale byte 0x", "expected 0x"],
        ),
        ("gate", SIGN_OF_DOT, ["first wrong row in gate, fp32 stream", "token 0, copy 0, element ", "exact", " over"]),
        ("layer", ONE_BUFFER, ["first wrong row in layer, rows of layer 1", "request", "column", "scale byte 0x"]),
        ("layer", MASK_LENGTH, ["first wrong row in layer, dead and padding", "(shut): expected 0x"]),
    ],
    ids=["scale byte as number", "sign of dot", "one staging buffer", "mask too short"],
)
def test_a_planted_mistake_of_each_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
    what: str, source: str, said: list[str],
) -> None:  # fmt: skip
    """A small wrong port exits 1, is explained with the command that shows it again, and what it lacks is counted."""
    name = f"wrong_{what}_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--impl", name, "--what", f"hash,{what}", "--device", "cpu", "--seed", "4"]) == 1
    printed = capsys.readouterr().out
    assert f"{name}: first wrong row in {what}" in printed
    assert "reference: first wrong row" not in printed
    assert all(part in printed for part in said), printed
    assert (
        f"REPRO: python -m parity --what {what} --device cpu --seed 4 --config deepseek-v4.1-flash --impl {name}\n"
        in printed
    )
    assert f"NOT CLEAN  {what}, " in printed
    assert f"{name}: hash not offered, skipped" in printed
    assert "Skipped as not offered: 1." in printed


def test_values_of_the_reference_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """The reference alone exits 0 on lookup, gate and layer, with every row of the table reached."""
    for config in ("toy", "deepseek-v4.1-flash"):
        assert main(["--impl", "reference", "--device", "cpu", "--what", "layer,gate,lookup", "--config", config]) == 0
        assert "NOT REACHED" not in capsys.readouterr().out


@pytest.mark.gpu
def test_the_full_table_and_layer_are_equal_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """On CUDA the kernels agree on the whole table, on wide gates, and on 100,000 tokens through both layers."""
    assert main(["--device", "cuda", "--what", "lookup,gate,layer"]) == 0
    printed = capsys.readouterr().out
    assert "all equal" in printed
    assert "table:" not in printed, "the card is too small for the whole table"


def test_a_port_that_offers_none_of_the_chosen_parts_is_refused(
    faulty_port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port with a hash state alone exits 2 where lookup and gate are chosen, and says what was looked for."""
    with pytest.raises(SystemExit) as exit_info:
        main(["--impl", faulty_port, "--what", "lookup,gate", "--device", "cpu"])
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert f"got {faulty_port}, which offers none of what is chosen: embedding.lookup, gate.engram_gate" in said


def test_what_was_never_tested_is_not_clean(worlds: dict[str, World]) -> None:
    """A run whose lookbacks read no slot, and a feature that nothing reached, stand against the verdict."""
    lagging = next(run for run in all_runs(worlds["flash"]) if run.policy is Policy.LAGGING)
    empty = Comparison("lagging", sources=Counter({"batch": 5, "window": 5, "pad": 5}))
    verdict = print_report(Console(quiet=True), [(lagging, empty)])
    assert not verdict.clean
    assert "lagging: no lookback came from slot, so nothing of it was tested" in verdict.reasons
    assert any(reason.startswith("same-step hit: never reached") for reason in verdict.reasons)


def test_the_same_seed_is_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one seed print the same tables."""
    printed = []
    for _ in range(2):
        what = ["--what", "hash,lookup,gate", "--run", "lagging", "--rows", "3000"]
        main(["--impl", "reference", "--device", "cpu", "--seed", "5", *what])
        printed.append(capsys.readouterr().out.partition("live rows")[0])
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "no_such_port"], "No module named 'no_such_port'"),
        (["--impl", "json"], "implementation: got json, which offers none of"),
        (["--device", "tpu"], "device: got 'tpu', expected auto, cpu, cuda or cuda:N"),
        (["--config", "missing.json"], "missing.json"),
        (["--run", "nothing"], "run: got ['nothing'], expected some of"),
        (["--rows", "0"], "got 0, expected at least 1"),
        (["--what", "hash,lokup"], "what: got ['lokup'], expected some of hash, lookup, gate, layer"),
        (["--what", ""], "what: got [''], expected some of hash, lookup, gate, layer"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option exits 2 and says what it got and what was expected."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_texts_keep_their_line_ends() -> None:
    """The texts are read as bytes: carriage returns and their like are part of the input."""
    texts = "".join(read_texts())
    assert "\r\n" in texts
    assert "\u2028" in texts
