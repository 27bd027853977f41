"""Mistakes in the token map, the pad id, and how ids are looked up in the map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import normalizers

from parity.faults.fault import plant
from parity.faults.model import Model, View
from reference.token_map import NORMALIZER_STEPS, rust_backend

_BUILD = "token_map.build_token_map"


@plant("C15", "n-grams are padded with 0")
class PadIsZero(Model):
    """The pad is taken to be 0, as a zeroed buffer has it.

    Law: agreement.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pad_id = 0


@plant("C15b", "n-grams are padded with the pad token's own id, which was not compressed")
class PadNotCompressed(Model):
    """The published pad token compresses to itself, and so nobody saw it there.

    Law: agreement.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.pad_id = config.engram_pad_token_id


@plant("C16", "a negative id indexes the token map from its end")
class NegativeIdIndexesFromTheEnd(Model):
    """The -1 of an unknown token is looked up like any id, and an array gives its last entry for it.

    Source: vllm-ascend#16423. Law: agreement.
    """

    def look_in_window(self, view: View, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Know every id."""
        ids = view.window[view.request, column]
        source = torch.where(view.window_dead[view.request, column], -1, self.token_map[ids])
        return source, torch.ones_like(source, dtype=torch.bool)


@plant("C21", "the token map is that of another tokenizer of the same size")
class MapOfAnotherTokenizer(Model):
    """The map is kept by vocabulary size, and a tokenizer with one token more in front finds the wrong one.

    Source: vllm#57897. Law: agreement.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.token_map = self.token_map.roll(1)


def _build(tokenizer: Any, key: Callable[[Any, int], str]) -> tuple[np.ndarray, int]:
    """Build a map from keys by order of first appearance."""
    backend, numbers = rust_backend(tokenizer), dict[str, int]()
    found = [numbers.setdefault(key(backend, token), len(numbers)) for token in range(len(tokenizer))]
    return np.array(found, np.int32), len(numbers)


def _key(backend: Any, token: int, steps: list[Any], change: Callable[[str], str] = str) -> str:
    text = change(backend.decode([token], skip_special_tokens=False))
    if "\ufffd" in text:
        return backend.id_to_token(token)
    return normalizers.Sequence(steps).normalize_str(text) or text


@plant("C17", "a token that is one blank does not become a single key", offers=_BUILD)
def lone_blank_is_stripped(tokenizer: Any) -> tuple[np.ndarray, int]:
    """The step that keeps a lone space through the strip is left out: each kind of blank keeps its raw text as key.

    Law: token_map.
    """
    return _build(tokenizer, lambda backend, token: _key(backend, token, [*NORMALIZER_STEPS[:5], NORMALIZER_STEPS[6]]))


@plant("C18", "texts are lowered before they are folded to their plain width", offers=_BUILD)
def lowered_too_early(tokenizer: Any) -> tuple[np.ndarray, int]:
    """Letters that only NFKC turns into capitals stay capitals.

    Law: token_map.
    """
    steps = list(NORMALIZER_STEPS)
    steps.insert(0, steps.pop(3))
    return _build(tokenizer, lambda backend, token: _key(backend, token, steps))


@plant("C19", "pieces of UTF-8 sequences are normalized, and all fall together", offers=_BUILD)
def pieces_merge(tokenizer: Any) -> tuple[np.ndarray, int]:
    """What decodes to U+FFFD is treated like any text, so hundreds of tokens share one compressed id.

    Law: token_map.
    """
    sequence = normalizers.Sequence(list(NORMALIZER_STEPS))

    def key(backend: Any, token: int) -> str:
        text = backend.decode([token], skip_special_tokens=False)
        return sequence.normalize_str(text) or text

    return _build(tokenizer, key)


@plant("C20", "tokens are decoded with the spaces before punctuation cleaned up", offers=_BUILD)
def cleaned_up(tokenizer: Any) -> tuple[np.ndarray, int]:
    """The high-level decode of a tokenizer removes the space before punctuation, and merges tokens that differ in it.

    Law: token_map.
    """

    def clean(text: str) -> str:
        for mark in (".", "?", "!", ",", "'"):
            text = text.replace(f" {mark}", mark)
        return text

    return _build(tokenizer, lambda backend, token: _key(backend, token, list(NORMALIZER_STEPS), clean))
