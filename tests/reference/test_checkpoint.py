"""Loading a shard: only its own bytes, whatever the files, and nothing readable before it is there."""

import contextlib
import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from reference.checkpoint import Checkpoint, pinned_bytes
from reference.embedding import EngramEmbedding
from reference.shard_plan import ShardPlan

SIZES = [5, 7, 11, 13]
ROWS, DIM, SURPLUS = sum(SIZES), 64, 3
PREFIX = "layers.1.engram.embed"


@pytest.fixture
def table() -> dict[str, torch.Tensor]:
    """A layer's two tensors under their public names, with surplus rows of NaN behind."""
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.integers(0, 0x7F, (ROWS + SURPLUS, DIM), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(100, 140, (ROWS + SURPLUS, DIM // 32), dtype=np.uint8))
    weight[ROWS:], scales[ROWS:] = 0x7F, 255
    return {f"{PREFIX}.weight": weight.view(torch.float8_e4m3fn), f"{PREFIX}.weight_scale_inv": scales}


def save(folder: Path, files: dict[str, dict[str, torch.Tensor]], *, index: bool) -> Path:
    """Write tensors to the files they are said to be in."""
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
    if index:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def shard(ranks: int = 1, rank: int = 0, dim: int = DIM) -> EngramEmbedding:
    """Make an empty shard."""
    return EngramEmbedding(ShardPlan.of(SIZES, ranks=ranks, rank=rank), dim)


def assert_holds(embedding: EngramEmbedding, table: dict[str, torch.Tensor]) -> None:
    """Compare a shard with the rows it must hold, byte by byte."""
    weight, scales = (tensor.view(torch.uint8) for tensor in table.values())
    first, end = embedding.plan.first_row, embedding.plan.end_row
    assert torch.equal(embedding.weight.view(torch.uint8), weight[first:end])
    assert torch.equal(embedding.scales.view(torch.uint8), scales[first:end])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("split", ["one file", "a file each", "the other way round", "among others"])
@pytest.mark.parametrize("index", [False, True])
def test_a_shard_is_its_slice(table, tmp_path: Path, ranks: int, split: str, index: bool) -> None:
    """Whatever files the two tensors lie in, each rank loads its own rows and none of the surplus."""
    (weight_name, weight), (scale_name, scales) = table.items()
    other = {"layers.1.engram.q_weight": torch.ones(3, 5, dtype=torch.bfloat16), "n": torch.ones(2, dtype=torch.int64)}
    files = {
        "one file": {"model.safetensors": table},
        "a file each": {"a.safetensors": {weight_name: weight}, "b.safetensors": {scale_name: scales}},
        "the other way round": {"a.safetensors": {scale_name: scales}, "b.safetensors": {weight_name: weight}},
        "among others": {"a.safetensors": {scale_name: scales, **other}, "b.safetensors": {weight_name: weight}},
    }[split]
    checkpoint = Checkpoint(save(tmp_path, files, index=index))
    for rank in range(ranks):
        embedding = shard(ranks, rank)
        embedding.load_checkpoint(checkpoint, PREFIX)
        assert_holds(embedding, table)


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_both_names_and_dtypes_of_scales_load(table, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Scales load as `weight_scale_inv` or `scale`, as bytes or as float8_e8m0fnu, and keep their dtype."""
    table[f"{PREFIX}.{name}"] = table.pop(f"{PREFIX}.weight_scale_inv").view(dtype)
    embedding = shard(2, 1)
    safetensors.torch.save_file(table, tmp_path / "one.safetensors")
    embedding.load_checkpoint(tmp_path / "one.safetensors", PREFIX)
    assert_holds(embedding, table)
    assert embedding.scales.dtype is dtype


@pytest.mark.parametrize("order", [("weight", "scales"), ("scales", "weight")])
def test_nothing_is_readable_before_it_is_loaded(table, order: tuple[str, str]) -> None:
    """Until both parts are there, in either order, a lookup is refused and an unloaded part cannot be read."""
    embedding, ids = shard(), torch.zeros(1, 4, dtype=torch.int32)
    tensors = dict(zip(("weight", "scales"), table.values(), strict=True))
    for part in order:
        with pytest.raises(RuntimeError, match="not loaded"):
            embedding.lookup(ids)
        with pytest.raises(RuntimeError, match=f"{part}: not loaded"):
            getattr(embedding, part)
        getattr(embedding, f"load_{part}")(tensors[part])
    assert embedding.lookup(ids).shape == (1, 4, DIM)


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_a_part_loads_once(table, tmp_path: Path, part: str) -> None:
    """A part that is loaded a second time, from a tensor or from a file, is an error, and the first one stays."""
    embedding = shard(2, 0)
    tensors = dict(zip(("weight", "scales"), table.values(), strict=True))
    getattr(embedding, f"load_{part}")(tensors[part])
    before = getattr(embedding, part).view(torch.uint8).clone()
    wrong = torch.zeros_like(tensors[part])
    with pytest.raises(RuntimeError, match=f"{part}: got it a second time"):
        getattr(embedding, f"load_{part}")(wrong)
    with pytest.raises(RuntimeError, match="a second time"):
        embedding.load_checkpoint(save(tmp_path, {"a.safetensors": table}, index=False), PREFIX)
    assert torch.equal(getattr(embedding, part).view(torch.uint8), before)


def test_a_whole_tensor_in_place_is_shared_and_a_part_is_not(table) -> None:
    """A layer that is all the rank's is not copied; a slice is, so that it does not keep the layer alive."""
    weight = table[f"{PREFIX}.weight"][:ROWS].clone()
    whole, part = shard(), shard(2, 0)
    whole.load_weight(weight)
    part.load_weight(weight)
    assert whole.weight.data_ptr() == weight.data_ptr()
    assert part.weight.untyped_storage().nbytes() == part.plan.local_rows * DIM


def drop(name: str):
    return lambda table: table.pop(f"{PREFIX}.{name}")


def put(name: str, change):
    def change_table(table: dict[str, torch.Tensor]) -> None:
        table[f"{PREFIX}.{name}"] = change(table[f"{PREFIX}.{name}"]).contiguous()

    return change_table


def both_scales(table: dict[str, torch.Tensor]) -> None:
    table[f"{PREFIX}.scale"] = torch.full_like(table[f"{PREFIX}.weight_scale_inv"], 127)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop("weight"), KeyError, "embed.weight and .*expected both parts"),
        (drop("weight_scale_inv"), KeyError, "got no scales, expected both parts"),
        (both_scales, ValueError, "both .*weight_scale_inv and .*scale, expected one"),
        (put("weight", lambda t: t[: ROWS - 1]), ValueError, rf"embed.weight: got shape \[{ROWS - 1}, {DIM}\]"),
        (put("weight_scale_inv", lambda t: t[: ROWS - 1]), ValueError, rf"scale_inv: got shape \[{ROWS - 1}, 2\]"),
        (put("weight", lambda t: t[:, :32]), ValueError, f"embed.weight: got .* rows of {DIM}"),
        (put("weight_scale_inv", lambda t: t.t()), ValueError, "scale_inv: got shape .* rows of 2"),
        (put("weight", lambda t: t.view(torch.uint8)), TypeError, "embed.weight: got dtype torch.uint8"),
        (put("weight_scale_inv", lambda t: t.float()), TypeError, "scale_inv: got dtype torch.float32"),
        (put("weight_scale_inv", lambda t: t.long()), TypeError, "scale_inv: got dtype None"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(table, tmp_path: Path, ranks, change, error, message) -> None:
    """A part that is missing, doubled, short, or of another width or dtype is an error on every rank; nothing loads."""
    change(table)
    folder = save(tmp_path, {"a.safetensors": table}, index=True)
    for rank in range(ranks):
        embedding = shard(ranks, rank)
        with pytest.raises(error, match=message):
            embedding.load_checkpoint(folder, PREFIX)
        for part in ("weight", "scales"):
            with pytest.raises(RuntimeError, match="not loaded"):
                getattr(embedding, part)


@pytest.mark.parametrize(
    ("part", "change", "error", "message"),
    [
        ("weight", lambda t: t[: ROWS - 1], ValueError, f"weight: got shape .* at least {ROWS} rows"),
        ("weight", lambda t: t.view(torch.uint8), TypeError, "weight: got dtype torch.uint8"),
        ("weight", lambda t: t[:, :32], ValueError, "weight: got shape"),
        ("scales", lambda t: t[: ROWS - 1], ValueError, f"scales: got shape .* at least {ROWS} rows"),
        ("scales", lambda t: t.t(), ValueError, "scales: got shape"),
        ("scales", lambda t: t.float(), TypeError, "scales: got dtype torch.float32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(table, part: str, change, error, message) -> None:
    """A tensor that is short, or of another width or dtype, is refused by name on every rank."""
    tensors = dict(zip(("weight", "scales"), table.values(), strict=True))
    for rank in range(4):
        with pytest.raises(error, match=message):
            getattr(shard(4, rank), f"load_{part}")(change(tensors[part]))


def test_a_name_in_two_files_is_refused(table, tmp_path: Path) -> None:
    """A tensor that two files of a checkpoint hold is loaded from neither."""
    save(tmp_path, {"a.safetensors": table, "b.safetensors": dict(list(table.items())[1:])}, index=False)
    with pytest.raises(ValueError, match=r"weight_scale_inv: got it in .*a.safetensors and .*b.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_cut_file_is_refused(table, tmp_path: Path, cut: int) -> None:
    """A file that ends early is refused when it is opened, wherever it ends."""
    file = save(tmp_path, {"a.safetensors": table}, index=False) / "a.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"a\.safetensors: got .* expected"):
        Checkpoint(file)


@pytest.mark.parametrize("lost", [8, ROWS * DIM])
def test_a_file_cut_after_it_was_opened_loads_nothing(table, tmp_path: Path, lost: int) -> None:
    """Rows that a file lost since it was opened are an error; neither part is readable, and a whole file then loads."""
    file = save(tmp_path, {"a.safetensors": table}, index=False) / "a.safetensors"
    checkpoint, embedding = Checkpoint(file), shard()
    content = file.read_bytes()
    file.write_bytes(content[:-lost])
    with pytest.raises(ValueError, match="bytes early"):
        embedding.load_checkpoint(checkpoint, PREFIX)
    for part in ("weight", "scales"):
        with pytest.raises(RuntimeError, match="not loaded"):
            getattr(embedding, part)
    file.write_bytes(content)
    embedding.load_checkpoint(checkpoint, PREFIX)
    assert_holds(embedding, table)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    """A folder that holds no safetensors file is no checkpoint."""
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 48}, "dim: got 48, expected a multiple of 32"),
        ({"dim": 0}, "dim: got 0"),
        ({"placement": "disk"}, "placement: got 'disk'"),
        ({"placement": "pinned"}, "placement: got 'pinned' for cpu"),
    ],
)
def test_refusals_name_the_argument(arguments: dict, message: str) -> None:
    """What does not fit is refused by name, with what came and what was expected."""
    with pytest.raises(ValueError, match=message):
        EngramEmbedding(ShardPlan.of(SIZES), **({"dim": DIM} | arguments))


LOAD = """
import sys
import torch
from reference.embedding import EngramEmbedding
from reference.shard_plan import ShardPlan

def field(path, name):
    return int(next(line.split()[1] for line in open(path) if line.startswith(name)))

file, prefix, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
embedding = EngramEmbedding(ShardPlan.of([125_000] * 8, ranks=4, rank=rank), 256)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again here
resident, read = field("/proc/self/status", "VmRSS") * 1024, field("/proc/self/io", "rchar")
embedding.load_checkpoint(file, prefix)
read = field("/proc/self/io", "rchar") - read
print(field("/proc/self/status", "VmHWM") * 1024 - resident, read)
"""


@pytest.mark.parametrize("rank", [0, 3])
def test_a_load_takes_the_memory_and_the_bytes_of_its_shard(tmp_path: Path, rank: int) -> None:
    """Loading a quarter of a table grows the process by at most 1.1 times that quarter, and reads nothing else."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc to measure memory")
    rows = 1_000_100
    header = {
        f"{PREFIX}.scale": {"dtype": "U8", "shape": [rows, 8], "data_offsets": [0, rows * 8]},
        f"{PREFIX}.weight": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [rows * 8, rows * 264]},
    }
    text = json.dumps(header).encode()
    with open(tmp_path / "table.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 264)  # zeros that take no space
    arguments = [sys.executable, "-c", LOAD, str(tmp_path / "table.safetensors"), PREFIX, str(rank)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    grown, read = map(int, done.stdout.split())
    shard_bytes = 250_000 * 264
    assert shard_bytes <= read <= shard_bytes + (64 << 10)
    assert grown <= 1.1 * shard_bytes


def test_pinned_memory_lives_as_long_as_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is registered once, at its exact size, and unregistered with the last tensor over it."""
    calls: list[tuple] = []

    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", address, nbytes, flags))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    rows = pinned_bytes(5 * DIM, torch.device("cuda"))
    address = rows.data_ptr()
    assert calls == [("register", address, 5 * DIM, 1)]
    view = rows.view(torch.float8_e4m3fn).view(5, DIM)[2:]
    del rows
    gc.collect()
    assert len(calls) == 1
    del view
    gc.collect()
    assert calls[1:] == [("unregister", address)]
    assert pinned_bytes(0, torch.device("cuda")).numel() == 0
    assert len(calls) == 2
