"""Laws of finding what a port offers: nested or flat, module or object, and nothing where there is nothing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity.protocol import OFFERED, Implementation, load_implementation

NESTED = {"hash_state.py": "class HashState: pass", "gate.py": "def engram_gate(): pass"}


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
        ("flat_port", "class HashState: pass"),
        ("flat_package", {"__init__.py": "class HashState: pass"}),
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
    with pytest.raises(AttributeError, match=r"^empty: offers neither hash_state.HashState nor HashState$"):
        Implementation("empty", SimpleNamespace()).require("hash_state.HashState")


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
