"""Laws of finding what a port offers: nested or flat, module or object, rightly called, and adapted as it declares."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parity.adapter import AdaptedState, PortLayout
from parity.protocol import OFFERED, Implementation, NotOffered, load_implementation
from parity.signature import differences
from parity.world import World

STATE = """
class HashState:
    def __init__(self, config, token_map, *, slot_cache, block_size, device): pass
    def ensure_cache(self, kv_cache): pass
    def forward(self, input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
                slot_mapping, block_table): pass
"""
GATE = "def engram_gate(hidden, kv, q_weight, k_weight, token_mask=None, *, eps, clamp=1e-6): pass"
NESTED = {"hash_state.py": STATE, "gate.py": GATE}


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module or package of the given files and give its name."""
    made: list[str] = []

    def write(name: str, files: dict[str, str] | str) -> str:
        if isinstance(files, str):
            (tmp_path / f"{name}.py").write_text(files, encoding="utf-8")
        else:
            (tmp_path / name).mkdir()
            for file, text in {"__init__.py": "", **files}.items():
                (tmp_path / name / file).write_text(text, encoding="utf-8")
        made.append(name)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for loaded in [key for key in sys.modules if key.split(".")[0] in made]:
        del sys.modules[loaded]


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_both_sides_of_this_project_are_found(side: str) -> None:
    """Each offers a hash state and a token map, nested, without having been imported before."""
    implementation = load_implementation(side)
    assert implementation.name == side
    for path in ("hash_state.HashState", "token_map.build_token_map"):
        assert implementation.require(path).__module__ == f"{side}.{path.split('.')[0]}"


def test_nested_names_are_found_in_modules_that_nobody_imported(port) -> None:
    """`port.hash_state.HashState` needs no line in the package's __init__."""
    implementation = load_implementation(port("nested_port", NESTED))
    assert implementation.find("hash_state.HashState").__module__ == "nested_port.hash_state"
    assert implementation.find("gate.engram_gate").__module__ == "nested_port.gate"
    assert implementation.find("embedding.lookup") is None


def test_flat_names_are_found_in_a_module_and_in_a_package(port) -> None:
    """`port.HashState` will do, wherever it stands."""
    for name, files in (
        ("flat_port", STATE),
        ("flat_package", {"__init__.py": STATE}),
    ):
        implementation = load_implementation(port(name, files))
        assert implementation.find("hash_state.HashState").__module__ == name
        assert implementation.find("gate.engram_gate") is None


def test_a_nested_name_goes_before_a_flat_one() -> None:
    """Where an object offers both, the one with the full name is meant."""
    root = SimpleNamespace(HashState=1, hash_state=SimpleNamespace(HashState=2), engram_gate=3, gate=SimpleNamespace())
    implementation = Implementation("object", root)
    assert implementation.find("hash_state.HashState") == 2
    assert implementation.find("gate.engram_gate") == 3


def test_what_is_lacking_is_said_by_both_names() -> None:
    """`require` names the implementation and what it would have taken."""
    message = r"^empty: offers neither hash_state.HashState nor HashState$"
    with pytest.raises(NotOffered, match=message) as caught:
        Implementation("empty", SimpleNamespace()).require("hash_state.HashState")
    assert (caught.value.implementation, caught.value.path) == ("empty", "hash_state.HashState")


def test_a_module_that_offers_nothing_is_refused(port) -> None:
    """A run on an empty port would compare nothing and pass."""
    for name, files in (("empty_port", "answer = 42"), ("empty_package", {"other.py": "HashState = 1"})):
        with pytest.raises(
            ValueError, match=f"^implementation: got {name}, which offers none of token_map.build_token_map"
        ):
            load_implementation(port(name, files))


def test_a_module_that_is_not_there_or_does_not_import_says_so(port) -> None:
    """A missing port, and a port that misses something of its own, are errors with the missing module's name."""
    with pytest.raises(ModuleNotFoundError, match="no_such_port"):
        load_implementation("no_such_port")
    name = port("broken_port", {"hash_state.py": "import no_such_library"})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_implementation(name)


def test_every_offered_name_has_a_module_and_a_leaf() -> None:
    """The names are `module.leaf`, each once."""
    assert all(path.count(".") == 1 for path in OFFERED)
    assert len({path.split(".")[1] for path in OFFERED}) == len(OFFERED)


def test_an_object_in_a_module_is_a_port_too(port) -> None:
    """`module:object`, and `module:a.b`; one that is not there is an error with its name."""
    name = port("holder", f"{STATE}\nclass ports:\n    first = type('P', (), {{'HashState': HashState}})\n")
    assert load_implementation(f"{name}:ports.first").find("hash_state.HashState").__name__ == "HashState"
    with pytest.raises(
        AttributeError, match=r"^implementation: got holder:ports.second, but holder has no ports.second$"
    ):
        load_implementation(f"{name}:ports.second")


def test_what_is_offered_and_what_is_lacking_are_all_that_there_is(port) -> None:
    """Nothing that can be judged goes unmentioned in the header."""
    one = load_implementation(port("half_port", f"{STATE}\n{GATE}\n__version__ = '1.5'"))
    there, lacking = one.offers()
    assert sorted(there) == ["gate.engram_gate", "hash_state.HashState"]
    assert sorted([*there, *lacking]) == sorted(OFFERED)
    assert one.describe().startswith("half_port 1.5; offers hash_state.HashState, gate.engram_gate; lacks token_map.")


def _expected(a: int, b: int = 2, *, c: int, d: int = 4) -> None: ...


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (lambda a, b=2, *, c, d=4: 0, None),
        (lambda a, b=0, c=1, d=2, more=3: 0, None),
        (lambda *args, **kwargs: 0, None),
        (lambda a, *args, **kwargs: 0, None),
        (lambda a, b=2, *, d=4, **other: 0, None),
        (print, "lacks a; lacks b; lacks c; lacks d"),
        (lambda a, b=2, *, d=4: 0, "lacks c"),
        (lambda b=2, a=1, *, c, d=4: 0, "has a at place 2, not 1; has b at place 1, not 2"),
        (lambda a, b=2, *, c, d: 0, "asks for d, which has the default 4"),
        (lambda a, x, b=2, *, c, d=4: 0, "has b at place 3, not 2; asks for x, which nobody gives"),
        (lambda *, a, b=2, c, d=4: 0, "takes a by name only; takes b by name only"),
        (lambda a, **other: 0, "lacks b"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused_with_the_difference(offered: Callable[..., Any], said: str | None) -> None:
    """Every legal call of the reference must be one of the port, and no more is asked of it."""
    found = list(differences("any.name", offered, _expected))
    if said is None:
        assert found == []
    else:
        (sentence,) = found
        assert sentence.startswith("name: got (")
        assert ", expected (a, b=2, *, c, d=4): " in sentence
        assert sentence.partition("d=4): ")[2].endswith(said)


def test_a_port_is_refused_for_a_method_that_is_missing_or_called_otherwise(port) -> None:
    """The refusal names the port, the method, and both lists of parameters."""
    renamed = port("renamed", STATE.replace("query_start_loc", "starts"))
    with pytest.raises(
        TypeError, match=r"^renamed: HashState.forward: got \(input_ids, positions, starts, .*lacks query_st"
    ):
        load_implementation(renamed)
    lame = port("lame", STATE.replace("ensure_cache", "bind"))
    with pytest.raises(
        TypeError, match=r"^lame: HashState: got a class without ensure_cache, expected ensure_cache\(kv_c"
    ):
        load_implementation(lame)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"ids": "int16"}, "got ids 'int16', expected one of"),
        ({"rows": "TCL"}, "got rows 'TCL', expected one of"),
        ({"local_ids": "yes"}, "got local_ids 'yes'"),
        ({"colour": 1}, "got {'colour': 1}, expected a PortLayout or a dict with some of"),
        ("LTC", "got 'LTC', expected a PortLayout or a dict"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(declared: object, message: str) -> None:
    """A misspelt field must not leave a port unadapted."""
    with pytest.raises(ValueError, match=f"^ENGRAM_PORT: {message}"):
        PortLayout.of(SimpleNamespace(ENGRAM_PORT=declared))


class Spy:
    """Take what a hash state takes, keep it, and give rows that the test chose."""

    rows: torch.Tensor

    def __init__(self, config, token_map, *, slot_cache, block_size, device) -> None:
        self.made, self.bound = device, []

    def ensure_cache(self, kv_cache: torch.Tensor) -> bool:
        self.bound.append(weakref.ref(kv_cache))
        return True

    def forward(self, **step: torch.Tensor | None) -> torch.Tensor:
        self.step = step
        return self.rows


def _adapted(world: World, given: torch.Tensor, /, device: str = "cpu", **declared: Any) -> AdaptedState:
    kind = type("Spy", (Spy,), {"rows": given})
    make = Implementation("spy", SimpleNamespace(HashState=kind, ENGRAM_PORT=declared)).require("hash_state.HashState")
    return make(world.config, world.token_map, slot_cache=False, block_size=None, device=device)


def _step(dtype: torch.dtype, tokens: int = 5, live: int = 3) -> dict[str, torch.Tensor | None]:
    return {
        "input_ids": torch.arange(2 * tokens, dtype=dtype)[::2],
        "positions": torch.arange(tokens, dtype=dtype),
        "query_start_loc": torch.tensor([0, live], dtype=dtype),
        "dead_mask": torch.zeros(tokens, dtype=torch.bool),
        "lookback_token_ids": torch.zeros(1, 3, dtype=dtype),
        "lookback_dead_mask": torch.zeros(1, 3, dtype=torch.bool),
        "slot_mapping": None,
        "block_table": None,
    }


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_port_sees_integers_of_the_type_and_layout_that_it_declares(ids: str, dtype: torch.dtype, worlds) -> None:
    """Values are equal, flags stay flags, None stays None."""
    world = worlds["toy"]
    layers, columns = world.layout.offsets.shape
    state = _adapted(world, torch.zeros(5, layers, columns, dtype=torch.int32), ids=ids, contiguous=True)
    step = _step(dtype)
    state.forward(**step)
    for name, tensor in step.items():
        seen = state.step[name]
        if tensor is None or tensor.dtype == torch.bool:
            assert seen is tensor or torch.equal(seen, tensor)
        else:
            assert seen.dtype == getattr(torch, ids)
            assert torch.equal(seen.long(), tensor.long())
            assert seen.is_contiguous()


def test_a_live_value_that_does_not_fit_is_refused_and_a_padded_one_is_nobodys(worlds) -> None:
    """Nothing is wrapped where somebody reads it."""
    world = worlds["toy"]
    layers, columns = world.layout.offsets.shape
    state = _adapted(world, torch.zeros(5, layers, columns, dtype=torch.int32), ids="int32")
    step = _step(torch.int64)
    step["positions"][3] = 2**31
    state.forward(**step)
    step["positions"][2] = 2**31
    with pytest.raises(ValueError, match=r"^positions: got 0 .. 2147483648, expected values of int32"):
        state.forward(**step)


def test_rows_come_back_token_major_with_their_offsets(worlds) -> None:
    """Layer-major bucket numbers become rows of the table, dead rows stay dead, and a row past int32 is nobody's."""
    world = worlds["toy"]
    offsets = world.layout.offsets  # [L, C]
    layers, columns = offsets.shape
    given = np.arange(layers * 5 * columns).reshape(layers, 5, columns)
    given[0, 1], given[1, 2, 0] = -1, 2**31
    got = _adapted(world, torch.from_numpy(given), rows="LTC", local_ids=True).forward(**_step(torch.int64))
    assert got.dtype == torch.int32
    assert got.shape == (5, layers, columns)
    for layer, t, c in np.ndindex(given.shape):
        row = int(given[layer, t, c])
        want = -1 if row in (-1, 2**31) else row + int(offsets[layer, c])
        assert got[t, layer, c] == want


def test_rows_of_another_shape_or_type_than_declared_are_refused(worlds) -> None:
    """No transposition makes them fit."""
    world = worlds["toy"]
    layers, columns = world.layout.offsets.shape
    for rows in (torch.zeros(5, layers, columns, dtype=torch.int32), torch.zeros(layers, 5, columns)):
        with pytest.raises(ValueError, match=r"^forward: got torch\..*, expected int32 or int64 of .*\(L, T, C\)$"):
            _adapted(world, rows, rows="LTC").forward(**_step(torch.int64))


def test_a_kv_cache_on_another_device_is_bound_again_as_itself(worlds) -> None:
    """The port sees one copy of it as long as it is bound, and another of the next one; the old one is let go."""
    world = worlds["toy"]
    layout = PortLayout(device="meta")
    state = AdaptedState(layout, Spy, world.config, world.token_map, slot_cache=True, block_size=2, device="cpu")
    assert state.made == torch.device("meta")
    first, second = torch.zeros(3, 1), torch.zeros(3, 1)
    for cache in (first, first, second):
        assert state.ensure_cache(cache)
    seen = [one() for one in state.bound]
    assert seen[0] is None
    assert seen[1] is None
    assert seen[2] is not None
    assert seen[2].device.type == "meta"
    watch = weakref.ref(second)
    del cache, second
    gc.collect()
    assert watch() is None


def test_dummy_hashes_are_adapted_where_a_port_has_them(worlds) -> None:
    """A port without them lacks them behind the adapter too."""
    world = worlds["toy"]
    state = _adapted(world, torch.zeros(0), rows="LTC")
    assert not hasattr(state, "dummy_hashes")
    assert not hasattr(state, "cache")
    layers, columns = world.layout.offsets.shape
    state._state.dummy_hashes = lambda ids: (torch.full((layers, len(ids), columns), -1), torch.zeros(len(ids)).bool())
    rows, keep = state.dummy_hashes(torch.zeros(4, dtype=torch.int64))
    assert rows.shape == (4, layers, columns)
    assert bool((rows == -1).all())
    assert not keep.any()


def test_a_lookup_sees_the_ids_that_it_declares() -> None:
    """Weight and scales stay as they are."""
    seen: list[torch.Tensor] = []

    def lookup(weight, scales, ids, *, first_row=0):
        seen.extend((weight, ids))
        return ids + first_row

    port = Implementation("port", SimpleNamespace(lookup=lookup, ENGRAM_PORT={"ids": "int64"}))
    weight = torch.zeros(2, dtype=torch.int32)
    got = port.require("embedding.lookup")(weight, weight, torch.tensor([[1, 2]], dtype=torch.int32), first_row=3)
    assert seen[0] is weight
    assert seen[1].dtype == torch.int64
    assert got.tolist() == [[4, 5]]
