"""The list of mutants that may survive is true to the files that it quotes; `make mutation` holds it to the tests."""

import ast
import json
from pathlib import Path

import pytest

from tests.mutation.mutants import TARGETS, describe, meaning_of

ROOT = Path(__file__).parents[2]
ENTRIES = json.loads(Path(__file__).with_name("survivors.json").read_text(encoding="utf-8"))
FIELDS = ("file", "in", "line", "becomes")


def test_targets_and_their_tests_are_there() -> None:
    """A file that moved would be mutated no more."""
    for file, tests in TARGETS.items():
        for path in (file, *tests):
            assert (ROOT / path).is_file(), path


def test_each_survivor_stands_once_and_in_order_with_a_reason() -> None:
    """File by file; a reason is a sentence, not a word."""
    keys = [tuple(entry[name] for name in FIELDS) for entry in ENTRIES]
    assert keys == sorted(set(keys))
    assert ENTRIES
    for entry in ENTRIES:
        assert set(entry) == {*FIELDS, "reason"}
        assert entry["file"] in TARGETS
        assert len(entry["reason"].split()) >= 4, entry


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['file']}: {entry['becomes'][:40]}")
def test_the_quoted_line_is_still_there(entry: dict[str, str]) -> None:
    """In the function that the entry names; otherwise it speaks of code that is gone, and has to go too."""
    source = (ROOT / entry["file"]).read_text(encoding="utf-8")
    lines = [(number, line.strip()) for number, line in enumerate(source.splitlines(), start=1) if line.strip()]
    quoted = entry["line"].split("\n")
    at = [lines[i][0] for i in range(len(lines)) if [text for _, text in lines[i : i + len(quoted)]] == quoted]
    assert any(_inside(source, number) == entry["in"] for number in at), f"stale: {entry}"


def _inside(source: str, number: int) -> str:
    """Name the innermost function or class of a line by walking all of them, not down the bodies as mutants.py does."""
    found = ("", 0)

    def walk(node: ast.AST, name: str) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                begin = min(one.lineno for one in (child, *child.decorator_list))
                if begin <= number <= (child.end_lineno or 0) and begin > found[1]:
                    found = inner, begin
                walk(child, inner)

    walk(ast.parse(source), "")
    return found[0]


SOURCE = """
class A:
    x: int = 1

    @property
    def f(self, a: int | None = 2) -> int | None:
        return a + 1
"""


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("return a + 1", "return a - 1", "A.f"),
        ("x: int = 1", "x: int = 2", "A"),
        ("@property", "", "A.f"),
        ("def f(self, a: int | None = 2) -> int | None:", "def f(self, a: int | None = 3) -> int | None:", "A.f"),
    ],
)
def test_a_mutant_is_known_by_its_place_and_its_line(old: str, new: str, place: str) -> None:
    """However the file moves around it."""
    for before in ("", "import os\n"):
        mutant = describe("a.py", before + SOURCE, before + SOURCE.replace(old, new))
        assert mutant.key == ("a.py", place, old, new)


def test_only_what_can_make_a_difference_is_tried() -> None:
    """Annotations are evaluated by nobody here, and a cache changes the speed; everything else counts."""
    cached = "@lru_cache(maxsize=4)\ndef f(): return 1\n"
    assert meaning_of(cached) == meaning_of(cached.replace("4", "5")) != meaning_of(cached.replace("1", "2"))
    assert meaning_of(SOURCE) == meaning_of(SOURCE.replace("int | None", "int & None"))
    assert meaning_of(SOURCE) != meaning_of(SOURCE.replace("a + 1", "a - 1"))
    assert meaning_of(SOURCE) != meaning_of(SOURCE.replace("= 2", "= 3"))
