"""Play a trace on an implementation in this process or in another, and compare every live row."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity.compare import Mismatch
from parity.protocol import Implementation
from parity.truth import Truth
from parity.world import World, flash
from reference.checks import check_token_map
from reference.config import EngramConfig
from serving.tensor_file import Refused, unpack
from serving.trace import Trace, TracedStep, map_digest, pack_trace


@dataclass(frozen=True, eq=False)
class Outcome:
    """Hold what one implementation gave for a trace.

    Attributes:
        implementation: its name.
        wrong: by step, `[live]` bool, the rows that differ from the expected ones.
        first: the first of them.
        reason: why there are no rows to compare; None: there are.
    """

    implementation: str
    wrong: list[np.ndarray]
    first: Mismatch | None = None
    reason: str | None = None

    @property
    def equal(self) -> bool:
        """Whether every row was there and right."""
        return self.reason is None and self.first is None


def world_of(trace: Trace) -> World:
    """Give the world of a trace, after its parts were held against each other.

    Raises:
        Refused: naming a configuration that is none, a map that is not here or another, constants that do not follow
            from the configuration, or rows that do not follow from the tokens.
    """
    try:
        config = EngramConfig(**trace.config)
    except (TypeError, ValueError) as error:
        raise Refused(f"config: {error}") from error
    token_map = trace.token_map
    if token_map is None:
        if trace.token_map_name != flash().name:
            raise Refused(f"token_map: got the name {trace.token_map_name!r}, expected {flash().name!r} or the map")
        token_map = flash().token_map
    if map_digest(token_map) != trace.token_map_sha256:
        raise Refused(f"token_map: got SHA-256 {map_digest(token_map)}, expected {trace.token_map_sha256}")
    try:
        world = World(trace.name, config, check_token_map(token_map, config), ())
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
    for name, want in constants(world).items():
        if not np.array_equal(trace.constants[name], want):
            raise Refused(f"{name}: got other values than those that follow from config, expected these")
    return world


def constants(world: World) -> dict[str, np.ndarray]:
    """Give what a trace holds of a world's constants: multipliers `[L, N]`, primes and offsets `[L, C]`, int64."""
    layout = world.layout
    return {
        "multipliers": world.multipliers,
        "primes": layout.primes.reshape(layout.offsets.shape),
        "offsets": layout.offsets,
    }


def check_rows(trace: Trace, world: World, device: torch.device) -> None:
    """Refuse a trace without expected rows, or with rows that do not follow from its tokens and their history.

    Raises:
        Refused: naming the step.
    """
    if any(one.rows is None for one in trace.steps):
        raise Refused("rows: missing, expected a trace with its expected rows, not the inputs of a command")
    steps = [one for one in trace.steps if one.step.pieces]
    want = Truth(world, device).rows([piece for one in steps for piece in one.step.pieces]).cpu().numpy()
    begin = 0
    for one in steps:
        assert one.rows is not None
        end = begin + len(one.rows)
        if not np.array_equal(one.rows, want[begin:end]):
            raise Refused(f"{one.step.index}/rows: got rows that do not follow from the tokens and their history")
        begin = end


def replay(trace: Trace, world: World, implementation: Implementation, device: torch.device) -> Outcome:
    """Feed the steps of a trace to an implementation and compare every live row.

    Args:
        trace: with rows.
        world: what `world_of` gave for it.
        implementation: it must offer `hash_state.HashState`; each engine of the trace gets a state of its own.
        device: where the step tensors go.
    """
    make = implementation.require("hash_state.HashState")
    states: dict[int, Any] = {}
    caches: dict[int, tuple[int, torch.Tensor]] = {}  # a KV cache lives as long as it is bound
    given: dict[str, np.ndarray] = {}
    for number, one in enumerate(trace.steps):
        engine, binding = one.engine, one.step.binding
        if engine not in states:
            block_size = one.block_size or None
            states[engine] = make(
                world.config, world.token_map, slot_cache=bool(block_size), block_size=block_size, device=device
            )
        if engine not in caches or caches[engine][0] != binding:
            caches[engine] = binding, torch.zeros(one.blocks, 1, device=device)
        if not states[engine].ensure_cache(caches[engine][1]):
            continue  # nothing is bound, so nothing is hashed
        if not one.step.num_tokens:
            continue  # a dummy step of a rank without requests
        _copy_slots(implementation.name, states[engine], one.step.slot_copies)
        tensors = {
            name: None if tensor is None else tensor.to(device, copy=True)  # an implementation may spoil its own
            for name, tensor in one.step.arguments().items()
        }
        given[f"{number}/rows"] = states[engine].forward(**tensors)[: one.step.num_tokens].cpu().numpy()
    return compare(trace, implementation.name, given)


def replay_command(trace: Trace, world: World, command: str, timeout: float | None = None) -> Outcome:
    """Let another process hash a whole trace, through files.

    Args:
        trace: with rows; they are not shown to the process.
        world: what `world_of` gave for it.
        command: the words of a command line, with `{inputs}` and `{outputs}` where the two paths go. No shell runs it.
        timeout: seconds.

    Raises:
        ValueError: `{inputs}` or `{outputs}` is missing.
    """
    for place in ("{inputs}", "{outputs}"):
        if place not in command:
            raise ValueError(f"command: got {command!r}, expected {place} in it")
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.safetensors"), Path(folder, "outputs.safetensors")
        inputs.write_bytes(pack_trace(trace, with_rows=False, token_map=world.token_map))
        words = [
            word.replace("{inputs}", str(inputs)).replace("{outputs}", str(outputs)) for word in shlex.split(command)
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            return Outcome(command, [], reason=f"the command took more than {timeout} seconds")
        except OSError as error:
            return Outcome(command, [], reason=f"{words[0]}: got {error.strerror!r}, expected a program")
        if done.returncode:
            tail = (done.stderr or done.stdout).strip()[-2000:]
            return Outcome(command, [], reason=f"the command ended with status {done.returncode}: {tail}")
        try:
            given, _ = unpack(outputs.read_bytes())
        except (Refused, OSError) as error:
            return Outcome(command, [], reason=f"outputs: {error}")
    return compare(trace, command, given)


def compare(trace: Trace, name: str, given: Mapping[str, np.ndarray]) -> Outcome:
    """Compare what an implementation gave for a trace; rows behind the live ones are nobody's.

    Args:
        trace: with rows.
        name: of the implementation.
        given: `{step}/rows` -> `[>= live, L, C]` int32.
    """
    wrong: list[np.ndarray] = []
    first = None
    for number, one in enumerate(trace.steps):
        key, live = f"{number}/rows", one.step.num_tokens
        assert one.rows is not None
        if live == 0:
            wrong.append(np.zeros(0, np.bool_))
            continue
        got = given.get(key)
        if got is None:
            return Outcome(name, [], reason=f"{key}: missing, expected the rows of every step")
        if got.dtype != np.int32 or len(got) < live or got.shape[1:] != one.rows.shape[1:]:
            want = ", ".join(map(str, one.rows.shape))
            return Outcome(name, [], reason=f"{key}: got {got.dtype} of {list(got.shape)}, expected int32 of [{want}]")
        wrong.append((got[:live] != one.rows).reshape(live, -1).any(1))
        if first is None and wrong[-1].any():
            first = _mismatch(trace, name, one, int(np.flatnonzero(wrong[-1])[0]), got)
    return Outcome(name, wrong, first)


def _copy_slots(name: str, state: Any, copies: Sequence[tuple[int, int]]) -> None:
    if not copies:
        return
    if (cache := getattr(state, "cache", None)) is None:
        raise AttributeError(f"{name}: offers no HashState.cache, expected it where forks copy slots")
    sources, targets = torch.tensor(copies, device=cache.device).unbind(1)
    cache[targets] = cache[sources]


def _mismatch(trace: Trace, name: str, one: TracedStep, row: int, got: np.ndarray) -> Mismatch:
    assert one.rows is not None
    index = row
    for piece in one.step.pieces:
        if index < len(piece.tokens):
            break
        index -= len(piece.tokens)
    return Mismatch(
        name, trace.name, one.engine, one.step, piece, index, one.rows[row], got[row], one.block_size > 0,
        one.block_size,
    )  # fmt: skip
