"""Laws of the configuration: every spelling of one config loads alike, and every wrong field is refused by name."""

import json
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from reference.config import EngramConfig

FLASH = asdict(EngramConfig.deepseek_v41_flash())
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "engram_layer_ids": [1, 2],
    "engram_num_embeddings": [4062, 4152],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 1000,
    "engram_compressed_vocab_size": 100,
    "engram_pad_token_id": 0,
    "hidden_size": 64,
    "hc_mult": 2,
    "rms_norm_eps": 1e-6,
}
SOURCES = ["dict", "nested dict", "object", "nested object", "file", "nested file", "folder"]


def source_of(kind: str, values: dict[str, Any], folder: Path) -> Any:
    """Spell a config in one of the ways that it may be given."""
    if kind.startswith("nested"):
        nested = PretrainedConfig(**values) if kind == "nested object" else values
        outer = {"model_type": "some_vlm", "vision_config": {"hidden_size": 7}, "text_config": nested}
        return source_of(kind.removeprefix("nested "), outer, folder)
    if kind == "object":
        return PretrainedConfig(**values)
    if kind == "dict":
        return values
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return folder if kind == "folder" else path


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("values", [SMALL, FLASH], ids=["small", "flash"])
def test_every_source_loads_the_same_config(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    """A dict, a transformers config, a file or its folder, flat or nested, hold one and the same configuration."""
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    loaded = EngramConfig.load(source_of(kind, lists | {"something_else": [1]}, tmp_path))
    assert loaded == EngramConfig(**values)
    assert isinstance(loaded.engram_layer_ids, tuple)


def test_path_may_be_a_string(tmp_path: Path) -> None:
    """The path of a file is a path or a str."""
    assert EngramConfig.load(str(source_of("file", SMALL, tmp_path))) == EngramConfig(**SMALL)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("layers", ["missing", None, []], ids=str)
def test_a_model_without_engram_has_no_config(kind: str, layers: Any, tmp_path: Path) -> None:
    """No `engram_layer_ids`, or none in it, means a model without Engram, whatever else the config holds."""
    values = {"vocab_size": 256, "hidden_size": 64} if layers == "missing" else SMALL | {"engram_layer_ids": layers}
    assert EngramConfig.load(source_of(kind, values, tmp_path)) is None


def test_what_stands_beside_the_text_config_does_not_count(tmp_path: Path) -> None:
    """Where the fields are nested, an outer field of the same name belongs to another part of the model."""
    for kind in ("dict", "object"):
        outer = {"hidden_size": 7, "vocab_size": 9, "text_config": SMALL}
        assert EngramConfig.load(source_of(kind, outer, tmp_path)) == EngramConfig(**SMALL)


def test_derived_sizes_follow_from_the_fields() -> None:
    """D = N - 1 and C = (N - 1) * H."""
    flash, small = EngramConfig.deepseek_v41_flash(), EngramConfig(**SMALL)
    assert (flash.lookback, flash.columns, small.lookback, small.columns) == (3, 24, 2, 4)


def test_a_config_never_changes() -> None:
    """What was checked once stays what it was."""
    with pytest.raises(FrozenInstanceError):
        EngramConfig(**SMALL).hc_mult = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"engram_layer_ids"}))
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_field_is_refused_by_name(name: str, how: str) -> None:
    """A config that has Engram layers must have all of Engram's fields."""
    values = {key: value for key, value in SMALL.items() if key != name} | ({name: None} if how == "null" else {})
    with pytest.raises(ValueError, match=f"^{name}: missing from the config, expected beside engram_layer_ids"):
        EngramConfig.load(values)


ABOVE_ZERO = (
    "vocab_size",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "hidden_size",
    "hc_mult",
)
# (field, a wrong value, what the message says was expected)
WRONG_VALUES: list[tuple[str, Any, str]] = [
    *((name, value, "at least 1") for name in ABOVE_ZERO for value in (0, -32)),
    *(("engram_max_ngram_size", value, "at least 2") for value in (1, 0, -1)),
    *(("engram_n_heads", value, "at least 1") for value in (0, -1)),
    ("engram_pad_token_id", -1, "at least 0"),
    ("engram_pad_token_id", 256, "below vocab_size 256"),
    ("engram_head_dim", 33, "a multiple of 32"),
    ("engram_head_dim", 16, "a multiple of 32"),
    ("engram_compressed_vocab_size", 2**31, "at most 2^31 - 1"),
    ("rms_norm_eps", -1e-6, "a finite float >= 0"),
    ("rms_norm_eps", float("inf"), "a finite float >= 0"),
    ("rms_norm_eps", float("nan"), "a finite float >= 0"),
    ("rms_norm_eps", "1e-6", "a finite float >= 0"),
    ("rms_norm_eps", True, "a finite float >= 0"),
    ("engram_layer_ids", (3, 3), "at least one, distinct and not negative"),
    ("engram_layer_ids", (-1, 2), "at least one, distinct and not negative"),
    ("engram_layer_ids", "1,2", "a list of ints"),
    ("engram_layer_ids", 1, "a list of ints"),
    ("engram_num_embeddings", 5000, "a list of ints"),
    ("engram_num_embeddings", (5000,), "one entry a layer of engram_layer_ids"),
    ("engram_num_embeddings", (5000, 5000, 5000), "one entry a layer of engram_layer_ids"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_VALUES, ids=lambda x: repr(x)[:30])
@pytest.mark.parametrize("load", [False, True], ids=["constructor", "load"])
def test_a_wrong_value_is_refused_with_field_value_and_expectation(
    name: str, value: Any, expected: str, load: bool
) -> None:
    """The message begins with the field, says what it is, and what it must be."""
    values = SMALL | {name: value}
    with pytest.raises(ValueError, match=f"^{name}: got ") as caught:
        EngramConfig.load(values) if load else EngramConfig(**values)
    assert f"got {value!r}, expected {expected}" in str(caught.value)


INTEGER_FIELDS = sorted(set(SMALL) - {"engram_layer_ids", "engram_num_embeddings", "rms_norm_eps"})


@pytest.mark.parametrize("name", [*INTEGER_FIELDS, "engram_layer_ids", "engram_num_embeddings"])
@pytest.mark.parametrize("value", [64.0, "64", True], ids=repr)
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    """A float, a text or a bool never stands in for an integer, alone or in a list."""
    wrong = value if name in INTEGER_FIELDS else [1, value]
    with pytest.raises(TypeError, match=f"^{name}: got {value!r}, expected an int$"):
        EngramConfig.load(SMALL | {name: wrong})


@pytest.mark.parametrize("layer", [0, 1])
def test_a_table_may_be_larger_than_its_primes_but_not_smaller(layer: int) -> None:
    """1009 + 1013 + 1019 + 1021 rows are in use in the first layer, 1031 + 1033 + 1039 + 1049 in the second."""
    used = [4062, 4152]
    for surplus in (0, 1, 1000):
        rows = [have + surplus * (index == layer) for index, have in enumerate(used)]
        assert EngramConfig(**SMALL | {"engram_num_embeddings": rows}).engram_num_embeddings == tuple(rows)
    used[layer] -= 1
    with pytest.raises(ValueError, match=r"^engram_num_embeddings: got ") as caught:
        EngramConfig(**SMALL | {"engram_num_embeddings": used})
    assert f"got {used[layer]}, expected at least {used[layer] + 1}, the sum of layer {layer + 1}'s primes" in str(
        caught.value
    )


def test_prime_sums_stop_at_the_largest_int32() -> None:
    """2^31 - 1 is itself a prime: a layer may have it for its one column, but no second layer finds another."""
    one = SMALL | {"engram_max_ngram_size": 2, "engram_n_heads": 1, "engram_vocab_size": 2**31 - 1}
    fits = one | {"engram_layer_ids": [1], "engram_num_embeddings": [2**31 - 1]}
    assert EngramConfig(**fits).engram_vocab_size == 2**31 - 1
    second = one | {"engram_num_embeddings": [2**31 - 1, 2**32]}
    with pytest.raises(
        ValueError, match=r"^engram_vocab_size: got 2147483647, expected 1 primes that sum to at most 2"
    ):
        EngramConfig(**second)
    start = 2**29  # four times this is one more than fits
    with pytest.raises(ValueError, match=rf"^engram_vocab_size: got {start}, expected 4 primes that sum to at most 2"):
        EngramConfig(**SMALL | {"engram_vocab_size": start, "engram_num_embeddings": [2**32, 2**32]})


@pytest.mark.parametrize("source", [None, 7, [SMALL], EngramConfig], ids=lambda source: type(source).__name__)
def test_what_is_no_config_is_refused(source: Any) -> None:
    """Neither a dict, nor a transformers config, nor a path."""
    with pytest.raises(
        TypeError, match=f"^config: got {type(source).__name__}, expected a dict, a transformers config"
    ):
        EngramConfig.load(source)


def test_a_text_config_that_is_no_config_is_refused() -> None:
    """A nested config of another type must not pass for a model without Engram."""
    with pytest.raises(TypeError, match=r"^text_config: got 'text', expected a nested config"):
        EngramConfig.load({"text_config": "text"})


def test_a_zero_for_the_layers_is_refused() -> None:
    """Only a list can be empty: 0, False and "" are mistakes, not models without Engram."""
    for value in (0, False, ""):
        with pytest.raises(ValueError, match=f"^engram_layer_ids: got {value!r}, expected a list of ints"):
            EngramConfig.load(SMALL | {"engram_layer_ids": value})


def test_a_file_that_holds_no_config_is_refused(tmp_path: Path) -> None:
    """No such file, no JSON, no UTF-8, no object: each is said with the path."""
    path = tmp_path / "config.json"
    for missing in (path, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            EngramConfig.load(missing)
    for content, error in ((b"{", ValueError), (b"\xff\xfe{}", ValueError), (b"[1]", TypeError)):
        path.write_bytes(content)
        with pytest.raises(error, match=r"^config: .*config\.json (is not JSON|holds a list)"):
            EngramConfig.load(path)
