"""Laws of the oracle in plain integers: what others published, by a way that shares nothing with the reference."""

import ast
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from parity import oracle
from parity.oracle import IntegerOracle, odd_numbers, prime_table
from reference.config import EngramConfig
from serving.engine import Engine, EngineConfig
from serving.runner import Policy
from tests.published import PUBLISHED

FLASH = EngramConfig.deepseek_v41_flash()


def test_published_multipliers() -> None:
    """Both layers of DeepSeek-V4.1-Flash, as tested by fegato/colibri and pestopoppa/llama.cpp."""
    for layer, published in PUBLISHED["multipliers"]["by_layer"].items():
        assert odd_numbers(int(layer), 99092, 4) == published


def test_published_primes() -> None:
    """The large layout of several public ports, and the small one of sgl-project/sglang."""
    large, small = PUBLISHED["primes"], PUBLISHED["primes_small"]
    table = prime_table(2, 3, 8, large["engram_vocab_size"])
    assert [list(chain(*layer)) for layer in table] == list(large["by_layer"].values())
    assert [sum(map(sum, layer)) for layer in table] == large["sums"]
    assert prime_table(2, 2, 2, small["engram_vocab_size"]) == small["primes"]


@pytest.mark.parametrize("kind", ["unmasked", "masked"])
def test_published_rows(kind: str) -> None:
    """Rows of DeepSeek-V4.1-Flash from pestopoppa/llama.cpp, tests/test-dsv41-engram-hash-vectors.inc."""
    vectors = PUBLISHED["hash_vectors"]
    judge = IntegerOracle(FLASH, vectors["token_map"])
    dead = [kind == "masked" and at in vectors["dead_positions"] for at in range(len(vectors["tokens"]))]
    for vector in vectors[kind]:
        row = judge.row(vectors["tokens"], dead, vector["position"])
        assert row[FLASH.engram_layer_ids.index(vector["layer"])] == vector["row"]


def test_toy_rows_are_those_worked_out_by_hand() -> None:
    """The oracle with the toy's constants in place of drawn ones: multipliers 3, 5, 7, primes 101, 103, pad 99."""
    toy = PUBLISHED["toy"]
    sizes = {"engram_layer_ids": [1], "engram_max_ngram_size": 3, "engram_n_heads": 1, "engram_vocab_size": 100}
    config = SimpleNamespace(**sizes, engram_compressed_vocab_size=100, engram_pad_token_id=5)
    judge = IntegerOracle(config, [*toy["compressed"], toy["pad"]])
    judge.multipliers, judge.primes = [toy["multipliers"]], [[[prime] for prime in toy["primes"]]]
    assert [judge.row(range(5), [False] * 5, at)[0] for at in range(5)] == toy["rows"]


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_the_sieve_finds_exactly_the_primes(low: int, width: int) -> None:
    """Every prime of a range, none else, from any start."""
    assert oracle._sieve(low, low + width) == list(sympy.primerange(low, low + width))


def test_the_oracle_imports_nothing_of_the_project() -> None:
    """Its worth is that it shares no line with what it judges."""
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules | names == {"collections.abc", "typing", "numpy"}


@pytest.mark.parametrize("computed", [4, 6])
def test_published_window(computed: int) -> None:
    """Policy `prompt only`, prompt 10 11 12 13: the window after 4 and after 6 tokens, from vllm-ascend's tests."""
    published = PUBLISHED["window"]
    engine = Engine(EngineConfig(Policy.PROMPT_ONLY, block_size=4, num_blocks=4, token_budget=4, max_requests=1))
    request = engine.add(published["prompt"], max_new_tokens=5)
    for sampled in (20, 21, 22, 23):
        step = engine.step()
        assert step is not None
        if step.pieces[0].start == computed:
            assert step.lookback_token_ids.tolist() == [published["by_computed_tokens"][str(computed)]]
            return
        engine.update({request: [sampled]})
    raise AssertionError(f"no step began at {computed}")
