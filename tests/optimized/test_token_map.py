"""Laws of the fast token map: it is the reference's map, to the entry, on every case that tests the reference."""

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from optimized import token_map as module
from optimized.token_map import build_token_map
from reference.config import EngramConfig
from reference.token_map import build_token_map as reference_build_token_map
from reference.token_map import deepseek_v41_flash_token_map, token_map_for
from tests.reference.test_token_map import (
    METASPACE,
    OLD_CHARACTERS,
    TRAPS,
    byte_level_bpe,
    plain_byte_level_map,
    plain_key,
    plain_map,
    tokenizer_of,
    vocabularies,
)
from tests.tokenizer_files import REAL_TOKENIZERS, load_or_skip


def test_both_sides_have_one_signature() -> None:
    """A caller can put either builder in the other's place."""
    assert inspect.signature(build_token_map) == inspect.signature(reference_build_token_map)


@pytest.mark.parametrize("name", TRAPS)
def test_trap_gives_the_map_that_was_worked_out_by_hand(name: str) -> None:
    """A small vocabulary for each way to go wrong; the first is published (sgl-project/sglang, layout unit test)."""
    decoder, tokens, expected = TRAPS[name]
    token_map, size = build_token_map(tokenizer_of(tokens, decoder))
    assert token_map.dtype == np.int32
    assert (token_map.tolist(), size) == (expected, max(expected) + 1)


@given(vocabularies)
def test_map_is_the_plain_definition(tokens: list[str]) -> None:
    """Folding many texts as one changes none of them, whatever stands side by side."""
    token_map, size = build_token_map(tokenizer_of(tokens))
    assert token_map.tolist() == plain_map(tokens, tokens)
    assert size == len(set(token_map.tolist()))


def test_every_old_character_has_the_key_of_the_definition() -> None:
    """Every character of Unicode 3.2 as a token of its own, all side by side in one fold, keeps its own key."""
    numbers: dict[str, int] = {}
    expected = [numbers.setdefault(plain_key(text, text), len(numbers)) for text in OLD_CHARACTERS]
    token_map, size = build_token_map(tokenizer_of(OLD_CHARACTERS))
    assert (token_map.tolist(), size) == (expected, len(numbers))


@pytest.mark.parametrize("vocab_size", [257, 300, 400])
def test_byte_level_map_follows_from_the_vocabulary(vocab_size: int) -> None:
    """Pieces of UTF-8 sequences keep their raw token as key, and may then meet a letter that normalizes to it."""
    backend = byte_level_bpe(vocab_size)
    token_map, _ = build_token_map(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert token_map.tolist() == plain_byte_level_map(backend)


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_tokenizer_has_the_reference_map(name: str) -> None:
    """On tokenizers that public packages ship, both sides give one map."""
    tokenizer = load_or_skip(name)
    token_map, size = build_token_map(tokenizer)
    expected, expected_size = reference_build_token_map(tokenizer)
    assert (token_map.dtype, size) == (np.int32, expected_size)
    assert np.array_equal(token_map, expected)


def test_embedded_map_equals_a_rebuild() -> None:
    """The shipped map is also what the fast builder gives for the real tokenizer and the real config."""
    config = EngramConfig.deepseek_v41_flash()
    rebuilt = token_map_for(load_or_skip("deepseek-v4"), config, build=build_token_map)
    assert np.array_equal(deepseek_v41_flash_token_map(), rebuilt)


@pytest.mark.parametrize("character", [chr(code) for code in range(0x80)])
def test_ascii_way_agrees_with_the_long_way(character: str) -> None:
    """A text of plain ASCII has one key, whether it is folded by Python or by the tokenizer library."""
    tokens = [character, f"{character}A", f"a{character}", f"a{character}B", f" {character} ", character * 2, "a", "ab"]
    tokenizer = tokenizer_of(list(dict.fromkeys(tokens)))
    assert build_token_map(tokenizer)[0].tolist() == reference_build_token_map(tokenizer)[0].tolist()


@pytest.mark.parametrize("free", [0, 1, 32])
def test_fold_survives_tokens_that_hold_its_separators(free: int) -> None:
    """Where tokens hold the separators, another is taken, and where they hold all, each text is folded alone."""
    separators = module._SEPARATORS
    taken = separators[: len(separators) - free]
    tokens = [*taken, *(f"É{mark}À" for mark in taken), "éa", "ÉA", "\u0301e", "E"]
    token_map, _ = build_token_map(tokenizer_of(tokens))
    assert token_map.tolist() == plain_map(tokens, tokens)


def test_hole_and_empty_text_share_the_empty_key() -> None:
    """An id that no token has decodes to nothing, and so does Metaspace's piece for one space: both have the key ""."""
    token_map, size = build_token_map(tokenizer_of(["a", "▁", "b"], METASPACE, size=6))
    assert (token_map.tolist(), size) == ([0, 1, 2, 1, 1, 1], 3)


def test_what_the_reference_refuses_is_refused() -> None:
    """No Rust backend, a bare Rust tokenizer, and ids past the length have the reference's errors."""
    bare = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 5}, unk_token="a"))
    refused: list[tuple[Any, type[Exception], str]] = [
        (ByT5Tokenizer(), TypeError, "got ByT5Tokenizer, which has no backend_tokenizer, expected"),
        (bare, TypeError, r"PreTrainedTokenizerFast\(tokenizer_object=tokenizer\)"),
        (PreTrainedTokenizerFast(tokenizer_object=bare), ValueError, r"got id 5 \('c'\) with len\(tokenizer\) 3"),
    ]
    for tokenizer, error, words in refused:
        with pytest.raises(error, match=words):
            build_token_map(tokenizer)
