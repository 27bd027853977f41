"""The gate as one Triton kernel: each program gates one copy of one token's stream."""

import torch
import triton
import triton.language as tl

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

    For copy i of a token, in float32, `key_i` and `value` being parts of M of its row of kv:

        dot = sum(h_i * q_i * k_i * key_i) * rsqrt(mean(h_i^2) + eps) * rsqrt(mean(key_i^2) + eps) * rsqrt(M)
        s   = sqrt(max(|dot|, clamp)), negative where dot < 0; -0.0 counts as positive, NaN stays NaN
        out = h_i + sigmoid(s) * value, rounded once to the dtype of hidden

    A token whose mask is False, or that stands past Tkv (padding), is copied bit for bit; its row of kv is not read.
    The sums run in one fixed order, so the same input gives the same bits. One variant is compiled for all T and Tkv.

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

    Source: DeepSeek-V4.1-Flash's Engram layer.
    """
    check_gate(hidden, kv, q_weight, k_weight, token_mask, eps, clamp)
    tokens, copies, width = hidden.shape
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if tokens == 0:
        return out
    hidden, kv, q_weight, k_weight = (_dense_rows(x) for x in (hidden, kv, q_weight, k_weight))
    _gate_kernel[(tokens * copies,)](
        out,
        hidden,
        kv,
        q_weight,
        k_weight,
        None if token_mask is None else token_mask.view(torch.uint8),
        kv.shape[0],
        1 if token_mask is None else token_mask.stride(0),
        float(eps),
        float(clamp),
        TOKEN_STRIDE=hidden.stride(0),
        COPY_STRIDE=hidden.stride(1),
        KV_STRIDE=kv.stride(0),
        Q_STRIDE=q_weight.stride(0),
        K_STRIDE=k_weight.stride(0),
        COPIES=copies,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        BY_BITS=not isinstance(_gate_kernel, triton.JITFunction),
        num_warps=4,
        # Multiply and add stay apart, as in PyTorch: the same roundings, and the faster code here.
        enable_fp_fusion=False,
    )
    return out


@triton.jit(
    do_not_specialize=["kv_tokens", "mask_stride"],
    do_not_specialize_on_alignment=["kv_tokens", "mask_stride"],
)
def _gate_kernel(
    out,  # [T, hc, M] contiguous
    hidden,  # [T, hc, M]
    kv,  # [Tkv, (hc+1)*M]
    q_weight,  # [hc, M]
    k_weight,  # [hc, M]
    token_mask,  # [Tkv] uint8, or None
    kv_tokens,
    mask_stride,
    eps,
    clamp,
    TOKEN_STRIDE: tl.constexpr,
    COPY_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    # The copies of a token are neighbours, so that they find its value in the cache.
    row = tl.program_id(0).to(tl.int64)
    token = row // COPIES
    copy = row % COPIES
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH

    stream = tl.load(hidden + token * TOKEN_STRIDE + copy * COPY_STRIDE + lane, mask=inside, other=0.0)
    target = out + row * WIDTH + lane
    is_open = token < kv_tokens
    if token_mask is not None:
        is_open = is_open & (tl.load(token_mask + token * mask_stride, mask=is_open, other=0) != 0)

    if is_open:
        token_kv = kv + token * KV_STRIDE + lane
        key = _widen(tl.load(token_kv + copy * WIDTH, mask=inside, other=0.0), BY_BITS)
        value = _widen(tl.load(token_kv + COPIES * WIDTH, mask=inside, other=0.0), BY_BITS)
        q = _widen(tl.load(q_weight + copy * Q_STRIDE + lane, mask=inside, other=0.0), BY_BITS)
        k = _widen(tl.load(k_weight + copy * K_STRIDE + lane, mask=inside, other=0.0), BY_BITS)
        h = _widen(stream, BY_BITS)

        norm = tl.rsqrt(tl.sum(h * h) / WIDTH + eps) * tl.rsqrt(tl.sum(key * key) / WIDTH + eps) * WIDTH**-0.5
        dot = tl.sum(h * key * (q * k)) * norm
        magnitude = tl.abs(dot)
        # A select, for tl.maximum swallows NaN.
        root = tl.sqrt(tl.where(magnitude < clamp, clamp, magnitude))
        gate = tl.sigmoid(tl.where(dot < 0, -root, root))
        tl.store(target, _narrow(h + gate * value, stream.dtype, BY_BITS), mask=inside)
    else:
        tl.store(target, stream, mask=inside)


@triton.jit
def _widen(x, BY_BITS: tl.constexpr):
    """Give x as float32; by bits where the interpreter's cast breaks bfloat16 subnormals."""
    if BY_BITS and x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _narrow(x, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """Round float32 to nearest even; by bits where the interpreter's cast to bfloat16 truncates."""
    if BY_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # A NaN stays one: its lower half is zero, for it came from bfloat16 or from arithmetic.
        narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
