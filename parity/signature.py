"""Hold the parameters of what a port offers against those of the reference, before anything is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

# What is called on an object of a class; the first ones are asked for in any case.
METHODS: dict[str, tuple[str, ...]] = {
    "hash_state.HashState": ("forward", "ensure_cache", "dummy_hashes"),
    "engram.Engram": ("forward", "prepare_embeddings", "embed"),
}
OPTIONAL = frozenset({"dummy_hashes"})
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def differences(path: str, offered: Any, wanted: Any) -> Iterator[str]:
    """Yield what is wrong with the parameters of an offered function or class, one sentence for each callable.

    Parameters must have the names, the order and the defaults that the reference has; more of them are allowed where
    they have a default, and `*args` and `**kwargs` stand for any. What has no readable signature is taken as it is.

    Args:
        path: of the offered name, `module.leaf`.
        offered: the port's.
        wanted: the reference's.
    """
    leaf = path.rpartition(".")[2]
    yield from _compare(leaf, offered, wanted, bound=True)
    if not inspect.isclass(offered):
        return
    for method in METHODS.get(path, ()):
        if hasattr(offered, method):
            static = isinstance(inspect.getattr_static(offered, method), staticmethod | classmethod)
            yield from _compare(
                f"{leaf}.{method}", getattr(offered, method), getattr(wanted, method), bound=static, wanted_bound=False
            )
        elif method not in OPTIONAL:
            parameters = _parameters(getattr(wanted, method))[1:]
            yield f"{leaf}: got a class without {method}, expected {method}{_write(parameters)}"


def _compare(name: str, offered: Any, wanted: Any, *, bound: bool, wanted_bound: bool = True) -> Iterator[str]:
    try:
        got = _parameters(offered)[0 if bound else 1 :]
    except (TypeError, ValueError):
        return  # built into the interpreter or an extension, without a signature
    want = _parameters(wanted)[0 if wanted_bound else 1 :]
    if faults := "; ".join(_faults(got, want)):
        yield f"{name}: got {_write(got)}, expected {_write(want)}: {faults}"


def _faults(got: list[Parameter], want: list[Parameter]) -> Iterator[str]:
    kinds = {parameter.kind for parameter in got}
    named = {parameter.name: parameter for parameter in got if parameter.kind in _BY_NAME}
    any_name, any_place = Parameter.VAR_KEYWORD in kinds, Parameter.VAR_POSITIONAL in kinds
    for place, parameter in enumerate(want):
        positional = parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        mine = named.get(parameter.name)
        if mine is None:
            if not any_name or (positional and not any_place):
                yield f"lacks {parameter.name}"
            continue
        if positional and mine.kind is Parameter.KEYWORD_ONLY and not any_place:
            yield f"takes {parameter.name} by name only"
        elif positional and mine.kind is not Parameter.KEYWORD_ONLY and got.index(mine) != place:
            yield f"has {parameter.name} at place {got.index(mine) + 1}, not {place + 1}"
        if parameter.default is not Parameter.empty and mine.default is Parameter.empty:
            yield f"asks for {parameter.name}, which has the default {parameter.default!r}"
    wanted = {parameter.name for parameter in want}
    for mine in got:
        asked = mine.default is Parameter.empty and mine.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        if asked and mine.name not in wanted:
            yield f"asks for {mine.name}, which nobody gives"


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    return list(inspect.signature(function).parameters.values())


def _write(parameters: list[Parameter]) -> str:
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))
