"""What a fault is, and how one enters the catalogue."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from parity.protocol import Implementation

Planted = TypeVar("Planted", bound=Callable[..., Any])
STATE, RUNNER, VALUE = "state", "runner", "value"
_NOTES = re.compile(r"(?:Source: (?P<source>.*?)\. )?Law: (?P<law>\w+)\.\s*$", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """Hold one mistake: a small wrong implementation and what is known about it.

    Attributes:
        id: a letter for what it breaks and a number: H history, C constants and map, T table and shards, G gate.
        clause: the mistake, as it goes on from "your ids are what you get if ...".
        group: the file of `parity/faults` that it stands in.
        level: `state`, a hash state; `runner`, an engine whose steps say something wrong; `value`, any other name that
            a port offers.
        story: how it comes about.
        source: the public report, or "".
        law: the name of the law that catches it.
        offers: the path under which a port offers what is wrong.
        make: what is wrong: a class or a function.
    """

    id: str
    clause: str
    group: str
    level: str
    story: str
    source: str
    law: str
    offers: str
    make: Any

    @property
    def implementation(self) -> Implementation:
        """A port that has this mistake; a runner's mistake leaves the port right."""
        if self.level == RUNNER:
            from parity.faults.model import Model

            return Implementation(self.id, SimpleNamespace(HashState=Model))
        return Implementation(self.id, SimpleNamespace(**{self.offers.rpartition(".")[2]: self.make}))


CATALOGUE: dict[str, Fault] = {}


def plant(number: str, clause: str, *, offers: str = "hash_state.HashState") -> Callable[[Planted], Planted]:
    """Enter a class or function into the catalogue; its docstring tells the story and ends on its source and law.

    Args:
        number: the fault's id.
        clause: see `Fault`.
        offers: see `Fault`.

    Raises:
        ValueError: the id is taken, or the docstring names no law.
    """

    def enter(planted: Planted) -> Planted:
        notes = _NOTES.search(inspect.getdoc(planted) or "")
        if notes is None or number in CATALOGUE:
            raise ValueError(f"{number}: got no law in its docstring, or the id twice; expected both right")
        story = " ".join((inspect.getdoc(planted) or "")[: notes.start()].split())
        source = " ".join((notes["source"] or "").split())
        level = RUNNER if hasattr(planted, "change") else STATE if offers == "hash_state.HashState" else VALUE
        group = planted.__module__.rpartition(".")[2]
        CATALOGUE[number] = Fault(number, clause, group, level, story, source, notes["law"], offers, planted)
        return planted

    return enter
