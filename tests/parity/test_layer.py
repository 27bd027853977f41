"""The judge of whole layers: what its steps reach, and that it sees mistakes of staging, table, hash and mask."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reference.engram
import reference.hash_state
from parity import layer as module
from parity.corpus import Corpus, encoder, read_texts
from parity.finding import Finding
from parity.layer import judge_layer
from parity.live import live_steps, owner
from parity.lookup import Amount
from parity.protocol import Implementation
from parity.runs import SMALL
from parity.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(worlds: dict[str, World]) -> Corpus:
    """The project's texts as bytes."""
    return Corpus(read_texts(), encoder(worlds["toy"], None), worlds["toy"])


def test_the_steps_of_a_layer_run_reach_what_a_layer_must_bear(worlds: dict[str, World], corpus: Corpus) -> None:
    """Chunks, prefix hits, verified drafts, dead tokens and padding stand in the steps of the CPU's layer run."""
    amount = module.AMOUNTS["cpu"]
    seen, tokens, dead = set(), 0, 0
    for _, step in live_steps(worlds["toy"], corpus, SMALL, tokens=amount.tokens, seed=0, budget=amount.budget):
        assert 0 < step.num_tokens <= len(step.input_ids) <= amount.budget
        seen |= {event for piece in step.pieces for event in piece.events}
        tokens += step.num_tokens
        dead += int(step.dead_mask[: step.num_tokens].sum())
    assert tokens >= amount.tokens
    assert dead > 0
    assert {"chunk", "decode", "verify", "dead span", "padding"} <= seen


def test_owner_names_the_position(worlds: dict[str, World], corpus: Corpus) -> None:
    """Every live token of a step is its request's, at the position that the engine gave it; the others are padding."""
    for _, step in live_steps(worlds["toy"], corpus, SMALL, tokens=200, seed=1, budget=48):
        for token, position in enumerate(step.positions[: step.num_tokens].tolist()):
            assert owner(step, token).endswith(f"position {position}")
        assert owner(step, step.num_tokens).endswith("padding")


def judged(worlds: dict[str, World], corpus: Corpus, monkeypatch: pytest.MonkeyPatch, **names: Any) -> list[Finding]:
    """Judge a port that is the reference but for some names."""
    monkeypatch.setitem(module.AMOUNTS, "cpu", Amount(160, 40))
    offered = {"HashState": reference.hash_state.HashState, "Engram": reference.engram.Engram, **names}
    port = Implementation("port", SimpleNamespace(**offered))
    lines: list[str] = []
    findings = judge_layer(worlds["toy"], corpus, [port], CPU, size=SMALL, seed=2, say=lines.append)
    assert lines == ["layer: on a CPU 2 copies of 64, and tables of 4,152 rows"]
    return findings


class OneBuffer(reference.engram.Engram):
    """Stage every microbatch in the same rows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.staged_rows = self.staged_rows[:1] * len(self.staged_rows)


class NoMask(reference.engram.Engram):
    """Gate dead tokens and padding too."""

    def forward(self, hidden, hash_ids, token_mask=None, *, microbatch=0):  # type: ignore[no-untyped-def]
        """Forget the mask."""
        return super().forward(hidden, hash_ids, None, microbatch=microbatch)


class ValueFirst(reference.engram.Engram):
    """Take the value for the first of the keys, in the second layer."""

    def __init__(self, config: Any, layer_index: int, **options: Any) -> None:
        super().__init__(config, layer_index, **options)
        self.layer_index = layer_index

    def load_tensors(self, tensors: Any, prefix: str) -> None:
        """Load wkv with its last part in front."""
        name = f"{prefix}.wkv.weight"
        super().load_tensors({**tensors, name: tensors[name].roll(self.layer_index * self.width, 0)}, prefix)


class HiddensMask(reference.engram.Engram):
    """Want a mask as long as the stream."""

    def forward(self, hidden, hash_ids, token_mask=None, *, microbatch=0):  # type: ignore[no-untyped-def]
        """Refuse the mask of the ids."""
        if token_mask.shape[0] != hidden.shape[0]:
            raise ValueError(f"token_mask: got {token_mask.shape[0]}, expected {hidden.shape[0]}")
        return super().forward(hidden, hash_ids, token_mask, microbatch=microbatch)


class NextRow(reference.hash_state.HashState):
    """Hash every token one row too far."""

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Add one to every id."""
        return super().forward(*arguments, **options) + 1


ROWS = {"rows of layer 1", "rows of layer 2"}
STREAMS = {"stream of layer 1", "stream of layer 2"}


@pytest.mark.parametrize(
    ("names", "failed", "said"),
    [
        ({}, set(), ""),
        ({"Engram": OneBuffer}, ROWS | STREAMS, "position"),
        ({"Engram": NoMask}, {"dead and padding"}, "expected 0x"),
        ({"Engram": ValueFirst}, {"stream of layer 2"}, "over"),
        ({"Engram": HiddensMask}, STREAMS, "raised ValueError: token_mask: got"),
        ({"HashState": NextRow}, ROWS | STREAMS, "expected, hashed to"),
        ({"HashState": None}, set(), ""),
    ],
    ids=["right", "one buffer", "no mask", "value first", "mask length", "next row", "no hash state"],
)
def test_each_mistake_fails_what_sees_it(
    worlds: dict[str, World], corpus: Corpus, monkeypatch: pytest.MonkeyPatch, names: dict[str, Any], failed: set[str],
    said: str,
) -> None:  # fmt: skip
    """A mistake fails exactly the findings that are there for it, with the request and position of its first row."""
    findings = judged(worlds, corpus, monkeypatch, **names)
    assert {one.feature for one in findings if one.unequal.total()} == failed
    assert failed or all(one.cases and one.rows for one in findings)
    assert not failed or any(said in one.first.get("port", "") for one in findings)
