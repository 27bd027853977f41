"""What is mutated, by which tests it is judged, and every mutant of it that can make a difference."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

TARGETS = {
    "reference/prime_layout.py": ["tests/reference/test_prime_layout.py"],
    "reference/multipliers.py": ["tests/reference/test_multipliers.py"],
    "reference/ngram_hash.py": ["tests/reference/test_ngram_hash.py"],
    "reference/hash_state.py": ["tests/reference/test_hash_state.py"],
    "serving/block_pool.py": ["tests/serving/test_block_store.py", "tests/serving/test_block_pool.py"],
    "serving/prefix_cache.py": ["tests/serving/test_block_store.py", "tests/serving/test_prefix_cache.py"],
}


@dataclass(frozen=True, order=True)
class Mutant:
    """Hold one changed file.

    Attributes:
        file: its path from the root.
        place: the function or class that it changes, dotted; "" at the top.
        line: what stood there, without indentation; several lines are joined by newlines.
        becomes: what stands there now.
        source: the whole text.
    """

    file: str
    place: str
    line: str
    becomes: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from others, whatever else of the file changes."""
        return self.file, self.place, self.line, self.becomes


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant that cosmic-ray makes of a file and that `meaning_of` tells from the original."""
    from cosmic_ray.mutating import mutate_code  # of the optional group `mutation`
    from cosmic_ray.plugins import get_operator, operator_names

    seen = {meaning_of(source)}
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        occurrence = 0
        while (changed := mutate_code(source, kind(), occurrence)) is not None:
            occurrence += 1
            try:
                meaning = meaning_of(changed)
            except SyntaxError:
                continue  # it takes the bare `*` among parameters for an operator
            if meaning not in seen:
                seen.add(meaning)
                yield describe(file, source, changed)


def meaning_of(source: str) -> str:
    """Dump the syntax of a file without annotations, which nothing here evaluates, and without what caches results."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [one for one in node.decorator_list if not ast.unparse(one).startswith("lru_cache")]
    return ast.dump(tree)


def describe(file: str, source: str, changed: str) -> Mutant:
    """Give the mutant that makes `changed` of the source of a file."""
    before, after = source.splitlines(), changed.splitlines()
    edits = [
        edit for edit in difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes() if edit[0] != "equal"
    ]
    begin, end, new_begin, new_end = edits[0][1], edits[-1][2], edits[0][3], edits[-1][4]
    while begin < end and not before[begin].strip():
        begin += 1
    old, new = (
        "\n".join(line.strip() for line in lines if line.strip())
        for lines in (before[begin:end], after[new_begin:new_end])
    )
    return Mutant(file, _place(source, begin + 1), old, new, changed)


def _place(source: str, number: int) -> str:
    names: list[str] = []
    body: list[ast.stmt] = ast.parse(source).body
    while body:
        around = [node for node in body if _first(node) <= number <= (node.end_lineno or 0)]
        if not around or not isinstance(around[0], ast.FunctionDef | ast.ClassDef):
            break
        names.append(around[0].name)
        body = around[0].body
    return ".".join(names)


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
