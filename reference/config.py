"""What a model's public config says about Engram, checked once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reference.prime_layout import PrimeLayout

_INT32_MAX = 2**31 - 1
_POSITIVE = (
    "vocab_size",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "hidden_size",
    "hc_mult",
)


@dataclass(frozen=True)
class EngramConfig:
    """Hold the Engram fields of a model config, under their public names.

    Attributes:
        vocab_size: V, token ids lie in [0, V).
        engram_layer_ids: the backbone layers that have Engram; L is their number.
        engram_num_embeddings: rows of each layer's table, at least the sum of the layer's primes.
        engram_max_ngram_size: N, the longest n-gram; lookback depth D = N - 1.
        engram_n_heads: H, heads an n-gram order.
        engram_head_dim: width of a table row, a multiple of 32.
        engram_vocab_size: where the search for bucket primes starts.
        engram_compressed_vocab_size: W, the number of compressed ids.
        engram_pad_token_id: the token (not compressed) that stands where an n-gram has none.
        hidden_size: M.
        hc_mult: hyper-connection copies of the stream.
        rms_norm_eps: added to the mean square in the gate.

    Raises:
        TypeError, ValueError: naming the field, what it is and what was expected.

    Source: the config.json of DeepSeek-V4.1-Flash.
    """

    vocab_size: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    hidden_size: int
    hc_mult: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        for name in ("engram_layer_ids", "engram_num_embeddings"):
            object.__setattr__(self, name, _int_tuple(name, getattr(self, name)))
        _check(self)

    @property
    def lookback(self) -> int:
        """D = N - 1, the tokens before the newest that an n-gram reaches."""
        return self.engram_max_ngram_size - 1

    @property
    def columns(self) -> int:
        """C = (N - 1) * H, the hash columns of a layer."""
        return self.lookback * self.engram_n_heads

    @classmethod
    def load(cls, source: Any) -> EngramConfig | None:
        """Read the Engram fields of a model config.

        Args:
            source: a dict, a `transformers` config object, or the path of a `config.json` or of its folder; each may
                nest the fields under `text_config`.

        Returns:
            the configuration, or None where `engram_layer_ids` is missing or empty: a model without Engram.

        Raises:
            TypeError, ValueError: a field is missing or wrong, or the source is none of these.
            FileNotFoundError: no such file.
        """
        found = _read_fields(source)
        if found["engram_layer_ids"] in (None, [], ()):
            return None
        missing = [field.name for field in fields(cls) if found.get(field.name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing from the config, expected beside engram_layer_ids")
        return cls(**found)

    @classmethod
    def deepseek_v41_flash(cls) -> EngramConfig:
        """Give the published configuration of DeepSeek-V4.1-Flash."""
        return cls(
            vocab_size=129280,
            engram_layer_ids=(1, 14),
            engram_num_embeddings=(384006168, 384016682),
            engram_max_ngram_size=4,
            engram_n_heads=8,
            engram_head_dim=256,
            engram_vocab_size=16000000,
            engram_compressed_vocab_size=99092,
            engram_pad_token_id=2,
            hidden_size=5120,
            hc_mult=4,
            rms_norm_eps=1e-20,
        )


def _read_fields(source: Any) -> dict[str, Any]:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {path} is not JSON ({error}), expected a model's config.json") from error
        if not isinstance(source, Mapping):
            raise TypeError(f"config: {path} holds a {type(source).__name__}, expected a JSON object")
    is_config_object = hasattr(source, "to_dict")
    if not isinstance(source, Mapping) and not is_config_object:
        raise TypeError(
            f"config: got {type(source).__name__}, expected a dict, a transformers config or the path of a config.json"
        )

    def get(level: Any, name: str) -> Any:
        return level.get(name) if isinstance(level, Mapping) else getattr(level, name, None)

    nested = get(source, "text_config")
    if not (nested is None or isinstance(nested, Mapping) or hasattr(nested, "to_dict")):
        raise TypeError(f"text_config: got {nested!r}, expected a nested config")
    level = source if nested is None or get(source, "engram_layer_ids") else nested
    return {field.name: get(level, field.name) for field in fields(EngramConfig)}


def _check(config: EngramConfig) -> None:
    for name in _POSITIVE:
        _check_int(name, getattr(config, name), minimum=1)
    _check_int("engram_max_ngram_size", config.engram_max_ngram_size, minimum=2)
    _check_int("engram_n_heads", config.engram_n_heads, minimum=1)
    _check_int("engram_pad_token_id", config.engram_pad_token_id, minimum=0)
    eps = config.rms_norm_eps
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < float("inf"):
        _refuse("rms_norm_eps", eps, "a finite float >= 0")
    layer_ids, rows = config.engram_layer_ids, config.engram_num_embeddings
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0:
        _refuse("engram_layer_ids", layer_ids, "at least one, distinct and not negative")
    if len(rows) != len(layer_ids):
        _refuse("engram_num_embeddings", rows, f"one entry a layer of engram_layer_ids {layer_ids}")
    if config.engram_pad_token_id >= config.vocab_size:
        _refuse("engram_pad_token_id", config.engram_pad_token_id, f"below vocab_size {config.vocab_size}")
    if config.engram_head_dim % 32:
        _refuse("engram_head_dim", config.engram_head_dim, "a multiple of 32, the width of a scale block")
    if config.engram_compressed_vocab_size > _INT32_MAX:
        _refuse("engram_compressed_vocab_size", config.engram_compressed_vocab_size, "at most 2^31 - 1: ids are int32")
    # Every prime is at least engram_vocab_size: refuse a hopeless size before the search for primes.
    if config.columns * config.engram_vocab_size > _INT32_MAX:
        _refuse("engram_vocab_size", config.engram_vocab_size, _prime_sum_text(config))
    for layer_id, have, used in zip(layer_ids, rows, PrimeLayout(config).rows.tolist(), strict=True):
        if used > _INT32_MAX:
            _refuse("engram_vocab_size", config.engram_vocab_size, _prime_sum_text(config))
        if have < used:
            _refuse("engram_num_embeddings", have, f"at least {used}, the sum of layer {layer_id}'s primes")


def _prime_sum_text(config: EngramConfig) -> str:
    return f"{config.columns} primes that sum to at most 2^31 - 1, since ids are int32"


def _int_tuple(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        _refuse(name, value, "a list of ints")
    for item in value:
        _check_int(name, item, minimum=None)
    return tuple(value)


def _check_int(name: str, value: Any, minimum: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, expected an int")
    if minimum is not None and value < minimum:
        _refuse(name, value, f"at least {minimum}")


def _refuse(name: str, got: Any, expected: str) -> None:
    raise ValueError(f"{name}: got {got!r}, expected {expected}")
