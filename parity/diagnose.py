"""Explain wrong rows: where each lookback of the first should come from, and which known mistakes give them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from parity.compare import Judge, Mismatch, piece_sources
from parity.workload import Session
from parity.world import World
from serving.step import Step

if TYPE_CHECKING:
    from parity.suspects import Evidence, Suspect

_SHOWN = 3
_MOMENTS = {
    "after rejection": "behind a rejected draft", "one token left": "on a prefix hit with one token left",
    "prefix hit": "on a prefix hit", "import": "behind an import", "beam reorder": "of a beam that was reordered",
    "fork": "of a fork", "preempted, reload": "of a request that was preempted and loaded again",
    "sleep and wake": "behind another KV cache", "id reuse": "of a request whose id was used before",
    "packed documents": "of a packed document", "microbatch inside a request": "behind the cut of a microbatch",
    "draft runs ahead": "of a draft model", "verify": "of a verify", "decode": "of a decode",
    "chunk": "of a prompt's chunk", "prompt whole": "of a whole prompt",
}  # fmt: skip


def diagnose(judge: Judge, steps: Iterable[tuple[Session, Step]], name: str) -> str | None:
    """Run a port again on the steps that it failed on, and name the known mistakes that give its wrong rows.

    Args:
        judge: has the world, the port and how it is shown a step.
        steps: of the same run, from its beginning.
        name: of the port.

    Returns:
        what to print; None where no row is wrong.
    """
    from parity.suspects import gather  # after choose_device: faults are kernels, too

    evidence = gather(judge.world, judge.states[name], steps, judge.device, judge.present)
    return explain(name, evidence) if evidence.num_wrong else None


def explain(name: str, evidence: Evidence) -> str:
    """Write which known mistakes give the wrong rows of the evidence, of which there is one, or what else is known."""
    from parity.suspects import suspects

    wrong, rows = evidence.num_wrong, sum(len(one) for one in evidence.got)
    first = next(at for at, one in enumerate(evidence.wrong()) if one.any())
    head = (
        f"{name}: {wrong} of {rows} rows are wrong in steps 0 to {len(evidence.steps) - 1} of the run, first in {first}"
    )
    found = suspects(evidence)
    lines = [*_sentences(found, _moment(evidence))] or ["none of the known mistakes gives a single one of these rows"]
    partial = not found or found[0].score < 1
    return "\n".join([head, *(f"  {line}" for line in [*lines, *(_facts(evidence) if partial else ())])])


def _sentences(found: Sequence[Suspect], moment: str) -> Iterator[str]:
    for place, one in enumerate(found[:_SHOWN], start=1):
        clause = ", and ".join(fault.clause for fault in one.faults)
        cited = "; ".join(f"{fault.id}, {fault.source}" if fault.source else fault.id for fault in one.faults)
        limit = f", and spoils {one.missed} rows otherwise" if one.missed else ""
        yield (
            f"{place}. {moment}: your ids are what you get if {clause} [{cited}]; explains {one.explained} of "
            f"{one.wrong} wrong rows{limit}"
        )


def _wrong_pieces(evidence: Evidence) -> Iterator[tuple[Step, int, int, np.ndarray]]:
    """Yield (step, piece's number in it, token's place in the piece, wrong columns `[L, C]`) of every wrong row."""
    for one, mine, wrong in zip(evidence.steps, evidence.got, evidence.wrong(), strict=True):
        begin = 0
        assert one.rows is not None
        for number, piece in enumerate(one.step.pieces):
            for index in np.flatnonzero(wrong[begin : begin + len(piece.tokens)]).tolist():
                yield one.step, number, index, mine[begin + index] != one.rows[begin + index]
            begin += len(piece.tokens)


def _moment(evidence: Evidence) -> str:
    step, number, index, _ = next(_wrong_pieces(evidence))
    events = step.pieces[number].events
    what = next((words for event, words in _MOMENTS.items() if event in events), "of a piece")
    return f"{'first token' if index == 0 else f'token {index + 1}'} {what}"


def _facts(evidence: Evidence) -> Iterator[str]:
    """Say what all wrong rows have in common, whatever the mistake is."""
    config, seen = evidence.world.config, list(_wrong_pieces(evidence))
    columns = np.logical_or.reduce([wrong for *_, wrong in seen])  # [L, C]
    cubes = columns.reshape(len(columns), -1, config.engram_n_heads)
    layers = [layer for layer, any_wrong in zip(config.engram_layer_ids, columns.any(1), strict=True) if any_wrong]
    orders = [order for order, any_wrong in enumerate(cubes.any((0, 2)), start=2) if any_wrong]
    heads = np.flatnonzero(cubes.any((0, 1))).tolist()
    count = f"{columns.sum()} of {columns.size} columns are ever wrong"
    yield f"known: layers {layers}, orders {orders}, heads {heads}: {count}"
    places = Counter(index for _, _, index, _ in seen)
    near = ", ".join(f"{count} at {index}" for index, count in sorted(places.items())[:6])
    yield f"known: positions from the start of their piece: {near}{', ...' if len(places) > 6 else ''}"
    sources = Counter(_source(evidence, *one) for one in seen)
    told = ", ".join(f"{source} {count}" for source, count in sources.most_common())
    yield f"known: the nearest lookback that can be wrong (lowest wrong order minus one) comes from: {told}"
    moments = Counter(event for step, number, _, _ in seen for event in step.pieces[number].events)
    yield "known: what their pieces are: " + ", ".join(f"{event} {count}" for event, count in moments.most_common(8))


def _source(evidence: Evidence, step: Step, number: int, index: int, wrong: np.ndarray) -> str:
    heads = evidence.world.config.engram_n_heads
    back = int(np.flatnonzero(wrong.reshape(len(wrong), -1, heads).any((0, 2)))[0]) + 1
    piece = step.pieces[number]
    if piece.start + index - back < 0:
        return "pad"
    if back <= index:
        return "batch"
    starts = np.array([other.start for other in step.pieces])
    return str(piece_sources(step, starts)[number][back - index - 1])


def diagnose_values(
    path: str, arguments: Mapping[str, Any], got: torch.Tensor, expected: torch.Tensor, *, close: bool = False
) -> str:
    """Name the known mistakes that give the wrong rows of a function's result: of a lookup, a gate, a selection.

    Args:
        path: under which a port offers the function, such as `embedding.lookup`.
        arguments: of the call, by name; tensors on any device.
        got: [T, ..] what the port gave.
        expected: of the same shape; what it should have given.
        close: whether rows agree that differ by a few units of their dtype; else every bit counts.
    """
    from parity.faults import CATALOGUE

    host = {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
    agree = _close_rows if close else _equal_rows
    mine, right = got.cpu(), expected.cpu()
    bad = ~agree(mine, right)
    total, ranked = int(bad.sum()), []
    for fault in CATALOGUE.values():
        if fault.offers != path or fault.id in ("T5", "T6"):  # those two may end the process
            continue
        try:
            theirs = fault.make(**host)
        except (TypeError, ValueError, IndexError):
            continue
        if theirs.shape == mine.shape and (explained := int((agree(mine, theirs) & bad).sum())):
            missed = int((~agree(mine, theirs) & (bad | ~agree(theirs, right))).sum())
            ranked.append((explained / (explained + missed), explained, fault))
    ranked.sort(key=lambda one: -one[0])
    if not total:
        return "no row is wrong"
    if not ranked:
        return f"{total} wrong rows: none of the known mistakes gives one of them"
    return "\n".join(
        f"{place}. your values are what you get if {fault.clause} [{fault.id}"
        f"{', ' + fault.source if fault.source else ''}]; explains {explained} of {total} wrong rows"
        for place, (_, explained, fault) in enumerate(ranked[:_SHOWN], start=1)
    )


def diagnose_lookup(lookup: Callable[..., torch.Tensor], device: torch.device) -> str:
    """Ask a port's lookup for rows of a small table, of every kind of code and scale, and name its mistake."""
    from reference import embedding

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (400, 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (400, 2), generator=generator, dtype=torch.uint8)
    ids = torch.randint(-3, 403, (48, 5), generator=generator, dtype=torch.int32)
    case: dict[str, Any] = {"weight": codes.view(torch.float8_e4m3fn), "scales": scales, "ids": ids}
    return _diagnose_call("embedding.lookup", lookup, case, embedding.lookup(**case), device, close=False)


def diagnose_gate(gate: Callable[..., torch.Tensor], device: torch.device) -> str:
    """Ask a port's gate for a small step, some of it shut with infinities behind, and name what is wrong with it."""
    from reference.gate import engram_gate

    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(24, 5 * 96, generator=generator)
    mask = torch.arange(24) % 4 > 0
    kv[~mask] = float("inf")
    weights = 1 + torch.randn(2, 4, 96, generator=generator).bfloat16()
    hidden = torch.randn(26, 4, 96, generator=generator)  # two rows of padding
    hidden[3, 1] = 0  # a dot of zero
    case: dict[str, Any] = {"hidden": hidden, "kv": kv, "q_weight": weights[0], "k_weight": weights[1]}
    case |= {"token_mask": mask, "eps": 0.1}
    return _diagnose_call("gate.engram_gate", gate, case, engram_gate(**case), device, close=True)


def _diagnose_call(
    path: str,
    port: Callable[..., torch.Tensor],
    case: dict[str, Any],
    expected: torch.Tensor,
    device: torch.device,
    *,
    close: bool,
) -> str:
    there = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in case.items()}
    try:
        got = port(**there)
        said = diagnose_values(path, case, got, expected, close=close)
    except Exception as error:
        return f"on a small case: raised {type(error).__name__}: {error}"
    if said == "no row is wrong":
        return "on a small case no row is wrong: size, strides or the kind of call matter (32-bit offsets, say)"
    return f"on a small case: {said}"


def _equal_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ((left == right) & (left.signbit() == right.signbit()) | (left.isnan() & right.isnan())).flatten(1).all(1)


def _close_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    narrow = left.dtype != torch.float32
    rtol, atol = (2.0**-7, 2.0**-9) if narrow else (1e-5, 1e-6)  # the arithmetic is float32's, the rounding the dtype's
    return torch.isclose(left.float(), right.float(), rtol=rtol, atol=atol, equal_nan=True).flatten(1).all(1)


def describe(mismatch: Mismatch, world: World, repro: str) -> str:
    """Write what is known about a wrong row, down to the command that shows it again.

    Args:
        mismatch: the row.
        world: the configuration it was hashed under.
        repro: the command line of the run.
    """
    piece, index = mismatch.piece, mismatch.index
    position = piece.start + index
    draft = index - (len(piece.tokens) - piece.num_drafts) + 1
    kind = f", draft {draft} of {piece.num_drafts}" if draft > 0 else ""
    return "\n".join(
        [
            f"{mismatch.implementation}: first wrong row in run {mismatch.run!r}, engine {mismatch.engine}, "
            f"step {mismatch.step.index}",
            f"  request {piece.request_id}, position {position}{kind}; its piece is {piece.start}..{piece.end - 1}: "
            f"{', '.join(sorted(piece.events))}",
            *(f"  {line}" for line in _lookbacks(mismatch, world)),
            *(f"  {line}" for line in _columns(mismatch, world)),
            f"  REPRO: {repro}",
        ]
    )


def _lookbacks(mismatch: Mismatch, world: World) -> Iterator[str]:
    piece, index = mismatch.piece, mismatch.index
    row = next(row for row, other in enumerate(mismatch.step.pieces) if other is piece)
    starts = np.array([other.start for other in mismatch.step.pieces])
    sources = piece_sources(mismatch.step, starts)[row]
    for back in range(world.config.lookback + 1):
        at = piece.start + index - back
        if at < 0:
            yield f"look back {back}: before the request begins, so the pad id {world.pad_id}"
            continue
        if back <= index:
            source, token, dead = "the batch", piece.tokens[index - back], piece.token_dead[index - back]
        else:
            column = back - index - 1
            source = f"window column {column}" if sources[column] == "window" else _slot(mismatch, row, at)
            token, dead = piece.stream[at], piece.dead[at]
        what = "dead" if dead else f"compressed {world.token_map[token]}"
        yield f"look back {back}: position {at} from {source}: token {token}, {what}"


def _slot(mismatch: Mismatch, row: int, position: int) -> str:
    if mismatch.step.block_table is None:
        return "nowhere (the runner does not know it)"
    table_row = int(mismatch.step.query_start_loc.diff().nonzero()[row])  # empty requests have no piece
    position += mismatch.piece.offset
    block = int(mismatch.step.block_table[table_row, position // mismatch.block_size])
    return f"slot {block * mismatch.block_size + position % mismatch.block_size} (block {block})"


def _columns(mismatch: Mismatch, world: World) -> Iterator[str]:
    heads = world.config.engram_n_heads
    for layer, layer_id in enumerate(world.config.engram_layer_ids):
        expected, got = mismatch.expected[layer], mismatch.got[layer]
        wrong = expected != got
        orders = [
            f"order {order} {'all heads' if part.all() else f'heads {np.flatnonzero(part).tolist()}'}"
            for order, part in enumerate(wrong.reshape(-1, heads), start=2)
            if part.any()
        ]
        yield f"layer {layer_id}: {wrong.sum()} of {wrong.size} columns wrong {', '.join(orders)}".rstrip()
        if orders:
            yield f"  expected {expected.tolist()}"
            yield f"  got      {got.tolist()}"
