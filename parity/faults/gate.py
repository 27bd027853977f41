"""Mistakes in the gate: plain PyTorch with one part of the formula replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parity.faults.fault import plant

Change = Callable[..., Any]
_GATE = "gate.engram_gate"


@dataclass(frozen=True)
class Plain:
    """Compute the gate in float32; each field replaces a part of the formula.

    Attributes:
        split: parts `[T, hc+1, M]` and hc -> keys and value.
        weights: q, k -> the weights that are used.
        inverse_rms: x, eps -> `[T, hc, 1]`.
        total: terms `[T, hc, M]` -> their sum.
        scale: M -> the factor of the norm.
        root: |dot|, clamp -> the root.
        signed: dot, root -> s.
        combine: h, what the gate lets through -> out.
        needs_mask_of_all: whether a mask of another length is refused.
        shut: out, h, mask -> out with its shut rows.
    """

    split: Change = lambda parts, copies: (parts[:, :copies], parts[:, copies:])
    weights: Change = lambda q, k: (q, k)
    inverse_rms: Change = lambda x, eps: (x.square().mean(2, keepdim=True) + eps).rsqrt()
    total: Change = lambda terms: terms.sum(2, keepdim=True)
    scale: Change = lambda width: width**-0.5
    root: Change = lambda size, clamp: size.clamp(min=clamp).sqrt()
    signed: Change = lambda dot, root: torch.where(dot < 0, -root, root)
    combine: Change = lambda h, passed: h + passed
    needs_mask_of_all: bool = True
    by_product: bool = False
    cast: Change = lambda x: x

    def __call__(
        self,
        hidden: torch.Tensor,
        kv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        *,
        eps: float,
        clamp: float = 1e-6,
    ) -> torch.Tensor:
        """Gate a stream; the arguments are those of `reference.gate.engram_gate`."""
        live, (copies, width) = len(kv), hidden.shape[1:]
        mask = torch.ones(live, dtype=torch.bool, device=hidden.device) if token_mask is None else token_mask
        if mask.shape != (live,) and self.needs_mask_of_all:
            raise ValueError(f"token_mask: got {len(mask)} tokens, expected {live}")
        h, is_open = hidden[:live].float(), mask[:, None, None]
        key, value = self.split(kv.float().reshape(live, copies + 1, width), copies)
        q, k = self.weights(q_weight.float(), k_weight.float())
        norm = self.inverse_rms(h, eps) * self.inverse_rms(key, eps) * self.scale(width)
        dot = self.total(h * key * (q * k)) * norm
        passed = self.signed(dot, self.root(dot.abs(), clamp)).sigmoid() * value
        if self.by_product:
            gated, is_open = h + is_open * passed, torch.ones_like(is_open)
        else:
            gated = self.combine(h, passed)
        return torch.cat([torch.where(is_open, self.cast(gated).to(hidden.dtype), hidden[:live]), hidden[live:]])


def _entry(number: str, clause: str, story: str, gate: Plain) -> Callable[..., torch.Tensor]:
    def faulty(*arguments: Any, **options: Any) -> torch.Tensor:
        return gate(*arguments, **options)

    faulty.__doc__ = story
    return plant(number, clause, offers=_GATE)(faulty)


plain_gate = Plain()
G1 = _entry(
    "G1", "the stream is added twice",
    "The kernel adds the residual, and so does its caller. Source: TileKernels#19. Law: gate.",
    Plain(combine=lambda h, passed: h + passed + h),
)  # fmt: skip
G2 = _entry(
    "G2", "the gate takes the sign of the dot, which is 0 where the dot is",
    "sign() stands for a comparison: a dot of zero gives a gate of 0.5 and not of the clamp. Law: gate.",
    Plain(signed=lambda dot, root: dot.sign() * root),
)  # fmt: skip
G3 = _entry(
    "G3", "the clamp is applied to the root, not under it",
    "Clamp and root change places, and small dots open the gate less than they should. Law: gate.",
    Plain(root=lambda size, clamp: size.sqrt().clamp(min=clamp)),
)  # fmt: skip
G4 = _entry(
    "G4", "eps is added to the root of the mean square, not to the mean square",
    "A layer norm's habit; with the published eps of 1e-20 nobody sees it. Law: gate.",
    Plain(inverse_rms=lambda x, eps: 1 / (x.square().mean(2, keepdim=True).sqrt() + eps)),
)  # fmt: skip
G5 = _entry(
    "G5", "the dot is divided by M, not by its root",
    "A mean is taken where a scaled dot product is meant. Law: gate.", Plain(scale=lambda width: 1 / width),
)  # fmt: skip
G6 = _entry(
    "G6", "a mask of length 1 is broadcast and gates every token",
    "A mask of a dummy step reaches a step of many tokens, and broadcasting makes it fit. "
    "Source: vllm-ascend#16423. Law: mask_of_one.",
    Plain(needs_mask_of_all=False),
)  # fmt: skip
G7 = _entry(
    "G7", "a shut gate multiplies by 0, and 0 times infinity leaks",
    "The mask is a factor: whatever is not finite behind a shut gate makes NaN. Law: shut_gate.",
    Plain(by_product=True),
)  # fmt: skip
G8 = _entry(
    "G8", "the value stands before the keys",
    "The fused projection is split in another order than it was stored. Law: gate.",
    Plain(split=lambda parts, copies: (parts[:, 1:], parts[:, :1])),
)  # fmt: skip
G9 = _entry(
    "G9", "each copy uses the weights of the copy before it",
    "The weights' row is off by one. Law: gate.", Plain(weights=lambda q, k: (q.roll(1, 0), k.roll(1, 0))),
)  # fmt: skip
G10 = _entry(
    "G10", "the sum is taken in bfloat16",
    "The products keep the dtype of the stream, and so does their sum. Law: gate.",
    Plain(total=lambda terms: terms.bfloat16().sum(2, keepdim=True).float()),
)  # fmt: skip
G11 = _entry(
    "G11", "the weight of the stream's norm is left out",
    "Only the key's norm has its weight; near training's start both are 1. Law: gate.",
    Plain(weights=lambda q, k: (torch.ones_like(q), k)),
)  # fmt: skip
G12 = _entry(
    "G12", "the result is rounded to float16 before the dtype of the stream",
    "A kernel stores through half precision: two roundings, and no large values. Law: gate.",
    Plain(cast=lambda x: x.half().float()),
)  # fmt: skip
