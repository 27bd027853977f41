"""What a run is about: one configuration with its token map, and every constant that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.oracle import IntegerOracle
from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from reference.ngram_hash import ngram_hash
from reference.prime_layout import PrimeLayout
from reference.token_map import deepseek_v41_flash_token_map


@dataclass(frozen=True, eq=False)
class World:
    """Bind a configuration to a token map.

    Attributes:
        name: how `--config` calls it.
        config: the model's Engram configuration.
        token_map: `[V]` int32, token id to compressed id.
        image_tokens: the ids that stand for an image; whoever feeds them marks them dead.
    """

    name: str
    config: EngramConfig
    token_map: np.ndarray
    image_tokens: tuple[int, ...]

    @property
    def vocabulary(self) -> int:
        """V, the number of token ids that the map knows."""
        return len(self.token_map)

    @property
    def pad_id(self) -> int:
        """The compressed id of the pad token."""
        return int(self.token_map[self.config.engram_pad_token_id])

    @cached_property
    def multipliers(self) -> np.ndarray:
        """`[L, N]` int64."""
        return hash_multipliers(self.config)

    @cached_property
    def layout(self) -> PrimeLayout:
        """The primes and offsets of every layer."""
        return PrimeLayout(self.config)

    @cached_property
    def oracle(self) -> IntegerOracle:
        """The oracle in plain integers."""
        return IntegerOracle(self.config, self.token_map.tolist())

    @cached_property
    def alike(self) -> np.ndarray:
        """`[V]` int64: for each token the next that compresses alike, in a ring; itself where it has no other."""
        order = np.argsort(self.token_map, kind="stable")
        kinds = self.token_map[order]
        ends = np.flatnonzero(np.append(np.diff(kinds) != 0, True))
        starts = np.append(0, ends[:-1] + 1)
        following = np.append(order[1:], 0)
        following[ends] = order[starts]
        ring = np.empty_like(order)
        ring[order] = following
        return ring

    def alone(self, tokens: np.ndarray, dead: np.ndarray) -> np.ndarray:
        """Hash one request by itself, whole: `[T]` token ids and flags to `[T, L, C]` int32 rows."""
        return ngram_hash(
            self.token_map[tokens],
            dead,
            multipliers=self.multipliers,
            primes=self.layout.primes,
            offsets=self.layout.offsets,
            pad_id=self.pad_id,
        )


def flash() -> World:
    """DeepSeek-V4.1-Flash: its published configuration, and the map of its tokenizer."""
    return World(
        "deepseek-v4.1-flash", EngramConfig.deepseek_v41_flash(), deepseek_v41_flash_token_map(), (129264, 129265)
    )


def toy() -> World:
    """A model over bytes, small enough to follow by hand: letters compress without their case; the pad token is `~`."""
    keys = [bytes([byte]).lower() for byte in range(256)]
    first = {key: rank for rank, key in enumerate(dict.fromkeys(keys))}
    config = EngramConfig(
        vocab_size=256,
        engram_layer_ids=(1, 2),
        engram_num_embeddings=(5000, 5000),
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=1000,
        engram_compressed_vocab_size=len(first),
        engram_pad_token_id=ord("~"),
        hidden_size=64,
        hc_mult=2,
        rms_norm_eps=1e-20,
    )
    return World("toy", config, np.array([first[key] for key in keys], dtype=np.int32), (0xFE, 0xFF))
