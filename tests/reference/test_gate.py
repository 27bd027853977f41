"""Laws of the gate, judged by a float64 oracle that decimal arithmetic vouches for.

`tests.optimized.test_gate` runs the same laws on the kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.tolerances import assert_close
from reference.gate import engram_gate

Gate = Callable[..., torch.Tensor]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STREAMS = ((BF16, BF16), (FP16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP32))


@pytest.fixture(scope="module")
def gate() -> Gate:
    """The implementation under test."""
    return engram_gate


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of one call."""

    hidden: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    token_mask: torch.Tensor | None = None
    eps: float = 1e-20
    clamp: float = 1e-6

    def call(self, gate: Gate) -> torch.Tensor:
        tensors = (self.hidden, self.kv, self.q_weight, self.k_weight, self.token_mask)
        return gate(*tensors, eps=self.eps, clamp=self.clamp)

    def open_tokens(self) -> torch.Tensor:
        is_open = torch.zeros(len(self.hidden), dtype=torch.bool, device=self.hidden.device)
        is_open[: len(self.kv)] = True if self.token_mask is None else self.token_mask
        return is_open

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Case":
        names = ("hidden", "kv", "q_weight", "k_weight", "token_mask")
        return replace(self, **{n: change(getattr(self, n)) for n in names if getattr(self, n) is not None})


def random_case(
    seed, tokens, kv_tokens, copies, width, dtypes=(BF16, BF16), scale=1.0, masked=False, eps=1e-20, device="cpu"
):
    """Draw a case: normal values, stream and keys times `scale`, weights about 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    kv = normal(kv_tokens, copies + 1, width)
    kv[:, :copies] *= scale
    return Case(
        hidden=(normal(tokens, copies, width) * scale).to(dtypes[0]),
        kv=kv.flatten(1).to(dtypes[1]),
        q_weight=(1 + 0.3 * normal(copies, width)).to(BF16),
        k_weight=(1 + 0.3 * normal(copies, width)).to(BF16),
        token_mask=normal(kv_tokens) > 0 if masked else None,
        eps=eps,
    )


@st.composite
def cases(draw, device, widths=(1, 2, 3, 31, 96, 257, 5120)):
    kv_tokens = draw(st.integers(0, 3))
    return random_case(
        draw(st.integers(0, 2**32 - 1)),
        kv_tokens + draw(st.integers(0, 1)),
        kv_tokens,
        draw(st.integers(1, 4)),
        draw(st.sampled_from(widths)),
        draw(st.sampled_from(STREAMS)),
        2.0 ** draw(st.integers(-6, 6)),
        draw(st.booleans()),
        draw(st.sampled_from((0.0, 1e-20, 1e-6, 0.5))),
        device,
    )


def exact_gate(case):
    """Compute out in float64, and the magnitude by which its rounding is judged."""
    copies, width = case.hidden.shape[1:]
    h = case.hidden[: len(case.kv)].double()
    parts = case.kv.double().reshape(-1, copies + 1, width)
    key, value = parts[:, :copies], parts[:, copies:]
    terms = h * case.q_weight.double() * case.k_weight.double() * key
    norm = 1.0
    for x in (h, key):
        norm = norm / torch.sqrt((x * x).mean(2, keepdim=True) + case.eps)
    norm = norm / math.sqrt(width)
    dot = terms.sum(2, keepdim=True) * norm
    s = torch.where(dot.abs() < case.clamp, case.clamp, dot.abs()).sqrt()
    g = 1 / (1 + torch.exp(torch.where(dot < 0, s, -s)))
    # d out / d dot is value * g * (1 - g) / 2s, and dot is as uncertain as the sum of its absolute terms.
    reach = s + terms.abs().sum(2, keepdim=True) * norm / (2 * s)
    out, magnitude = case.hidden.double(), torch.zeros(case.hidden.shape, dtype=torch.float64, device=h.device)
    is_open = case.open_tokens()[: len(h), None, None]
    out[: len(h)] = torch.where(is_open, h + g * value, h)
    magnitude[: len(h)] = torch.where(is_open, h.abs() + value.abs() * (g + g * (1 - g) * reach), 0.0)
    return out, magnitude


def plain_gate(hidden, kv, q_weight, k_weight, token_mask=None, *, eps, clamp, fault=""):
    """Compute the gate as plain float32 PyTorch would, or with one mistake that people make."""
    live, (copies, width) = len(kv), hidden.shape[1:]
    if token_mask is None:
        token_mask = torch.ones(live, dtype=torch.bool, device=hidden.device)
    if token_mask.shape != (live,) and fault != "G6 mask of one broadcasts":
        raise ValueError("token_mask: wrong shape")
    h, parts = hidden[:live].float(), kv.float().reshape(live, copies + 1, width)
    key, value = parts[:, :copies], parts[:, copies:]
    q, k, is_open = q_weight.float(), k_weight.float(), token_mask[:, None, None]
    if fault == "G8 value before keys":
        key, value = parts[:, 1:], parts[:, :1]
    if fault == "G9 another copy's weights":
        q, k = q.roll(1, 0), k.roll(1, 0)
    if fault == "G11 no q weight":
        q = torch.ones_like(q)

    def inverse_rms(x):
        mean = x.square().mean(2, keepdim=True)
        return 1 / (mean.sqrt() + eps) if fault == "G4 eps outside the root" else (mean + eps).rsqrt()

    terms = h * key * (q * k)
    total = terms.to(BF16).sum(2, keepdim=True).float() if fault == "G10 sum in bf16" else terms.sum(2, keepdim=True)
    norm = inverse_rms(h) * inverse_rms(key) * (1 / width if fault == "G5 1/M for 1/sqrt(M)" else width**-0.5)
    dot = total * norm
    root = (
        dot.abs().sqrt().clamp(min=clamp) if fault == "G3 clamp after the root" else dot.abs().clamp(min=clamp).sqrt()
    )
    s = dot.sign() * root if fault == "G2 sign of dot" else torch.where(dot < 0, -root, root)
    added = s.sigmoid() * value
    if fault == "G1 residual twice":
        added = added + h
    gated = h + added
    if fault == "G7 shut by a product":
        gated, is_open = h + is_open * added, torch.ones_like(is_open)
    if fault == "T14 rounded twice":
        gated = gated.half().float()
    return torch.cat([torch.where(is_open, gated.to(hidden.dtype), hidden[:live]), hidden[live:]])


def assert_gated(gate: Gate, case: Case) -> None:
    exact, magnitude = exact_gate(case)
    assert_close("gate", case.call(gate), case.call(plain_gate), exact, magnitude=magnitude, axes=("T", "hc", "M"))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def poisoned(case: Case) -> Case:
    """Put NaN and infinities behind every shut gate, and a signalling NaN into the stream that passes it."""
    hidden, kv, is_open = case.hidden.clone(), case.kv.clone(), case.open_tokens()
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=kv.dtype, device=kv.device)
    kv[~is_open[: len(kv)]] = bad.repeat(kv.shape[1])[: kv.shape[1]]
    integer, signalling_nan = (torch.int32, 0x7FA12345) if hidden.dtype == FP32 else (torch.int16, 0x7FA1)
    hidden.view(integer)[~is_open, :, 0] = signalling_nan
    return replace(case, hidden=hidden, kv=kv)


def assert_shut_rows_pass(gate: Gate, case: Case) -> None:
    is_open = case.open_tokens()
    assert torch.equal(bits(case.call(gate)[~is_open]), bits(case.hidden[~is_open]))


def hand_case(hidden, key, value, q=1.0, k=1.0, device="cpu", **scalars):
    """Make one token of one copy from lists; its stream is float32, so that no rounding hides a gate."""
    row = torch.tensor([[hidden]], dtype=FP32, device=device)
    kv = torch.tensor([[*key, *value]], dtype=FP32, device=device)
    weights = (torch.full_like(row[0], w).to(BF16) for w in (q, k))
    return Case(row, kv, *weights, **scalars)


def decimal_gate(case: Case, copy: int) -> list[Decimal]:
    """Compute token 0 of a copy with exact fractions, and 60 digits where a root or an exponential is due."""
    width = case.hidden.shape[2]
    h, q, k = (list(map(Fraction, x[copy].tolist())) for x in (case.hidden[0], case.q_weight, case.k_weight))
    row = list(map(Fraction, case.kv[0].tolist()))
    key, value = row[copy * width : (copy + 1) * width], row[-width:]
    with localcontext(prec=60):

        def number(x: Fraction) -> Decimal:
            return Decimal(x.numerator) / Decimal(x.denominator)

        squares = [sum(x * x for x in xs) / width + Fraction(case.eps) for xs in (h, key)]
        total = sum(a * b * c * d for a, b, c, d in zip(h, q, k, key, strict=True))
        dot = number(total) / number(squares[0] * squares[1] * width).sqrt()
        s = max(abs(dot), Decimal(case.clamp)).sqrt()
        g = 1 / (1 + (s if dot < 0 else -s).exp())
        return [number(a) + g * number(b) for a, b in zip(h, value, strict=True)]


EDGES = {
    "dot of zero": {"hidden": [1.0, 0.0], "key": [0.0, 1.0]},
    "dot of minus zero": {"hidden": [-0.0, -0.0], "key": [1.0, 1.0]},
    "at the clamp": {"hidden": [1.0], "key": [1.0], "q": 2.0**-20, "clamp": 2.0**-20},
    "under the clamp": {"hidden": [1.0], "key": [1.0], "q": 2.0**-21, "clamp": 2.0**-20},
    "over the clamp": {"hidden": [1.0], "key": [1.0], "q": 2.0**-19, "clamp": 2.0**-20},
    "minus at the clamp": {"hidden": [-1.0], "key": [1.0], "q": 2.0**-20, "clamp": 2.0**-20},
    "minus under the clamp": {"hidden": [-1.0], "key": [1.0], "q": 2.0**-21, "clamp": 2.0**-20},
    "minus over the clamp": {"hidden": [-1.0], "key": [1.0], "q": 2.0**-19, "clamp": 2.0**-20},
    "tiny": {"hidden": [1e-15, 2e-15], "key": [3e-15, 1e-15]},
    "minus tiny": {"hidden": [1e-15, 2e-15], "key": [-3e-15, -1e-15]},
    "large stream and key": {"hidden": [1e18, -2e18], "key": [3e18, 1e18]},
    "dot of infinity": {"hidden": [1.0, 2.0], "key": [3.0, 1.0], "q": 1e30, "k": 1e30},
    "dot of minus infinity": {"hidden": [1.0, 2.0], "key": [-3.0, -1.0], "q": 1e30, "k": 1e30},
    "mean square beyond float32": {"hidden": [1e20, 1.0], "key": [3.0, 1.0]},
    "infinite value": {"hidden": [1.0, 2.0], "key": [3.0, 1.0], "value": [math.inf, -4.0]},
    "value of NaN": {"hidden": [1.0, 2.0], "key": [3.0, 1.0], "value": [10.0, math.nan]},
}


def edge_case(name, device):
    edge = EDGES[name]
    return hand_case(**{"value": [10.0, -4.0][: len(edge["hidden"])], **edge}, device=device)


@given(data=st.data())
def test_oracle_is_the_definition(data):
    """The float64 oracle equals exact fractions and 60-digit decimals to 1e-12 of its magnitude."""
    case = data.draw(cases("cpu", widths=(1, 2, 3, 31)).filter(lambda c: len(c.kv) > 0))
    case = replace(case, token_mask=None)
    exact, magnitude = exact_gate(case)
    for copy in range(case.hidden.shape[1]):
        for got, want, size in zip(exact[0, copy], decimal_gate(case, copy), magnitude[0, copy], strict=True):
            assert abs(Decimal(got.item()) - want) <= Decimal("1e-12") * Decimal(size.item())


@pytest.mark.parametrize(
    ("hidden", "key", "out"),
    [([1.0, 0.0], [1.0, 0.0], ("8.666", "-3.0664")), ([0.0, 1.0], [1.0, 0.0], ("5.0025", "-1.001"))],
)
def test_published_numbers(gate, device, hidden, key, out):
    """Both gates that github.com/fegato/colibri works out by hand come out, to their last digit."""
    got = hand_case(hidden, key, [10.0, -4.0], eps=0.0, device=device).call(gate)[0, 0].tolist()
    for number, digits in zip(got, out, strict=True):
        assert round(number, len(digits.partition(".")[2])) == float(digits)


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_the_dot(gate, device, name):
    """A dot of zero, at the clamp, tiny, huge or infinite gates as the definition says."""
    assert_gated(gate, edge_case(name, device))


@pytest.mark.parametrize("where", ["hidden", "key"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_undefined_dot_gives_nan(gate, device, where, bad):
    """A NaN or an infinity in stream or key makes the dot NaN, and with it the whole copy."""
    case = hand_case(**{"hidden": [1.0, 2.0], "key": [3.0, 1.0], where: [bad, 1.0]}, value=[10.0, -4.0], device=device)
    assert case.call(gate).isnan().all()


@given(data=st.data())
def test_gate_is_its_definition(gate, device, data):
    """Any stream is gated within the tolerance, and no argument is written."""
    case = data.draw(cases(device))
    before = case.map(torch.clone)
    assert_gated(gate, case)
    for name in ("hidden", "kv", "q_weight", "k_weight"):
        assert torch.equal(bits(getattr(case, name)), bits(getattr(before, name)))


@given(data=st.data())
def test_shut_gate_leaks_nothing(gate, device, data):
    """A masked or padding row comes out bit for bit, whatever stands in its keys and value."""
    assert_shut_rows_pass(gate, poisoned(data.draw(cases(device))))


@pytest.mark.parametrize("dtypes", STREAMS)
def test_shut_gate_opens_no_neighbour(gate, device, dtypes):
    """Open rows are the same bits whether their neighbours are poisoned and shut or open."""
    case = random_case(3, 4, 3, 2, 257, dtypes, masked=False, device=device)
    mask = torch.tensor([True, False, True], device=device)
    open_rows = poisoned(replace(case, token_mask=mask)).call(gate)[[0, 2]]
    assert torch.equal(bits(open_rows), bits(case.call(gate)[[0, 2]]))


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Give x with other strides; what lies between its elements is poison."""
    poison = True if x.dtype == torch.bool else math.nan
    if layout == "every other row":
        view = torch.full((2 * len(x), *x.shape[1:]), poison, dtype=x.dtype, device=x.device)[::2]
    elif layout == "every third element":
        view = torch.full((*x.shape[:-1], 3 * x.shape[-1]), poison, dtype=x.dtype, device=x.device)[..., 1::3]
    elif layout == "offset in wider rows":
        view = torch.full((*x.shape[:-1], x.shape[-1] + 5), poison, dtype=x.dtype, device=x.device)[..., 3:-2]
    else:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return view.copy_(x)


@pytest.mark.parametrize("layout", ["every other row", "every third element", "offset in wider rows", "transposed"])
@pytest.mark.parametrize("dtypes", STREAMS)
def test_strides_change_nothing(gate, device, layout, dtypes):
    """A strided view of any argument gives the bits of its dense copy."""
    case = random_case(5, 4, 3, 2, 96, dtypes, masked=True, device=device)
    views = case.map(lambda x: strided(x, layout))
    assert layout == "transposed" or not views.hidden.is_contiguous()
    out = views.call(gate)
    assert out.is_contiguous()
    assert torch.equal(bits(out), bits(case.call(gate)))


def test_expanded_arguments_are_read_as_they_look(gate, device):
    """A stride of zero (one row shown as many) is no mistake."""
    one = random_case(6, 1, 1, 1, 96, device=device)
    hidden, kv = one.hidden.expand(3, 1, 96), one.kv.expand(3, -1)
    assert torch.equal(replace(one, hidden=hidden, kv=kv).call(gate), one.call(gate).expand(3, 1, 96))


def assert_open_gate_adds(gate: Gate, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    width, generator = 4096, torch.Generator().manual_seed(seed)
    integer = torch.int32 if dtype == FP32 else torch.int16
    limits = torch.iinfo(integer)
    row, value = torch.randint(limits.min, limits.max + 1, (2, width), generator=generator).to(integer).view(dtype)
    row = torch.where(row.abs() < 2.0**50, row, 1.0).index_fill(0, torch.tensor([0]), 1.0)
    key = torch.zeros(width, dtype=dtype).index_fill(0, torch.tensor([0]), 1.0)
    weight = torch.full((1, width), 2.0**60, dtype=BF16)
    out = Case(row[None, None], torch.cat([key, value])[None], weight, weight).map(lambda x: x.to(device)).call(gate)
    want = (row.float() + value.float()).to(dtype)
    got = out[0, 0].cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(torch.where(got.isnan(), 0.0, got)), bits(torch.where(want.isnan(), 0.0, want)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@given(seed=st.integers(0, 2**32 - 1))
def test_wide_open_gate_adds_with_one_rounding(gate, device, dtype, seed):
    """Behind a huge dot the gate is 1: out is stream plus value, rounded once to nearest even, for any bit patterns."""
    assert_open_gate_adds(gate, dtype, seed, device)


@pytest.mark.parametrize("tokens", [0, 2])
def test_no_live_token_copies_the_stream(gate, device, tokens):
    """No token at all, or padding alone, is legal."""
    case = random_case(7, tokens, 0, 2, 96, device=device)
    out = case.call(gate)
    assert torch.equal(bits(out), bits(case.hidden))
    assert out.data_ptr() != case.hidden.data_ptr() or tokens == 0


def assert_refuses_mask_of_one(gate: Gate, device: torch.device) -> None:
    case = random_case(8, 3, 3, 2, 96, device=device)
    with pytest.raises(ValueError, match="token_mask"):
        replace(case, token_mask=torch.ones(1, dtype=torch.bool, device=device)).call(gate)


def test_mask_of_one_is_no_mask_of_all(gate, device):
    """A mask of length 1 is refused, never broadcast."""
    assert_refuses_mask_of_one(gate, device)


REFUSALS = {
    "more kv than stream": (ValueError, "kv: got 3", lambda c: {"hidden": c.hidden[:2]}),
    "kv too narrow": (ValueError, "kv", lambda c: {"kv": c.kv[:, :-1]}),
    "kv without its value": (ValueError, "kv", lambda c: {"kv": c.kv[:, : 2 * 96]}),
    "kv of three axes": (ValueError, "kv", lambda c: {"kv": c.kv.reshape(3, 3, 96)}),
    "kv of another dtype": (TypeError, "kv", lambda c: {"kv": c.kv.float()}),
    "stream of two axes": (ValueError, "hidden", lambda c: {"hidden": c.hidden[:, 0]}),
    "stream without copies": (ValueError, "hidden", lambda c: {"hidden": c.hidden[:, :0]}),
    "stream of float64": (TypeError, "hidden", lambda c: {"hidden": c.hidden.double()}),
    "q of one copy": (ValueError, "q_weight", lambda c: {"q_weight": c.q_weight[:1]}),
    "k too wide": (ValueError, "k_weight", lambda c: {"k_weight": c.k_weight.repeat(1, 2)}),
    "q of float32": (TypeError, "q_weight", lambda c: {"q_weight": c.q_weight.float()}),
    "k of nothing": (TypeError, "k_weight", lambda c: {"k_weight": None}),
    "mask of bytes": (TypeError, "token_mask", lambda c: {"token_mask": c.token_mask.byte()}),
    "mask too long": (ValueError, "token_mask", lambda c: {"token_mask": c.token_mask.repeat(2)}),
    "mask per copy": (ValueError, "token_mask", lambda c: {"token_mask": c.token_mask[:, None]}),
    "kv elsewhere": (ValueError, "kv: got device", lambda c: {"kv": c.kv.to("meta")}),
    "negative eps": (ValueError, "eps", lambda c: {"eps": -1e-6}),
    "eps of NaN": (ValueError, "eps", lambda c: {"eps": math.nan}),
    "negative clamp": (ValueError, "clamp", lambda c: {"clamp": -1.0}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_argument_is_refused_by_name(gate, device, name):
    """A wrong shape, width, dtype, device or number is an error that names the argument."""
    error, message, change = REFUSALS[name]
    case = random_case(9, 3, 3, 2, 96, masked=True, device=device)
    with pytest.raises(error, match=message):
        replace(case, **change(case)).call(gate)
