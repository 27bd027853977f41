"""The house: which room may import which, one name on both sides, and no public name without a sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("reference", "optimized", "serving", "parity")
NOBODY_IMPORTS = {"tests", "fixtures", "benchmarks", "conftest"}
MAY_IMPORT = {
    "reference": {"reference"},
    "serving": {"serving"},
    "optimized": {"optimized", "reference"},
    "parity": set(ROOMS),
}
# What the fast side takes from the reference: plans and formats on the host, never the arithmetic under test.
PLANS = {
    "checks", "config", "token_map", "prime_layout", "multipliers", "quantization", "shard_plan", "checkpoint",
    "collectives",
}  # fmt: skip


def sources(room: str) -> list[Path]:
    """List a room's Python files."""
    return sorted((ROOT / room).rglob("*.py"))


FILES = [path for room in ROOMS for path in sources(room)]
FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, and `a.b` for `from a import b`, wherever it stands."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@FILE
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    """reference and serving stand alone, optimized stands on the reference's plans, parity on all three."""
    room = path.relative_to(ROOT).parts[0]
    reached = {name.split(".")[0] for name in imports(path)}
    assert reached & {*ROOMS} <= MAY_IMPORT[room]
    assert not reached & NOBODY_IMPORTS, "tests, fixtures and benchmarks are leaves"
    if room in ("reference", "serving"):
        assert "triton" not in reached, f"{room} runs without Triton"


@pytest.mark.parametrize("path", sources("optimized"), ids=lambda path: path.name)
def test_the_fast_side_takes_only_plans_from_the_reference(path: Path) -> None:
    """What is judged is never computed by the judge's own code."""
    taken = {f"{name}.*".split(".")[1] for name in imports(path) if name.split(".")[0] == "reference"}
    assert taken <= PLANS


@pytest.mark.parametrize("path", sources("optimized"), ids=lambda path: path.name)
def test_every_fast_file_has_its_reference(path: Path) -> None:
    """One concept, one word: `optimized/gate.py` is what `reference/gate.py` says."""
    assert (ROOT / "reference" / path.name).exists()


@FILE
def test_every_public_name_has_a_sentence(path: Path) -> None:
    """Modules, classes, functions and methods that others may use say what they do."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [name for name, node in public_names(tree) if not (ast.get_docstring(node) or "").strip()]
    assert not silent, f"{path}: no docstring"


def public_names(tree: ast.Module) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """Yield the module, and every class, function and method in it whose name has no underscore in front."""
    yield "module", tree
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
            yield from ((f"{node.name}.{one.name}", one) for one in methods)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import triton.language as tl", {"triton.language"}),
        ("def f():\n    from tests.tolerances import TOLERANCES", {"tests.tolerances.TOLERANCES"}),
        ("from . import gate\nfrom .gate import f\nfrom ..optimized import g",
         {"reference.gate", "reference.gate.f", "optimized.g"}),
        ("if True:\n    import a, b.c", {"a", "b.c"}),
    ],
)  # fmt: skip
def test_no_spelling_of_an_import_is_overlooked(source: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, aliased, relative, and inside functions or conditions."""
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: source)
    assert set(imports(ROOT / "reference" / "anything.py")) == found


def test_the_rooms_are_there() -> None:
    """An empty list of files would pass every law of this house."""
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == {*ROOMS}
    assert len(FILES) > 30
