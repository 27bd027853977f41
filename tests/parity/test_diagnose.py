"""The diagnosis names the mistake: a known one by its rows, an unknown one by what is known of them."""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parity.actions import Action
from parity.compare import Judge
from parity.diagnose import diagnose, diagnose_gate, diagnose_lookup, diagnose_values, explain
from parity.faults import CATALOGUE, RUNNER, STATE, Fault
from parity.faults.gate import plain_gate
from parity.faults.model import Model
from parity.kill import world
from parity.protocol import Implementation
from parity.suspects import Evidence, gather, rows_under, suspects
from parity.workload import Prompt, Workload, run
from reference.embedding import lookup
from serving.config import EngineConfig
from serving.policy import Policy
from serving.rng import Rng

CPU = torch.device("cpu")
SMALL_CASES = {"embedding.lookup": diagnose_lookup, "gate.engram_gate": diagnose_gate}
ACTIONS = (Action.NOTHING, Action.SPLIT, Action.REORDER, Action.RELOAD, Action.ABORT, Action.NOTHING, Action.SLEEP)
WAYS = ((1, Policy.SLOTS_ONLY), (2, Policy.LAGGING), (3, Policy.STATELESS), (4, Policy.PROMPT_ONLY))
# H27 and H28 change no row of a run whose windows are sound; two kernels give the rows of their namesakes.
ROWS = [
    number
    for number, fault in CATALOGUE.items()
    if fault.level in (STATE, RUNNER) and number not in ("H27", "H28", "C1b", "H20b")
]
# Two mistakes may give the same rows wherever they can be told apart at all: no more than one in twenty.
HARD: set[str] = set()


def eventful(seed: int, policy: Policy) -> Workload:
    """Make a run in which all happens that a mistake may need: hits, rejections, imports, images, documents, moves."""
    rng, vocabulary = Rng(seed), world().vocabulary
    block, prompts = 4, list[Prompt]()

    def drawn(count: int) -> np.ndarray:
        return np.array([rng.below(vocabulary) for _ in range(count)], np.int64)

    for number in range(10):
        ids = drawn(6 + rng.below(14))
        dead, documents, imported = np.zeros(len(ids), bool), (), 0
        whole = len(ids) // block * block
        if number % 2:  # begins as the one before it does, which may arrive in the same step
            before = prompts[-1]
            keep = len(before.tokens) // block * block
            ids, dead = np.concatenate([before.tokens[:keep], ids[:1]]), np.append(before.dead[:keep], False)
        elif number == 4:
            ids, dead, documents = ids[:5], dead[:5], (drawn(4), drawn(3))
        else:  # an image where whoever goes on behind the block looks back to it
            ids[whole - 2], dead[whole - 2] = world().image_tokens[0], True
            imported = len(ids) // 2 if number == 6 else 0
        handed_over = number in (0, 2, 3, 5, 7)
        prompts.append(Prompt(ids, dead, drawn(4 + rng.below(5)), imported, number // 2 * 3, handed_over, 0, documents))
    config = EngineConfig(
        policy=policy, block_size=block, num_blocks=20, token_budget=32, max_requests=5, num_drafts=2,
        pad_tokens=(8, 16, 24, 40), pad_requests=(4, 8), seed=seed,
    )  # fmt: skip
    return Workload(config, tuple(prompts), (32, 5, 9, 32), (0, 1, 2, 0), actions=ACTIONS * 4)


@cache
def right(seed: int, policy: Policy) -> Evidence:
    """Give what a right port does on a run."""
    return gather(world(), Model, run(eventful(seed, policy), world().vocabulary))


def evidence_of(faults: tuple[Fault, ...], seed: int, policy: Policy, steps: int = 8) -> Evidence:
    """Give what a port with these faults does on a run, until some steps behind its first wrong row."""
    whole, found = right(seed, policy), Evidence(world())
    left = steps
    for one, rows in zip(whole.steps, rows_under(whole, faults), strict=True):
        found.steps.append(one)
        found.got.append(rows)
        left -= left < steps or not np.array_equal(rows, one.rows)
        if not left:
            break
    return found


def failures(*faults: Fault) -> Iterator[Evidence]:
    """Yield the runs of this page on which a port with these faults fails."""
    for seed, policy in WAYS:
        evidence = evidence_of(faults, seed, policy)
        if evidence.num_wrong:
            yield evidence


@pytest.mark.parametrize("number", [number for number in ROWS if number not in HARD])
def test_the_right_mistake_is_among_the_first_three(number: str) -> None:
    """On a trace of each fault of a hash state or a runner, the fault itself is one of the three best suspects."""
    fault = CATALOGUE[number]
    evidence = next(failures(fault))
    found = suspects(evidence)
    assert fault in [one.faults[0] for one in found[:3] if len(one.faults) == 1], explain(number, evidence)
    best = next(one for one in found if one.faults == (fault,))
    assert best.explained or fault.group == "kernel"
    assert best.missed == 0


def test_nearly_all_faults_are_measured() -> None:
    """No more than one fault in twenty is left out of the measure above."""
    assert len(HARD) <= 0.05 * len(ROWS)


def test_two_mistakes_are_named_together() -> None:
    """Where one fault explains a part alone, two are tried, and the pair that explains all comes first."""
    pair = (CATALOGUE["H2"], CATALOGUE["C15"])
    evidence = evidence_of(pair, 3, Policy.STATELESS, steps=30)
    found = suspects(evidence)
    assert {fault.id for fault in found[0].faults} == {"H2", "C15"}, explain("two", evidence)
    assert found[0].score == 1
    assert "and" in explain("two", evidence)


class RightButForOneHead(Model):
    """Hash one head of the longest order with another prime: nobody made this mistake yet."""

    def reduce(self, mixes: torch.Tensor) -> torch.Tensor:
        """Spoil column 21."""
        rows = super().reduce(mixes)
        rows[:, 1, 21] ^= 1
        return rows


def test_an_unknown_mistake_is_told_by_what_is_known() -> None:
    """None of the known mistakes is named; layers, orders, heads, places and sources are."""
    steps = run(eventful(1, Policy.LAGGING), world().vocabulary)
    text = explain("new", gather(world(), RightButForOneHead, steps, more=3))
    assert "none of the known mistakes" in text
    assert "known: layers [14], orders [4], heads [5]: 1 of 48 columns are ever wrong" in text
    assert "known: positions from the start of their piece" in text
    assert "comes from: " in text


def test_a_port_is_diagnosed_from_its_run() -> None:
    """The sentence says when it happens, what the port does and how much that explains; a right port has none."""
    judge = Judge(
        world(), [CATALOGUE["H13"].implementation, Implementation("right", SimpleNamespace(HashState=Model))], CPU
    )
    text = diagnose(judge, run(eventful(2, Policy.STATELESS), world().vocabulary), "H13")
    assert text is not None
    assert "your ids are what you get if the window is read oldest token first [H13]; explains" in text
    assert diagnose(judge, run(eventful(2, Policy.STATELESS), world().vocabulary), "right") is None


def test_wrong_values_are_diagnosed_too() -> None:
    """Wrong rows of a lookup, by bits, and of a gate, by closeness, are named by the faults that give them."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(0, 127, (40, 64), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scales = torch.randint(100, 150, (40, 2), dtype=torch.uint8, generator=generator)
    ids = torch.randint(0, 40, (6, 3), dtype=torch.int32, generator=generator)
    table = {"weight": weight, "scales": scales, "ids": ids}
    got, want = CATALOGUE["T3"].make(**table), lookup(**table)
    assert diagnose_values("embedding.lookup", table, got, want).startswith(
        "1. your values are what you get if every block is scaled by the scale of the block after it [T3]; explains 6"
    )
    assert "none of the known" in diagnose_values("embedding.lookup", table, want * 3, want)
    stream = torch.randn(5, 2, 32, generator=generator)
    keys, weights = torch.randn(5, 96, generator=generator), 1 + torch.randn(2, 2, 32, generator=generator).bfloat16()
    case = {"hidden": stream, "kv": keys, "q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6}
    got, want = CATALOGUE["G9"].make(**case), plain_gate(**case)
    assert "[G9]" in diagnose_values("gate.engram_gate", case, got, want, close=True).splitlines()[0]


# T5 and T6 need a table past 2^31, G6 a mask that is to be refused.
VALUES = [one.id for one in CATALOGUE.values() if one.offers in SMALL_CASES and one.id not in ("T5", "T6", "G6")]


@pytest.mark.parametrize("number", VALUES)
def test_a_mistake_in_values_is_named_on_a_small_case(number: str) -> None:
    """A port with a known mistake in its lookup or gate is asked for a small case, which names it among three."""
    fault = CATALOGUE[number]
    said = SMALL_CASES[fault.offers](fault.make, CPU)
    assert f"[{number}" in said
    assert "raised ValueError: no" in SMALL_CASES[fault.offers](_refuse, CPU)


def _refuse(**_: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")
