"""Mistakes that people really made, as small wrong implementations; `CATALOGUE` has them by id, in groups."""

from parity.faults import embedding, gate, hash_state, kernel, layout, module, runner, sharding, token_map
from parity.faults.fault import CATALOGUE, RUNNER, STATE, VALUE, Fault

__all__ = [
    "CATALOGUE", "RUNNER", "STATE", "VALUE", "Fault", "embedding", "gate", "hash_state", "kernel", "layout", "module",
    "runner", "sharding", "token_map",
]  # fmt: skip
