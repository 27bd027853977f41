"""A small layer whose every sum is exact, so that rows, keys and values are known without rounding.

Shared by the tests of the module and by the processes of a run over ranks; it imports no test framework.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reference.config import EngramConfig
from reference.prime_layout import PrimeLayout

PREFIX = "layers.1.engram"
# N and H for C columns; over 3 and 5 ranks 4 heads, over 4 ranks 9, and over 6 ranks 15 are too few: rows are dealt.
SHAPES = {4: (3, 2), 9: (4, 3), 15: (4, 5), 24: (4, 8)}
# +-0, +-0.5, +-1, +-2: sums stay exact in float32 in any order, and -0.0 shows who adds floats
_CODES = np.array([0x00, 0x80, 0x30, 0xB0, 0x38, 0xB8, 0x40, 0xC0], dtype=np.uint8)


def make_config(columns: int, *, dim: int = 32, width: int = 64, copies: int = 2, buckets: int = 100) -> EngramConfig:
    """Make a config of C hash columns and one layer, with surplus rows behind its primes."""
    orders, heads = SHAPES[columns]
    return EngramConfig(
        vocab_size=1000,
        engram_layer_ids=(1,),
        engram_num_embeddings=(columns * (2 * buckets + 100),),
        engram_max_ngram_size=orders,
        engram_n_heads=heads,
        engram_head_dim=dim,
        engram_vocab_size=buckets,
        engram_compressed_vocab_size=1000,
        engram_pad_token_id=7,
        hidden_size=width,
        hc_mult=copies,
        rms_norm_eps=1e-20,
    )


@dataclass(frozen=True, eq=False)
class Layer:
    """Hold a config and the tensors of its layer, under their public names; rows past the primes hold NaN."""

    config: EngramConfig
    tensors: dict[str, torch.Tensor]

    @classmethod
    def drawn(cls, config: EngramConfig, seed: int) -> "Layer":
        """Draw a table of +-0, 0.5, 1 and 2 with scales of 1, and sparse wkv of -1, 0 and 1."""
        rng = np.random.default_rng(seed)
        used, rows = int(PrimeLayout(config).rows[0]), config.engram_num_embeddings[0]
        dim, copies, width = config.engram_head_dim, config.hc_mult, config.hidden_size
        codes = rng.choice(_CODES, size=(rows, dim))
        codes[used:] = 0x7F
        inner = config.columns * dim
        wkv = np.where(rng.random(((copies + 1) * width, inner)) < 8 / inner, rng.choice([-1.0, 1.0], size=inner), 0.0)
        factors = rng.choice([0.5, 1.0, 2.0], size=(2, copies, width))
        tensors = {
            "embed.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            "embed.weight_scale_inv": torch.full((rows, dim // 32), 127, dtype=torch.uint8),
            "wkv.weight": torch.from_numpy(wkv).bfloat16(),
            "q_weight": torch.from_numpy(factors[0]).bfloat16(),
            "k_weight": torch.from_numpy(factors[1]).bfloat16(),
        }
        return cls(config, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"{PREFIX}.{name}"]

    def module(self, side: Any, **options: Any) -> Any:
        """Make a side's `Engram` and load it."""
        module = side(self.config, 0, **options)
        module.load_tensors(self.tensors, PREFIX)
        return module

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Look rows up by the definition, with torch's own float8: [T, C] to [T, C, dim] bfloat16."""
        factors = torch.exp2(self["embed.weight_scale_inv"].double() - 127).repeat_interleave(32, dim=1)
        values = (self["embed.weight"].float() * factors.float()).numpy()
        ids = ids.cpu().numpy()
        found = np.where((ids >= 0)[:, :, None], values[np.maximum(ids, 0)], np.float32(0.0))
        return torch.from_numpy(found).bfloat16()

    def keys_and_value(self, ids: torch.Tensor) -> torch.Tensor:
        """Multiply by wkv in float64: [T, (hc+1)*M] bfloat16, of which no element needed rounding."""
        exact = self.rows(ids).double().flatten(1) @ self["wkv.weight"].double().T
        assert torch.equal(exact.bfloat16().double(), exact)
        return exact.bfloat16()

    def ids(self, tokens: int, seed: int) -> torch.Tensor:
        """Draw ids [T, C] int32: each column's own rows, often its first or last one, and some DEAD."""
        rng = np.random.default_rng(seed)
        sizes = PrimeLayout(self.config).primes[0].reshape(-1)
        bucket = rng.integers(0, sizes, size=(tokens, len(sizes)))
        edge = rng.random(bucket.shape)
        bucket = np.where(edge < 0.2, 0, np.where(edge < 0.4, sizes - 1, bucket))
        ids = bucket + np.cumsum(sizes) - sizes
        return torch.from_numpy(np.where(edge > 0.93, -1, ids).astype(np.int32))

    def stream(self, tokens: int, seed: int) -> torch.Tensor:
        """Draw a stream [T, hc, M] bfloat16 of small quarters, whose squares add up exactly."""
        rng = np.random.default_rng(seed)
        return torch.from_numpy(
            rng.integers(-8, 9, (tokens, self.config.hc_mult, self.config.hidden_size)) / 4
        ).bfloat16()

    def mask(self, tokens: int, seed: int) -> torch.Tensor:
        """Draw a mask [T] bool."""
        return torch.from_numpy(np.random.default_rng(seed).random(tokens) < 0.7)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bfloat16 tensors bit for bit, shapes too."""
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(a.view(torch.int16).cpu(), b.view(torch.int16).cpu())
