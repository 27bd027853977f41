"""Real input: the project's texts, tokenized, cut into prompts as users send them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from parity.workload import Prompt
from parity.world import World
from reference.token_map import deepseek_v4_tokenizer_files
from serving.rng import Rng

TEXTS = Path(__file__).parent / "texts"
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Mix:
    """Say how prompts are drawn; lengths are in tokens, from the first up to and with the second.

    Attributes:
        prompt: length of a prompt's new part.
        answer: length of an answer.
        image: length of an image span.
        block_size: B, at whose multiples repeated prompts and imports end.
        imports: whether KV arrives from elsewhere.
        images: image spans of a prompt that has any, at most.
        packed: documents that may stand behind one in a packed sequence, at most.
        offset: positions before some imports, whose ids nobody kept; 0: no such imports.
        per_step: prompts that arrive together.
        longest: tokens that a conversation keeps, at most.
    """

    prompt: tuple[int, int]
    answer: tuple[int, int]
    image: tuple[int, int]
    block_size: int
    imports: bool = True
    per_step: int = 2
    longest: int = 2**20
    images: int = 3
    packed: int = 3
    offset: int = 0


def read_texts(paths: Sequence[Path] = ()) -> list[str]:
    """Read texts, those of the project by default, with their line ends as they are.

    Raises:
        ValueError: a file is empty or not UTF-8.
        FileNotFoundError: no such file.
    """
    texts = []
    for path in paths or sorted(TEXTS.glob("*.txt")):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"texts: got {path}, which is not UTF-8 ({error}), expected UTF-8 text") from error
        if not text:
            raise ValueError(f"texts: got {path}, which is empty, expected text")
        texts.append(text)
    return texts


def encoder(world: World, tokenizer_files: Path | None) -> Encode:
    """Give the function that turns text into token ids.

    Args:
        world: a toy's tokens are the bytes of UTF-8.
        tokenizer_files: directory of a tokenizer.json; None: that of the DeepSeek V4 series.
    """
    if tokenizer_files is None and world.vocabulary == 256:
        return lambda text: text.encode("utf-8")
    directory = tokenizer_files or deepseek_v4_tokenizer_files()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


class Corpus:
    """Hold token ids of texts and cut prompts out of them.

    Args:
        texts: what users write.
        encode: text to token ids.
        world: knows the image tokens.

    Raises:
        ValueError: a text gives no token, or an id that the token map lacks.
    """

    def __init__(self, texts: Sequence[str], encode: Encode, world: World) -> None:
        self._tokens = [np.array(list(encode(text)), dtype=np.int64) for text in texts]
        for text, tokens in zip(texts, self._tokens, strict=True):
            if not len(tokens) or tokens.max() >= world.vocabulary:
                raise ValueError(
                    f"texts: got {text[:20]!r}... as ids up to {max(tokens, default=None)}, expected ids in "
                    f"[0, {world.vocabulary}): the tokenizer is another than the token map's"
                )
        self._image_tokens = world.image_tokens

    def prompts(self, rng: Rng, mix: Mix) -> Iterator[Prompt]:
        """Draw prompts without end: fresh ones, follow-ups, repeats, with images, imported or handed over."""
        earlier: list[np.ndarray] = []
        number = 0
        while True:
            tokens, dead = self._draw(rng, mix, earlier)
            answer = self._passage(rng, _between(rng, mix.answer))
            blocks = (len(tokens) - 1) // mix.block_size
            imported, handed_over = 0, False
            if mix.imports and len(tokens) > 1 and rng.chance(1, 6):
                kind = rng.below(3)
                handed_over = kind == 0
                at_edge = kind == 1 and blocks > 0
                imported = (
                    0 if handed_over else mix.block_size * (1 + rng.below(blocks)) if at_edge else len(tokens) - 1
                )
            arrival = number // mix.per_step
            prompt = Prompt(tokens, dead, answer, imported, arrival, handed_over)
            if mix.offset and imported >= 8:
                prompt = replace(prompt, offset=-(-mix.offset // mix.block_size) * mix.block_size)
            elif mix.packed and not handed_over and not imported and not dead.any() and rng.chance(1, 12):
                lengths = [_between(rng, (1, 1 + len(tokens) // 2)) for _ in range(1 + rng.below(mix.packed))]
                prompt = replace(prompt, documents=tuple(self._passage(rng, length) for length in lengths))
            earlier.append(np.concatenate([tokens, answer]))
            del earlier[:-32]
            yield prompt
            number += 1
            if len(tokens) > mix.block_size and rng.chance(1, 8):  # at the same time, the same: a same-step hit
                yield Prompt(tokens, dead, self._passage(rng, len(answer)), arrival=prompt.arrival)

    def _draw(self, rng: Rng, mix: Mix, earlier: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        kind = rng.below(8)
        fresh = self._passage(rng, _between(rng, mix.prompt))
        if kind < 2 and earlier:  # a follow-up: the conversation so far, and a new question
            tokens = np.concatenate([rng.pick(earlier), fresh])[-mix.longest :]
        elif kind == 2 and earlier:  # a repeat that leaves one token behind whole blocks
            before = rng.pick(earlier)
            before = before[: mix.longest]
            tokens = before[: (len(before) - 1) // mix.block_size * mix.block_size + 1]
        elif kind == 3:  # as short as the lookback: 1, N-2, N-1, ...
            tokens = fresh[: 1 + rng.below(5)]
        else:
            tokens = fresh
        dead = np.isin(tokens, self._image_tokens)  # a follow-up brings the images of its conversation
        if kind >= 6:
            tokens = tokens.copy()
            for _ in range(1 + rng.below(mix.images)):
                length = min(_between(rng, mix.image), len(tokens))
                begin = rng.below(len(tokens) - length + 1)
                tokens[begin : begin + length] = rng.pick(self._image_tokens)
                dead[begin : begin + length] = True
        return tokens, dead

    def _passage(self, rng: Rng, length: int) -> np.ndarray:
        parts, have = [], 0
        text = rng.pick(self._tokens)
        begin = 0 if rng.chance(1, 3) else rng.below(len(text))
        while have < length:
            parts.append(text[begin : begin + length - have])
            have += len(parts[-1])
            text, begin = rng.pick(self._tokens), 0
        return np.concatenate(parts)


def _between(rng: Rng, bounds: tuple[int, int]) -> int:
    return bounds[0] + rng.below(bounds[1] - bounds[0] + 1)
