"""The gate part of the main job: streams and keys of every dtype, edges of the dot, and what must pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parity.finding import CLOSE_AXES, Finding, bits, hexadecimal
from parity.protocol import Implementation
from parity.table import noise
from parity.tolerances import closeness
from parity.world import World

CLAMP = 1e-6
STREAMS = {
    "bf16 stream": (torch.bfloat16, torch.bfloat16),
    "fp16 stream, bf16 keys": (torch.float16, torch.bfloat16),
    "fp16 stream": (torch.float16, torch.float16),
    "fp32 stream, bf16 keys": (torch.float32, torch.bfloat16),
    "fp32 stream": (torch.float32, torch.float32),
}
TOKENS = {"cpu": 12, "cuda": 2048}  # each of the copies costs Triton's interpreter some 20 ms
PADDING = 2
_CHUNK = 512  # tokens that are judged at a time, in float64
_SIGNALLING_NAN = {2: 0x7FA1, 4: 0x7FA12345}  # as integers of so many bytes


@dataclass(frozen=True, eq=False)
class Case:
    """Hold the arguments of a call: stream [T, hc, M], keys and value [Tkv, (hc+1)*M], weights [hc, M], mask [Tkv]."""

    hidden: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    token_mask: torch.Tensor
    eps: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of a call."""
        return self.hidden, self.kv, self.q_weight, self.k_weight, self.token_mask

    @property
    def open_tokens(self) -> torch.Tensor:
        """The numbers of the tokens that the gate may change."""
        return self.token_mask.nonzero().flatten()

    def passes(self) -> torch.Tensor:
        """Give [T] bool, the tokens that are copied bit for bit: shut ones and padding."""
        shut = torch.ones(len(self.hidden), dtype=torch.bool, device=self.hidden.device)
        shut[self.open_tokens] = False
        return shut


def judge_gate(
    world: World,
    implementations: Sequence[Implementation],
    device: torch.device,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Finding]:
    """Judge every implementation's `gate.engram_gate` at the model's width, by the one table of tolerances.

    Args:
        world: hc, M and eps are its configuration's.
        implementations: each must offer `gate.engram_gate`.
        device: where the tensors lie.
        seed: of the drawn values.
        progress: told the tokens of each case.

    Returns:
        a finding for each pair of dtypes, and one for the tokens that pass.
    """
    findings = []
    shut = Finding("gate", "shut and padding", "copied bit for bit, with infinities and NaN behind them")
    for number, (name, dtypes) in enumerate(STREAMS.items()):
        case = draw(world, TOKENS[device.type], dtypes, 16 * seed + number, device)
        finding = Finding("gate", name, "error against float64 by the table of tolerances", worst=0.0)
        outs = {}
        for one in implementations:
            # Copies, so that whoever writes into its arguments spoils nothing for the others.
            hidden, *others = (x.clone() for x in case.tensors)
            ask = partial(one.require("gate.engram_gate"), hidden, *others, eps=case.eps)
            got = finding.call(one.name, ask, like=case.hidden)
            if not torch.equal(bits(hidden), bits(case.hidden)):
                finding.wrong(one.name, 1, ["wrote into the stream that it was given"])
            if got is not None:
                outs[one.name] = got
        judge_open(finding, case, outs)
        judge_shut(shut, case, outs, _always(f"{name}: "))
        findings.append(finding)
        progress(len(case.hidden))
    return [*findings, shut]


def draw(world: World, tokens: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int, device: torch.device) -> Case:
    """Draw a case: the edges of the dot first, then values about normal; a fourth is shut and the last two are padding.

    Edges: a stream of 0, of -0, one that is orthogonal to its keys (dots of 0), dots below the clamp on both sides, and
    dots as large as they get.
    """
    config = world.config
    copies, width, live = config.hc_mult, config.hidden_size, tokens - PADDING
    hidden = noise((tokens, copies, width), 4 * seed, device)
    parts = noise((live, copies + 1, width), 4 * seed + 1, device)
    keys = parts[:, :copies]
    even = torch.arange(width, device=device) % 2 == 0
    hidden[0], hidden[1] = 0.0, -0.0
    hidden[2, :, ~even], keys[2][:, even] = 0.0, 0.0
    for token, sign in ((3, 1.0), (4, -1.0)):
        hidden[token], keys[token] = 0.0, 0.0
        hidden[token, :, 0], keys[token, :, 0], keys[token, :, 1:2] = 1.0, sign * 1e-9, 1.0
    keys[5], keys[6] = hidden[5], -hidden[6]
    weights = (1 + 0.3 * noise((2, copies, width), 4 * seed + 2, device)).to(torch.bfloat16)
    mask = torch.arange(live, device=device) % 4 != 3
    mask[:7] = True
    mask[-1] = False
    case = Case(hidden.to(dtypes[0]), parts.flatten(1).to(dtypes[1]), weights[0], weights[1], mask, config.rms_norm_eps)
    poison(case.hidden, case.passes())
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtypes[1], device=device)
    case.kv[~mask] = bad.repeat(-(-case.kv.shape[1] // 3))[: case.kv.shape[1]]
    return case


def poison(hidden: torch.Tensor, passes: torch.Tensor) -> None:
    """Put a NaN that arithmetic would quieten, and an infinity, into the tokens of a stream that must pass."""
    hidden[passes, :, -1] = math.inf
    bits(hidden)[passes, :, 0] = _SIGNALLING_NAN[hidden.element_size()]


def formula(
    hidden: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gate of open tokens by its definition, in the dtype of its arguments: float64 to judge by.

        dot = sum(h * q * k * key) / sqrt(mean(h^2) + eps) / sqrt(mean(key^2) + eps) / sqrt(M)
        out = h + sigmoid(s) * value,   s = sqrt(max(|dot|, clamp)), negative where dot < 0

    Returns:
        out [n, hc, M], and the magnitude that its rounding is judged by: the absolute terms behind an element, each
        times its effect on it (d out / d dot is value * g * (1 - g) / 2s).
    """
    copies, width = hidden.shape[1:]
    parts = kv.unflatten(1, (copies + 1, width))
    key, value = parts[:, :copies], parts[:, copies:]
    terms = hidden * key * (q_weight * k_weight)
    scale = width**-0.5
    for x in (hidden, key):
        scale = scale / ((x * x).mean(dim=2, keepdim=True) + eps).sqrt()
    dot = terms.sum(dim=2, keepdim=True) * scale
    root = torch.where(dot.abs() < CLAMP, CLAMP, dot.abs()).sqrt()
    gate = torch.where(dot < 0, -root, root).sigmoid()
    reach = root + terms.abs().sum(dim=2, keepdim=True) * scale / (2 * root)
    return hidden + gate * value, hidden.abs() + value.abs() * (gate + gate * (1 - gate) * reach)


def _always(text: str) -> Callable[[int], str]:
    return lambda token: text


def _formula(case: Case, tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    given = (case.hidden[tokens], case.kv[tokens], case.q_weight, case.k_weight)
    hidden, kv, q_weight, k_weight = (x.to(dtype) for x in given)
    return formula(hidden, kv, q_weight, k_weight, case.eps)


def judge_open(
    finding: Finding, case: Case, outs: Mapping[str, torch.Tensor], where: Callable[[int], str] = lambda token: ""
) -> None:
    """Judge the open tokens of what implementations gave for one case; `where` says more about a token."""
    finding.rows += len(outs) * len(case.open_tokens) * case.hidden.shape[1]
    for tokens in case.open_tokens.split(_CHUNK):
        exact, magnitude = _formula(case, tokens, torch.float64)
        plain = _formula(case, tokens, torch.float32)[0].to(case.hidden.dtype)
        for name, out in outs.items():
            found = closeness("gate", out[tokens], plain, exact, magnitude)
            finding.worst = max(finding.worst or 0.0, found.worst)
            if not (count := int(found.bad.any(dim=2).sum())):
                continue
            over = torch.where(found.bad, found.error - found.allowed, -math.inf)
            lines = []
            for kind, at in (("first", int(found.bad.flatten().nonzero()[0])), ("worst", int(over.argmax()))):
                index = [int(i) for i in torch.unravel_index(torch.tensor(at), exact.shape)]
                index[0] = int(tokens[index[0]])
                place = ", ".join(f"{axis} {i}" for axis, i in zip(CLOSE_AXES, index, strict=True))
                got, want, beside, error, allowed = (
                    float(x.flatten()[at]) for x in (out[tokens], exact, plain, found.error, found.allowed)
                )
                lines.append(
                    f"{kind}: {where(index[0])}{place}: got {got!r}, exact {want!r}, plain PyTorch {beside!r}; error "
                    f"{error:.3g}, allowed {allowed:.3g}, {error - allowed:.3g} over"
                )
            finding.wrong(name, count, lines)


def judge_shut(
    finding: Finding,
    case: Case,
    outs: Mapping[str, torch.Tensor],
    where: Callable[[int], str] = lambda token: "",
) -> None:
    """Compare the tokens that must pass, bit for bit."""
    passes = case.passes()
    finding.cases += len(outs)
    finding.rows += len(outs) * int(passes.sum()) * case.hidden.shape[1]
    for name, out in outs.items():
        unequal = (bits(out) != bits(case.hidden)) & passes[:, None, None]
        if not (count := int(unequal.any(dim=2).sum())):
            continue
        index = unequal.nonzero()[0].tolist()
        place = ", ".join(f"{axis} {i}" for axis, i in zip(CLOSE_AXES, index, strict=True))
        kind = "shut" if index[0] < len(case.kv) else "padding"
        expected, got = (hexadecimal(x[tuple(index)]) for x in (case.hidden, out))
        finding.wrong(name, count, [f"{where(index[0])}{place} ({kind}): expected {expected}, got {got}"])
