"""What an implementation under test offers: the names of the reference, nested or flat, as a module or an object."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import SkipTest

from parity.adapter import PortLayout
from parity.signature import differences

# Every name that a run may ask for: `hash_state.HashState` in a package, or `HashState` in a flat module.
OFFERED = (
    "token_map.build_token_map",
    "hash_state.HashState",
    "embedding.lookup",
    "gate.engram_gate",
    "sharding.select_rows",
    "engram.Engram",
)


class NotOffered(AttributeError, SkipTest):
    """Say what an implementation lacks; its tests are skipped and counted, and hypothesis seeks no smaller case.

    Attributes:
        implementation, path: who lacks what.
    """

    def __init__(self, implementation: str, path: str) -> None:
        super().__init__(f"{implementation}: offers neither {path} nor {path.rpartition('.')[2]}")
        self.implementation, self.path = implementation, path


@dataclass(frozen=True)
class Implementation:
    """Name an implementation and find what it offers, as it declares itself (see `PortLayout`).

    Attributes:
        name: how the run calls it.
        root: a module or any object.
    """

    name: str
    root: Any

    def find(self, path: str) -> Any:
        """Give `root.a.b` or else `root.b` for the path `a.b`, adapted; None where it offers neither."""
        found = self.find_bare(path)
        return None if found is None else PortLayout.of(self.root).adapt(path, found)

    def find_bare(self, path: str) -> Any:
        """Give what `find` gives, as the port wrote it."""
        module, _, leaf = path.rpartition(".")
        nested = getattr(self.root, module, None)
        if nested is None and isinstance(self.root, ModuleType) and hasattr(self.root, "__path__"):
            nested = _submodule(f"{self.root.__name__}.{module}")
        found = getattr(nested, leaf, None)
        return found if found is not None else getattr(self.root, leaf, None)

    def require(self, path: str) -> Any:
        """Give what `find` gives.

        Raises:
            NotOffered: the implementation lacks it.
        """
        found = self.find(path)
        if found is None:
            raise NotOffered(self.name, path)
        return found

    def offers(self) -> tuple[list[str], list[str]]:
        """Give the names of OFFERED that it has, and those that it lacks."""
        there = [path for path in OFFERED if self.find_bare(path) is not None]
        return there, [path for path in OFFERED if path not in there]

    def describe(self) -> str:
        """Write its name, its version where it has one, what it lacks, and how it declares itself."""
        there, lacking = self.offers()
        version = getattr(self.root, "__version__", None)
        words = [f"{self.name} {version}" if version else self.name, f"offers {', '.join(there) or 'nothing'}"]
        words += [f"lacks {', '.join(lacking)}"] if lacking else []
        layout = PortLayout.of(self.root)
        return "; ".join(words + ([str(layout)] if layout != PortLayout() else []))


def load_implementation(name: str) -> Implementation:
    """Import an implementation by name: `reference`, `optimized`, a port's module, or `module:object` in it.

    Raises:
        ModuleNotFoundError: there is no such module.
        AttributeError: the module has no such object.
        ValueError: it offers none of the names that can be judged, or declares what cannot be.
        TypeError: something that it offers takes other parameters than the reference's, with the difference.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: a port in the current folder is found by pytest too
    module, _, inside = name.partition(":")
    root: Any = importlib.import_module(module)
    for part in inside.split(".") if inside else ():
        if not hasattr(root, part):
            raise AttributeError(f"implementation: got {name}, but {module} has no {inside}")
        root = getattr(root, part)
    implementation = Implementation(name, root)
    PortLayout.of(root)
    there, _ = implementation.offers()
    if not there:
        raise ValueError(f"implementation: got {name}, which offers none of {', '.join(OFFERED)}")
    faults = [fault for path in there for fault in differences(path, implementation.find_bare(path), _reference(path))]
    if faults:
        raise TypeError("\n".join(f"{name}: {fault}" for fault in faults))
    return implementation


def _reference(path: str) -> Any:
    module, _, leaf = path.rpartition(".")
    return getattr(importlib.import_module(f"reference.{module}"), leaf)


def _submodule(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # the module is there and lacks something of its own
        return None
