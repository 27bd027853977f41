"""The token map: how long does it take to build, plain and fast, and how does that grow with V?

The baseline is the plain builder of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import reference.token_map as plain
from benchmarks.bench import Bench
from benchmarks.contest import Contest, Outputs
from benchmarks.results import Label
from optimized import token_map as fast

SIZES = (1_000, 10_000, 100_000)
_ROUNDS = 5


def ask(bench: Bench) -> None:
    """Time made-up vocabularies of growing size, then the real tokenizer of the DeepSeek V4 series."""
    for size in bench.sizes(SIZES):
        _measure(bench, f"words {size}", "words", word_tokenizer(size))
    if not bench.quick:
        try:
            real = plain.load_tokenizer(plain.deepseek_v4_tokenizer_files())
        except FileNotFoundError as error:
            bench.skip("token_map", "deepseek-v4", str(error))
            return
        _measure(bench, "deepseek-v4", "deepseek-v4", real)


def word_tokenizer(size: int) -> Any:
    """Make a tokenizer of `size` words: numbers, every other one with a capital, every third with an accent."""
    words = [f"{'W' if i % 2 else 'w'}{'é' if i % 3 == 0 else 'e'}{i // 4}-{i % 4 // 2}" for i in range(size)]
    vocabulary = {f"{word} {i}": i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    )


def _measure(bench: Bench, name: str, series: str, tokenizer: Any) -> None:
    def build(module: Any) -> Outputs:
        token_map, size = module.build_token_map(tokenizer)
        return torch.from_numpy(token_map), torch.tensor([size])

    size = len(tokenizer)
    label = Label(question="token_map", name=name, series=series, axis="V", size=size, amount=size, unit="ids")
    contest = Contest(lambda number: build(fast), lambda number: build(plain), 1)
    bench.contest(label, contest, ("wall",), rounds=min(_ROUNDS, bench.rounds))
