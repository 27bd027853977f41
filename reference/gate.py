"""The gate: how much of a looked-up value enters each copy of the hyper-connection stream."""

import torch

from reference.checks import check_gate


@torch.no_grad()
def engram_gate(
    hidden: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    *,
    eps: float,
    clamp: float = 1e-6,
) -> torch.Tensor:
    """Add the looked-up value to every copy of the stream, each by a gate of its own.

    For a token and a copy i, with h = hidden[token, i], all in float32:

        (1)  key_0 .. key_{hc-1}, value = kv[token], in parts of M
        (2)  norm  = rsqrt(mean(h^2) + eps) * rsqrt(mean(key_i^2) + eps) * rsqrt(M)
        (3)  dot   = sum(h * q_i * k_i * key_i) * norm
        (4)  s     = sqrt(max(|dot|, clamp)), negative where dot < 0; -0.0 counts as positive, NaN stays NaN
        (5)  out   = h + sigmoid(s) * value, rounded once to the dtype of hidden

    A token whose mask is False, or that stands past Tkv (padding), is copied bit for bit, whatever its row of kv holds.

    Args:
        hidden: [T, hc, M] bfloat16, float16 or float32, the stream; any strides; never written.
        kv: [Tkv, (hc+1)*M] bfloat16 or the dtype of hidden, hc keys and then one value; Tkv <= T.
        q_weight: [hc, M] bfloat16, the weight of the stream's norm.
        k_weight: [hc, M] bfloat16, the weight of the key's norm.
        token_mask: [Tkv] bool, False where a token passes through; None opens all.
        eps: finite, >= 0, added to each mean square.
        clamp: finite, >= 0, the least magnitude of dot under the root.

    Returns:
        [T, hc, M], contiguous, dtype and device of hidden.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: another shape or device, Tkv > T, eps or clamp out of range.

    Source: DeepSeek-V4.1-Flash's Engram layer; its numbers by hand are those of github.com/fegato/colibri.
    """
    check_gate(hidden, kv, q_weight, k_weight, token_mask, eps, clamp)
    copies, width = hidden.shape[1:]
    tokens = kv.shape[0]
    out = hidden.clone(memory_format=torch.contiguous_format)
    # Dense, so that sums do not depend on strides: a GPU's summation order does.
    parts = kv.float().contiguous().unflatten(1, (copies + 1, width))
    value = parts[:, copies]
    for copy in range(copies):
        h = out[:tokens, copy].float()
        key = parts[:, copy]
        weight = q_weight[copy].float() * k_weight[copy].float()
        norm = _inverse_rms(h, eps) * _inverse_rms(key, eps) * width**-0.5
        dot = (h * key * weight).sum(dim=1) * norm
        root = dot.abs().clamp(min=clamp).sqrt()
        gate = torch.where(dot < 0, -root, root).sigmoid()
        gated = (h + gate[:, None] * value).to(hidden.dtype)
        # A shut row is chosen, not multiplied by 0: nothing of its keys and value, NaN or not, gets into it.
        out[:tokens, copy] = (
            gated if token_mask is None else torch.where(token_mask[:, None], gated, out[:tokens, copy])
        )
    return out


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().mean(dim=1) + eps).rsqrt()
