"""The laws of the module on one rank, and the reference under them.

What holds over many ranks stands in `tests.distributed.test_ranks`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import reference.engram
from parity.tolerances import assert_close
from reference.prime_layout import PrimeLayout
from tests.distributed.layer import PREFIX, Layer, make_config, same_bits
from tests.reference.test_gate import Case, exact_gate, plain_gate

BF16 = torch.bfloat16


def assert_layer(module: Any, layer: Layer, hidden: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Hold a step to the definition: rows by bits, the gate by its tolerance, what is shut or padding by bits."""
    module.prepare_embeddings(ids)
    assert same_bits(module.embed(ids), layer.rows(ids))
    got = module(hidden, ids, mask)
    keys = layer.keys_and_value(ids).to(hidden.device)
    case = Case(hidden, keys, layer["q_weight"].to(hidden.device), layer["k_weight"].to(hidden.device), mask)
    is_open = case.open_tokens()
    assert same_bits(got[~is_open], hidden[~is_open])
    exact, magnitude = exact_gate(case)
    plain = case.call(plain_gate)
    assert_close(
        "gate", got[is_open], plain[is_open], exact[is_open], magnitude=magnitude[is_open], axes=("T", "hc", "M")
    )


def quantized_wkv(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw fp8 weight, 32 x 32 block scales, and what they are worth by the definition, element by element."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, size=(rows, columns), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = rng.integers(117, 137, size=(-(-rows // 32), columns // 32), dtype=np.uint8)
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    factors = [[2.0 ** (int(scales[o // 32, i // 32]) - 127) for i in range(columns)] for o in range(rows)]
    return weight, torch.from_numpy(scales), (weight.double() * torch.tensor(factors, dtype=torch.float64)).bfloat16()


class EngramLaws:
    """What holds of every module; a subclass names the one under test."""

    engram: type[Any]

    @pytest.fixture
    def layer(self) -> Layer:
        return Layer.drawn(make_config(15), seed=1)

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(("tokens", "padding"), [(0, 0), (0, 2), (1, 0), (4, 1)])
    def test_a_step_is_its_definition(
        self, device: torch.device, layer: Layer, tokens: int, padding: int, masked: bool
    ) -> None:
        """Rows are the table's, bit for bit, keys and value their product with wkv, and the stream is gated by them."""
        module = layer.module(self.engram, max_tokens=4, device=device)
        hidden = layer.stream(tokens + padding, seed=2)
        hidden[tokens:] = float("nan")
        mask = layer.mask(tokens, seed=3).to(device) if masked else None
        assert_layer(module, layer, hidden.to(device), layer.ids(tokens, seed=4).to(device), mask)

    def test_ids_may_be_one_layer_of_a_hash(self, device: torch.device, layer: Layer) -> None:
        """The strided columns of one layer in [T, L, C], int32 or int64, are taken as they are."""
        module = layer.module(self.engram, max_tokens=3, device=device)
        ids = layer.ids(3, seed=5).to(device)
        for dtype in (torch.int32, torch.int64):
            hashes = torch.stack([torch.full_like(ids, 7), ids], dim=1).to(dtype)
            module.prepare_embeddings(hashes[:, 1])
            assert same_bits(module.embed(hashes[:, 1]), layer.rows(ids))

    def test_shut_tokens_leak_nothing(self, device: torch.device, layer: Layer) -> None:
        """A token whose mask is False passes bit for bit, NaN and infinity beside it or in it; the others are gated."""
        tensors = dict(layer.tensors)
        codes = tensors[f"{PREFIX}.embed.weight"].view(torch.uint8).clone()
        ids = torch.from_numpy(PrimeLayout(layer.config).offsets).int() + torch.arange(4, dtype=torch.int32)[:, None]
        codes[ids[1].long()] = 0x7F
        tensors[f"{PREFIX}.embed.weight"] = codes.view(torch.float8_e4m3fn)
        module = self.engram(layer.config, 0, max_tokens=4, device=device)
        module.load_tensors(tensors, PREFIX)
        hidden, mask = layer.stream(4, seed=7), torch.tensor([True, False, False, True])
        hidden[2, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        module.prepare_embeddings(ids.to(device))
        got = module(hidden.to(device), ids.to(device), mask.to(device)).cpu()
        assert module.embed(ids.to(device))[1].isnan().all()
        assert same_bits(got[1:3], hidden[1:3])
        assert got[[0, 3]].isfinite().all()
        assert not (got[[0, 3]] == hidden[[0, 3]]).all()

    def test_a_dead_step_passes_the_stream(self, device: torch.device, layer: Layer) -> None:
        """Dummy hashes and their mask, for a step without tokens, give zero rows and the stream as it was."""
        module = layer.module(self.engram, max_tokens=3, device=device)
        ids, hidden = torch.full((3, 15), -1, dtype=torch.int32, device=device), layer.stream(3, seed=8).to(device)
        module.prepare_embeddings(ids)
        assert not module.embed(ids).view(torch.int16).any()
        assert same_bits(module(hidden, ids, torch.zeros(3, dtype=torch.bool, device=device)), hidden)

    def test_microbatches_have_rows_of_their_own(self, device: torch.device, layer: Layer) -> None:
        """Two microbatches that are both prepared before either is embedded get each its own rows."""
        module = layer.module(self.engram, max_tokens=4, microbatches=2, device=device)
        first, second = layer.ids(4, seed=9).to(device), layer.ids(3, seed=10).to(device)
        module.prepare_embeddings(first)
        module.prepare_embeddings(second, microbatch=1)
        assert same_bits(module.embed(first), layer.rows(first))
        assert same_bits(module.embed(second, microbatch=1), layer.rows(second))
        with pytest.raises(ValueError, match="microbatch: got 2, expected at least 0 and at most 1"):
            module.prepare_embeddings(first, microbatch=2)
        with pytest.raises(ValueError, match="microbatch: got -1"):
            module.embed(first, microbatch=-1)

    def test_staged_rows_stay_where_they_are(self, device: torch.device, layer: Layer) -> None:
        """Steps of any length up to max_tokens are staged at the same address, and none sees the rows of another."""
        module = layer.module(self.engram, max_tokens=5, device=device)
        addresses = set()
        for step, tokens in enumerate((5, 1, 3, 5, 2)):
            ids = layer.ids(tokens, seed=20 + step).to(device)
            module.prepare_embeddings(ids)
            rows = module.embed(ids)
            addresses.add((rows.data_ptr(), module.staged_rows[0].data_ptr()))
            assert same_bits(rows, layer.rows(ids))
        assert len(addresses) == 1
        assert module.staged_rows[0].shape == (5, 15, 32)

    def test_a_step_past_the_staged_rows_is_refused(self, device: torch.device, layer: Layer) -> None:
        """A step longer than max_tokens, and an embed of another length than was prepared, are refused by name."""
        module = layer.module(self.engram, max_tokens=4, microbatches=2, device=device)
        ids = layer.ids(5, seed=11).to(device)
        with pytest.raises(ValueError, match="hash_ids: got 5 tokens, expected at most max_tokens 4"):
            module.prepare_embeddings(ids)
        with pytest.raises(ValueError, match="hash_ids: got 4 tokens, expected the None that were prepared"):
            module.embed(ids[:4])
        module.prepare_embeddings(ids[:4])
        for wrong in (3, 5):
            with pytest.raises(ValueError, match=f"got {wrong} tokens, expected the 4 that were prepared for microb"):
                module(layer.stream(wrong, seed=1).to(device), ids[:wrong])
        with pytest.raises(ValueError, match="for microbatch 1"):
            module.embed(ids[:4], microbatch=1)
        with pytest.raises(ValueError, match="got 5 tokens"):
            module.prepare_embeddings(ids)
        assert same_bits(module.embed(ids[:4]), layer.rows(ids[:4]))

    def test_a_sequence_parallel_stream_is_exact(self, device: torch.device, layer: Layer) -> None:
        """Sequence parallel, a stream has exactly ceil(T/P) rows: more is refused, which tensor parallel is padding."""
        ids = layer.ids(3, seed=12).to(device)
        for form in (None, "all_to_all", "gather_select"):
            module = layer.module(self.engram, max_tokens=3, sequence_parallel=form, device=device)
            module.prepare_embeddings(ids)
            for rows in (2, 4):
                hidden = layer.stream(rows, seed=13).to(device)
                if form is None and rows == 4:
                    module(hidden, ids)
                    continue
                want = "at least" if form is None else "exactly"
                with pytest.raises(ValueError, match=f"hidden: got {rows} rows, expected {want} 3"):
                    module(hidden, ids)

    def test_a_random_layer_is_close(self, device: torch.device) -> None:
        """A layer of normal weights, its table of codes and scales of all sizes, is within the gate's tolerance."""
        config = make_config(24, dim=64, width=96)
        layer, generator = Layer.drawn(config, seed=2), torch.Generator().manual_seed(5)
        for name, low, high in (("embed.weight", 0, 0x7F), ("embed.weight_scale_inv", 115, 125)):
            layer[name].view(torch.uint8).random_(low, high, generator=generator)
        rows, inner = (config.hc_mult + 1) * config.hidden_size, config.columns * config.engram_head_dim
        layer.tensors[f"{PREFIX}.wkv.weight"] = (torch.randn(rows, inner, generator=generator) / 40).bfloat16()
        for name in ("q_weight", "k_weight"):
            drawn = 1 + 0.3 * torch.randn(config.hc_mult, config.hidden_size, generator=generator)
            layer.tensors[f"{PREFIX}.{name}"] = drawn.bfloat16()
        module = layer.module(self.engram, max_tokens=3, device=device)
        ids = layer.ids(3, seed=14).to(device)
        hidden = torch.randn(3, config.hc_mult, config.hidden_size, generator=generator).bfloat16().to(device)
        module.prepare_embeddings(ids)
        got = module(hidden, ids)
        exact_kv = layer.rows(ids).double().flatten(1) @ layer["wkv.weight"].double().T
        kv = torch.nn.functional.linear(layer.rows(ids).to(device).flatten(1), layer["wkv.weight"].to(device))
        terms = layer.rows(ids).double().abs().flatten(1) @ layer["wkv.weight"].double().abs().T
        assert ((kv.cpu().double() - exact_kv).abs() <= exact_kv.abs() * 2**-8 + terms * 2**-11).all()
        case = Case(hidden, kv, layer["q_weight"].to(device), layer["k_weight"].to(device))
        exact, magnitude = exact_gate(case)
        assert_close("gate", got, case.call(plain_gate), exact, magnitude=magnitude, axes=("T", "hc", "M"))

    def test_a_float32_layer_is_its_definition(self, device: torch.device, layer: Layer) -> None:
        """With dtype float32 the stream stays float32, and keys and value are the same exact numbers."""
        wide = Layer(layer.config, layer.tensors | {f"{PREFIX}.wkv.weight": layer["wkv.weight"].float()})
        module = wide.module(self.engram, max_tokens=2, dtype=torch.float32, device=device)
        ids, hidden = layer.ids(2, seed=15).to(device), layer.stream(2, seed=16).float().to(device)
        module.prepare_embeddings(ids)
        got = module(hidden, ids)
        keys = layer.keys_and_value(ids).float().to(device)
        case = Case(hidden, keys, layer["q_weight"].to(device), layer["k_weight"].to(device))
        exact, magnitude = exact_gate(case)
        assert_close("gate", got, case.call(plain_gate), exact, magnitude=magnitude, axes=("T", "hc", "M"))

    @pytest.mark.parametrize("prefix", ["layers.1.engram", "model.layers.14.engram"])
    @pytest.mark.parametrize("scale", ["scale", "weight_scale_inv"])
    def test_files_and_tensors_load_alike(
        self, device: torch.device, layer: Layer, tmp_path: Path, scale: str, prefix: str
    ) -> None:
        """A checkpoint of two files, under any prefix and either name of the scales, loads what its tensors hold."""
        named = {f"{prefix}.{name.removeprefix(PREFIX)[1:]}": tensor for name, tensor in layer.tensors.items()}
        named[f"{prefix}.embed.{scale}"] = named.pop(f"{prefix}.embed.weight_scale_inv").view(torch.float8_e8m0fnu)
        files = {name: tensor for name, tensor in named.items() if "embed.weight" in name or "q_weight" in name}
        others = {name: tensor for name, tensor in named.items() if name not in files}
        safetensors.torch.save_file(files, tmp_path / "a.safetensors")
        safetensors.torch.save_file(others | {"layers.2.engram.q_weight": torch.ones(3)}, tmp_path / "b.safetensors")
        module = self.engram(layer.config, 0, max_tokens=4, device=device)
        module.load_checkpoint(tmp_path, prefix)
        for tensor, name in (
            (module.wkv.weight, "wkv.weight"),
            (module.q_weight, "q_weight"),
            (module.k_weight, "k_weight"),
        ):
            assert same_bits(tensor.data, layer[name])
        ids = layer.ids(4, seed=17).to(device)
        module.prepare_embeddings(ids)
        assert same_bits(module.embed(ids), layer.rows(ids))

    @pytest.mark.parametrize("scale", ["scale", "weight_scale_inv"])
    @pytest.mark.parametrize("files", [False, True])
    def test_quantized_wkv_is_exact(
        self, device: torch.device, layer: Layer, tmp_path: Path, files: bool, scale: str
    ) -> None:
        """A float8 wkv with a scale for 32 x 32, the last block of rows cut short, is dequantized to the exact bits."""
        config = make_config(4, width=25, copies=2)  # 75 rows of 128
        layer = Layer.drawn(config, seed=3)
        weight, scales, want = quantized_wkv(75, 128)
        tensors = layer.tensors | {f"{PREFIX}.wkv.weight": weight, f"{PREFIX}.wkv.{scale}": scales}
        module = self.engram(config, 0, max_tokens=1, device=device)
        if files:
            safetensors.torch.save_file(tensors, tmp_path / "one.safetensors")
            module.load_checkpoint(tmp_path / "one.safetensors", PREFIX)
        else:
            module.load_tensors(tensors, PREFIX)
        assert same_bits(module.wkv.weight.data, want)

    @pytest.mark.parametrize("files", [False, True])
    @pytest.mark.parametrize(
        ("name", "tensor", "error", "message"),
        [
            ("wkv.weight", None, KeyError, r"wkv.weight: got no such tensor, expected one of shape \[192, 480\]"),
            ("q_weight", None, KeyError, "q_weight: got no such tensor"),
            ("k_weight", None, KeyError, "k_weight: got no such tensor"),
            ("embed.weight", None, KeyError, "embed.weight"),
            ("embed.weight_scale_inv", None, KeyError, "got no scales, expected"),
            ("embed.scale", torch.zeros(1, 1, dtype=torch.uint8), ValueError, "embed: got scales under both"),
            ("wkv.weight", torch.zeros(191, 480, dtype=BF16), ValueError, r"got shape \[191, 480\], expected \[192, 4"),
            ("wkv.weight", torch.zeros(480, 192, dtype=BF16), ValueError, "wkv.weight: got shape"),
            ("wkv.weight", torch.zeros(192, 480), TypeError, "wkv.weight: got dtype torch.float32, expected"),
            ("wkv.weight", torch.zeros(192, 480).to(torch.float8_e4m3fn), KeyError, "got float8_e4m3fn without scales"),
            ("wkv.scale", torch.zeros(6, 15, dtype=torch.uint8), TypeError, "got dtype torch.bfloat16 beside"),
            ("wkv.scale", torch.zeros(6, 14, dtype=torch.uint8), ValueError, r"wkv.scale: got shape \[6, 14\]"),
            ("wkv.scale", torch.zeros(6, 15), TypeError, "wkv.scale: got dtype torch.float32"),
            ("q_weight", torch.ones(2, 64), TypeError, "q_weight: got dtype torch.float32"),
            ("k_weight", torch.ones(1, 64, dtype=BF16), ValueError, r"k_weight: got shape \[1, 64\], expected \[2, 64"),
            ("embed.weight", torch.zeros(9, 32).to(torch.float8_e4m3fn), ValueError, "expected at least"),
        ],
    )
    def test_a_wrong_tensor_is_refused_by_name(
        self, layer: Layer, tmp_path: Path, files: bool, name: str, tensor: torch.Tensor, error: type, message: str
    ) -> None:
        """What is missing, short, of another dtype or there twice is refused by name, and the layer stays unusable."""
        tensors = dict(layer.tensors)
        tensors.pop(f"{PREFIX}.{name}", None)
        if tensor is not None:
            tensors[f"{PREFIX}.{name}"] = tensor
        module = self.engram(layer.config, 0, max_tokens=1)
        safetensors.torch.save_file(tensors, tmp_path / "one.safetensors")
        with pytest.raises(error, match=message):
            module.load_checkpoint(tmp_path, PREFIX) if files else module.load_tensors(tensors, PREFIX)
        with pytest.raises(RuntimeError, match="not loaded"):
            module.prepare_embeddings(layer.ids(1, seed=1))

    def test_a_layer_is_loaded_once(self, layer: Layer) -> None:
        """A second load is refused; a whole table in place is shared, not copied."""
        module = layer.module(self.engram, max_tokens=1)
        with pytest.raises(RuntimeError, match="got it a second time"):
            module.load_tensors(layer.tensors, PREFIX)
        rows = int(PrimeLayout(layer.config).rows[0])
        cut = {name: t[:rows] if "embed" in name else t for name, t in layer.tensors.items()}
        shared = Layer(layer.config, cut).module(self.engram, max_tokens=1)
        assert shared.table.weight.data_ptr() == layer["embed.weight"].data_ptr()
        assert not any(parameter.requires_grad for parameter in shared.parameters())

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"layer_index": 1}, ValueError, "layer_index: got 1, expected at least 0 and at most 0"),
            ({"max_tokens": 0}, ValueError, "max_tokens: got 0"),
            ({"microbatches": 0}, ValueError, "microbatches: got 0"),
            ({"sequence_parallel": True}, ValueError, "sequence_parallel: got True, expected None or one of all_to_a"),
            ({"data_parallel": "ring"}, ValueError, "data_parallel: got 'ring'"),
            ({"sequence_parallel": "all_to_all", "data_parallel": "all_to_all"}, ValueError, "at most one of them"),
            ({"dtype": torch.float16}, TypeError, "dtype: got torch.float16"),
            ({"placement": "pinned"}, ValueError, "placement: got 'pinned' for cpu"),
        ],
    )
    def test_a_bad_option_is_refused_by_name(self, layer: Layer, change: dict, error: type, message: str) -> None:
        """An option that cannot be is refused when the module is made."""
        with pytest.raises(error, match=message):
            self.engram(layer.config, **{"layer_index": 0, "max_tokens": 1} | change)

    def test_a_bad_input_is_refused_by_name(self, device: torch.device, layer: Layer) -> None:
        """Ids, stream and mask of another shape or dtype are refused, and a mask of one never opens all."""
        module = layer.module(self.engram, max_tokens=2, device=device)
        ids, hidden = layer.ids(2, seed=18).to(device), layer.stream(2, seed=19).to(device)
        module.prepare_embeddings(ids)
        mask = torch.ones(2, dtype=torch.bool, device=device)
        for arguments, error, message in (
            ((hidden, ids[:, :14], mask), ValueError, "hash_ids: got shape"),
            ((hidden, ids.float(), mask), TypeError, "hash_ids: got dtype torch.float32"),
            ((hidden[:, :1], ids, mask), ValueError, "hidden: got shape"),
            ((hidden, ids, mask[:1]), ValueError, r"token_mask: got shape \(1,\), expected \[2\]"),
            ((hidden, ids, mask.to(torch.uint8)), TypeError, "token_mask: got dtype torch.uint8"),
        ):
            with pytest.raises(error, match=message):
                module(*arguments)

    def test_a_stream_needs_a_device_with_streams(self, layer: Layer) -> None:
        """A side stream for a module on the CPU is refused, and nothing counts as prepared."""
        module, ids = layer.module(self.engram, max_tokens=2), layer.ids(2, seed=1)
        with pytest.raises(ValueError, match="stream: got one for cpu, expected None"):
            module.prepare_embeddings(ids, stream=object())
        with pytest.raises(ValueError, match="expected the None that were prepared"):
            module.embed(ids)


class TestReference(EngramLaws):
    engram = reference.engram.Engram
