"""What an implementation under test offers: the names of the reference, nested or flat, as a module or an object."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Every name that a run may ask for: `hash_state.HashState` in a package, or `HashState` in a flat module.
OFFERED = (
    "token_map.build_token_map",
    "hash_state.HashState",
    "embedding.lookup",
    "gate.engram_gate",
    "sharding.select_rows",
    "engram.Engram",
)


@dataclass(frozen=True)
class Implementation:
    """Name an implementation and find what it offers.

    Attributes:
        name: how the run calls it.
        root: a module or any object.
    """

    name: str
    root: Any

    def find(self, path: str) -> Any:
        """Give `root.a.b` or else `root.b` for the path `a.b`; None where it offers neither."""
        module, _, leaf = path.rpartition(".")
        nested = getattr(self.root, module, None)
        if nested is None and isinstance(self.root, ModuleType) and hasattr(self.root, "__path__"):
            nested = _submodule(f"{self.root.__name__}.{module}")
        found = getattr(nested, leaf, None)
        return found if found is not None else getattr(self.root, leaf, None)

    def require(self, path: str) -> Any:
        """Give what `find` gives.

        Raises:
            AttributeError: the implementation lacks it.
        """
        found = self.find(path)
        if found is None:
            leaf = path.rpartition(".")[2]
            raise AttributeError(f"{self.name}: offers neither {path} nor {leaf}")
        return found


def load_implementation(name: str) -> Implementation:
    """Import an implementation by the name of its module: `reference`, `optimized`, or a port's.

    Raises:
        ModuleNotFoundError: there is no such module.
        ValueError: it offers none of the names that can be judged.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: a port in the current folder is found by pytest too
    implementation = Implementation(name, importlib.import_module(name))
    if not any(implementation.find(path) for path in OFFERED):
        raise ValueError(f"implementation: got {name}, which offers none of {', '.join(OFFERED)}")
    return implementation


def _submodule(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # the module is there and lacks something of its own
        return None
