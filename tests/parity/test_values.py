"""The judge of lookup and gate: its table, its definition, and that each way of asking catches what it is there for."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import reference.embedding
from parity.finding import Finding
from parity.gate import PADDING, STREAMS, draw, formula, judge_gate
from parity.lookup import WAYS, Judge
from parity.protocol import Implementation
from parity.table import Table, fitting, mix, noise, pair_bits, pair_table, reduced
from parity.tolerances import TOLERANCES, closeness
from parity.world import World
from reference.gate import engram_gate
from tests.reference.test_gate import Case, exact_gate, plain_gate
from tests.reference.test_quantization import exact_bits

CPU = torch.device("cpu")
FULL_ROWS = 384_016_682
SMALL_ROWS = 3000


def splitmix(number: int) -> int:
    """Scatter a number with unbounded integers, as Steele, Lea and Flood write it."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def test_mix_is_its_definition() -> None:
    """Wrapping int64 gives what unbounded integers give, negative numbers and the top of the range too."""
    numbers = [0, 1, 2, 255, 2**31, 2**32 + 1, 2**53 + 7, 2**63 - 1, -1, -(2**63)]
    got = mix(torch.tensor(numbers)).tolist()
    assert [one % 2**64 for one in got] == [splitmix(number % 2**64) for number in numbers]


def test_pair_bits_are_exact_fractions() -> None:
    """The judge's 65,536 pairs of scale byte and code have the bits that exact fractions give."""
    np.testing.assert_array_equal(pair_bits().view(np.uint16), exact_bits())


@pytest.mark.parametrize("dim", [32, 96, 256])
def test_a_row_follows_from_its_number(dim: int) -> None:
    """The bytes of a row are those of its mixed number, whenever and beside whatever it is asked for."""
    table, again = (Table(1000, dim, CPU, finite=False) for _ in range(2))
    table.ask_for(torch.tensor([999, 3, -1, 1000, 2**31 - 1]))
    again.ask_for(torch.tensor([3]))
    width = dim // 8 + -(-dim // 256)
    row = b"".join(splitmix(3 * width + word).to_bytes(8, "little") for word in range(width))
    assert table.codes[3].numpy().tobytes() == again.codes[3].numpy().tobytes() == row[:dim]
    assert table.scales[3].numpy().tobytes() == row[dim : dim + dim // 32]
    assert not table.codes[4].any()


def test_the_real_table_fits_a_small_host() -> None:
    """A table of the real 384,016,682 rows takes memory for the rows that are asked for, the very last too."""
    table = Table(FULL_ROWS, 256, CPU, finite=False)
    last = torch.tensor([[0, FULL_ROWS - 1]])
    table.ask_for(last)
    got = reference.embedding.lookup(table.weight, table.scales, last)[0].view(torch.int16)
    want = exact_bits()[table.scales[last[0]].numpy().repeat(32, axis=1), table.codes[last[0]].numpy()]
    np.testing.assert_array_equal(got.numpy().view(np.uint16), want)
    assert table.codes[last[0]].any(dim=1).all()


def test_a_finite_table_is_finite() -> None:
    """The table of a layer has values below 2 and scales within 2^-3 and 1."""
    table = Table(500, 256, CPU, finite=True)
    table.ask_for(torch.arange(500))
    assert sorted(set(table.scales.flatten().tolist())) == [124, 125, 126, 127]
    assert float(table.weight.float().abs().max()) == 1.875


def test_noise_is_about_normal_and_the_same_everywhere() -> None:
    """Noise is the sum of eight bytes of a mixed number; its mean is 0 and its deviation 1, whatever the seed."""
    word = splitmix(7 + 6 * 2**40).to_bytes(8, "little")
    assert noise((2, 4), 5, CPU)[1, 3].item() == pytest.approx((sum(word) - 1020) / 209, abs=1e-6)
    for seed in (0, 2**40):
        drawn = noise((100, 1000), seed, CPU)
        assert abs(float(drawn.mean())) < 0.02
        assert abs(float(drawn.std()) - 1) < 0.02


def test_a_short_card_is_told_and_given_fewer_rows(worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 60 GiB free the table has fewer rows, and the line says so; with 139 it is whole and nothing is said."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for gib, whole in ((139, True), (60, False), (8, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gib=gib: (gib << 30, 140 << 30))
        world, note = fitting(worlds["flash"], torch.device("cuda"))
        rows = int(world.layout.rows.max())
        assert (world is worlds["flash"]) == whole == (note == "")
        assert rows * 264 < gib << 30
        assert whole or note == f"table: {rows:,} rows for 384,016,682, as cuda has {gib}.0 GiB free"


def test_a_reduced_world_keeps_its_columns(worlds: dict[str, World]) -> None:
    """Fewer rows and a narrower stream leave orders, heads, width of a row and token map alone."""
    small = reduced(worlds["flash"], 20_000, hidden_size=96, copies=2)
    before, after = worlds["flash"].config, small.config
    assert (after.columns, after.engram_head_dim, after.engram_layer_ids) == (24, 256, before.engram_layer_ids)
    assert (after.hidden_size, after.hc_mult) == (96, 2)
    assert max(after.engram_num_embeddings) < 30_000
    assert small.token_map is worlds["flash"].token_map


def faulty_lookup(fault: str, weight, scales, ids, **options):  # type: ignore[no-untyped-def]
    """Look up as the reference does, but for one mistake."""
    rows, first = len(weight), options.get("first_row", 0)
    if fault == "foreign ids are clamped":
        ids = ids.clamp(first, first + rows - 1)
    elif fault == "first row ignored":
        options["first_row"] = 0
    elif fault == "head start ignored":
        heads = options.get("local_heads", ids.shape[1])
        options |= {"head_start": 0, "local_heads": heads}
    elif fault == "strides ignored":
        ids = torch.as_strided(ids, ids.shape, (ids.shape[1], 1))
    elif fault == "past the heads wraps":
        start, heads = options.pop("head_start", 0), options.pop("local_heads", ids.shape[1])
        ids = ids[:, torch.arange(start, start + heads) % ids.shape[1]]
    elif fault == "out ignored":
        options.pop("out", None)
    elif fault == "byte 255 is infinity":
        got = reference.embedding.lookup(weight, scales, ids, **options)
        return torch.where(got.isnan(), torch.inf, got)
    elif fault == "refuses int64" and ids.dtype == torch.int64:
        raise TypeError("ids: got int64")
    return reference.embedding.lookup(weight, scales, ids, **options)


ALL = {way.name for way in WAYS}
FAULTS = {
    "": set(),
    "foreign ids are clamped": {"foreign ids", "shard of rows"},
    "first row ignored": {"shard of rows"},
    "head start ignored": {"head window", "past the heads"},
    "strides ignored": {"strided int64"},
    "past the heads wraps": {"past the heads"},
    "out ignored": {"background"},
    "byte 255 is infinity": ALL | {"code pairs"},
    "refuses int64": {"strided int64"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_way_of_asking_catches_its_mistake(fault: str) -> None:
    """A mistake fails exactly the ways that are there to see it, and is explained; a right lookup fails none."""
    port = Implementation("port", SimpleNamespace(lookup=partial(faulty_lookup, fault)))
    judge = Judge(Table(SMALL_ROWS, 64, CPU, finite=False), [port])
    ids = (torch.arange(64 * 6) * 7919 % SMALL_ROWS).int().view(64, 6)
    judge.feed(ids, "here")
    judge.feed_pairs(pair_table(64, CPU))
    findings = judge.findings
    assert {one.feature for one in findings if one.unequal.total()} == FAULTS[fault]
    assert all(one.first["port"].startswith("port: first wrong row in lookup") for one in findings if one.unequal)


@pytest.mark.parametrize("dim", [32, 96, 256])
def test_the_pair_table_holds_every_pair(dim: int) -> None:
    """Each of 256 codes stands under each of 256 scale bytes, whatever the width of a row."""
    table = pair_table(dim, CPU)
    pairs = table.defined(torch.arange(table.rows))[1]
    assert sorted(set(pairs.flatten().tolist())) == list(range(2**16))
    assert table.rows == -(-(2**16) // dim)


def test_one_wrong_pair_is_found() -> None:
    """A lookup that is wrong for a single pair of scale byte and code fails the finding of pairs, and names it."""

    def port(weight, scales, ids, **options):  # type: ignore[no-untyped-def]
        got = reference.embedding.lookup(weight, scales, ids, **options)
        pairs = scales[ids.long()].repeat_interleave(32, dim=2).int() * 256 + weight.view(torch.uint8)[ids.long()]
        return torch.where(pairs == 0x0901, 0.0, got)

    judge = Judge(Table(SMALL_ROWS, 256, CPU, finite=False), [Implementation("port", SimpleNamespace(lookup=port))])
    judge.feed_pairs(pair_table(256, CPU))
    assert judge.findings[-1].unequal == {"port": 1}
    assert "code 0x01, scale byte 0x09" in judge.findings[-1].first["port"]


@pytest.mark.parametrize("name", STREAMS)
def test_formula_is_the_oracle_of_the_gate_tests(worlds: dict[str, World], name: str) -> None:
    """The judge's float64 equals the oracle that decimal arithmetic vouches for, to 1e-13 of its magnitude."""
    world = reduced(worlds["flash"], 20_000, hidden_size=257, copies=3)
    drawn = draw(world, 12, STREAMS[name], 5, CPU)
    case = Case(drawn.hidden, drawn.kv, drawn.q_weight, drawn.k_weight, drawn.token_mask, drawn.eps)
    is_open = drawn.open_tokens
    exact, magnitude = exact_gate(case)
    tensors = (drawn.hidden[is_open], drawn.kv[is_open], drawn.q_weight, drawn.k_weight)
    got = formula(*(x.double() for x in tensors), drawn.eps)
    for mine, theirs in zip(got, (exact[is_open], magnitude[is_open]), strict=True):
        assert ((mine - theirs).abs() <= 1e-13 * magnitude[is_open]).all()


def test_a_drawn_case_reaches_the_edges(worlds: dict[str, World]) -> None:
    """Dots of 0, below the clamp on both sides and as large as they get; NaN and infinity in all that must pass."""
    case = draw(worlds["flash"], 12, STREAMS["fp32 stream"], 3, CPU)
    copies, width = case.hidden.shape[1:]
    h, keys = case.hidden[:7].double(), case.kv[:7].double().unflatten(1, (copies + 1, width))[:, :copies]
    weights = case.q_weight.double() * case.k_weight.double()
    rms = [x.square().mean(2).clamp(min=1e-300).sqrt() for x in (h, keys)]
    dot = (h * keys * weights).sum(2) / rms[0] / rms[1] / width**0.5
    assert (dot[:3] == 0).all()
    assert ((dot[3] > 0) & (dot[3] < 1e-6)).all()
    assert ((dot[4] < 0) & (dot[4] > -1e-6)).all()
    assert (dot[5] > 20).all()
    assert (dot[6] < -20).all()
    passes = case.passes()
    assert passes[-PADDING:].all()
    assert passes[:-PADDING].any()
    assert not case.hidden[~passes].isnan().any()
    assert case.hidden[passes].isnan().any(2).all()
    assert case.hidden[passes].isinf().any(2).all()
    assert case.kv[~case.token_mask].isnan().any(1).all()


def writing(hidden: torch.Tensor, *tensors: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Gate in place."""
    return hidden.copy_(engram_gate(hidden, *tensors, eps=eps))


def faulty(fault: str) -> Callable[..., torch.Tensor]:
    """Give the plain gate of the gate tests with one of its faults."""
    return partial(plain_gate, clamp=1e-6, fault=fault)


@pytest.mark.parametrize(
    ("gate", "failed"),
    [
        (engram_gate, set()),
        (faulty(""), set()),
        (faulty("G2 sign of dot"), {"fp32 stream"}),
        (faulty("G3 clamp after the root"), {"fp32 stream"}),
        (faulty("G7 shut by a product"), {"shut and padding"}),
        (faulty("G10 sum in bf16"), {"bf16 stream", "fp32 stream"}),
        (faulty("T14 rounded twice"), {"fp32 stream"}),
        (writing, {"bf16 stream", "fp32 stream"}),
    ],
)
def test_a_wrong_gate_is_judged_wrong(worlds: dict[str, World], gate: Callable, failed: set[str]) -> None:
    """Each mistake of the gate fails the findings that are there to see it; right gates fail none."""
    world = reduced(worlds["flash"], 20_000, hidden_size=257, copies=2)
    findings = judge_gate(world, [Implementation("port", SimpleNamespace(engram_gate=gate))], CPU, seed=1)
    wrong = {one.feature for one in findings if one.unequal.total()}
    assert failed <= wrong if failed else not wrong


def test_worst_is_a_share_of_what_is_allowed() -> None:
    """At 1 an element is as far off as it may be; NaN beside NaN and equal infinities are no error."""
    exact = torch.tensor([1.0, torch.nan, torch.inf, 0.0], dtype=torch.float64)
    plain, magnitude = exact.float(), torch.ones(4, dtype=torch.float64)
    allowed = TOLERANCES["gate"].floor * 2.0**-24
    for share in (0.0, 0.5, 1.0, 2.0):
        actual = exact.clone()
        actual[0] += share * allowed
        found = closeness("gate", actual, plain, exact, magnitude)
        assert found.worst == pytest.approx(share, abs=1e-6)
        assert bool(found.bad.any()) == (share > 1)


def test_an_answer_of_another_kind_is_wrong() -> None:
    """What raises, has another shape or dtype, or is no tensor, counts as wrong and says what it was."""
    like = torch.zeros(2, 3)
    for number, (answer, said) in enumerate(
        [
            (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
            (lambda: torch.zeros(2, 4), r"gave torch.float32 [2, 4] on cpu, expected torch.float32 [2, 3] on cpu"),
            (lambda: torch.zeros(2, 3).half(), "gave torch.float16"),
            (lambda: None, "gave NoneType"),
        ]
    ):
        finding = Finding("gate", f"{number}", "")
        assert finding.call("port", answer, like) is None
        assert finding.unequal == {"port": 1}
        assert said in finding.first["port"]
    assert Finding("gate", "none", "").reasons() == ["gate, none: never reached"]
