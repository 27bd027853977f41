"""The metamorphic laws of recorded traces: what a run may undergo without any live row becoming another one.

Each function gives a new trace and leaves the old one as it is. What comes out is a trace like any other: it can be
written, checked, replayed, and changed again. All keep what is not theirs to change: bindings, slot copies, events,
and the extras of steps and pieces. Of a stream, `split` keeps the last D tokens and counts the others into the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise, zip_longest

import numpy as np
import torch

from parity.player import world_of
from serving import parts
from serving.rng import Rng
from serving.step import Piece, Step
from serving.trace import Trace, TracedStep

Pair = tuple[TracedStep | None, TracedStep | None]


def split(trace: Trace, rng: Rng) -> Trace:
    """Run every step of two live tokens or more as two microbatches, cut at a drawn token.

    All tokens of a step write before any is read; those of its halves do not. So the rows are put in a drawn order in
    which nobody stands before one whose slots of this step it reads. Where slots hold what the first half fed, the draw
    also says whether the second half's windows know it.

    Args:
        trace: with rows.
        rng: of the orders and cuts.

    Raises:
        ValueError: no rows, or a step whose requests read one another's slots in a ring.
    """
    _check_rows(trace)
    return _with_steps(trace, chain.from_iterable(_halves(one, trace.lookback, rng) for one in trace.steps))


def reorder(trace: Trace, rng: Rng) -> Trace:
    """Let the rows of every batch, padded ones among them, stand in a drawn order.

    Args:
        trace: with rows.
        rng: of the orders.

    Raises:
        ValueError: no rows.
    """
    _check_rows(trace)
    return _with_steps(trace, (_in_order(one, rng.permutation(_requests(one.step))) for one in trace.steps))


def place(trace: Trace, rng: Rng) -> Trace:
    """Give every block a drawn number, in a pool that may be larger: the same one for as long as a KV cache is bound.

    The null block of a sliding window is a block like the others here. Stateless engines have none and stay.

    Args:
        trace: with rows.
        rng: of the numbers.

    Raises:
        ValueError: no rows.
    """
    _check_rows(trace)
    numbers: dict[tuple[int, int], list[int]] = {}
    steps = []
    for one in trace.steps:
        drawn = numbers.setdefault((one.engine, one.step.binding), [])
        drawn += [] if drawn else rng.permutation(one.blocks + rng.below(4))
        steps.append(_placed(one, drawn[: one.blocks], len(drawn)) if one.block_size else one)
    return _with_steps(trace, steps)


def pad(trace: Trace, rng: Rng) -> Trace:
    """Add tokens that belong to nobody behind every step, and rows without tokens at drawn places of its batch.

    Their ids are ids of the run, their slots such as live tokens wrote before: whoever writes them destroys a history.

    Args:
        trace: with rows.
        rng: of the padding.

    Raises:
        ValueError: no rows.
    """
    _check_rows(trace)
    ids, used, steps = _ids(trace), dict[tuple[int, int], list[int]](), []
    for one in trace.steps:
        slots = used.setdefault((one.engine, one.step.binding), [])
        if one.step.slot_mapping is not None:
            slots += [slot for slot in one.step.slot_mapping[: one.step.num_tokens].tolist() if slot >= 0]
        requests, rows = _requests(one.step), 1 + rng.below(3)
        padded = replace(one, step=_stuffed(one, ids, slots, rng, tokens=1 + rng.below(8), rows=rows))
        order = list(range(requests))
        for row in range(requests, requests + rows):
            order.insert(rng.below(len(order) + 1), row)
        steps.append(_in_order(padded, order))
    return _with_steps(trace, steps)


def shift(trace: Trace, rng: Rng) -> Trace:
    """Let steps come later: dummy steps, and those of requests that have nothing to do with the run, come between.

    Every KV cache gets one such stranger, in blocks of its own behind the others. The engines of a run, which share
    nothing, take turns in a drawn order.

    Args:
        trace: with rows.
        rng: of the strangers and the turns.

    Raises:
        ValueError: no rows. Refused: a trace that `world_of` refuses.
    """

    def between(left: Sequence[TracedStep], right: Sequence[TracedStep]) -> Iterator[Pair]:
        own, other = list(left), list(right)
        while own or other:
            if own and rng.chance(1, 4):
                yield _dummy(own[0]), None
            if own and (not other or rng.chance(2, 3)):
                yield own.pop(0), None
            else:
                yield None, other.pop(0)

    _check_rows(trace)
    queues = _shared(trace, _strangers(trace, rng), between)
    steps = []
    while queues:
        queue = rng.pick(queues)
        steps.append(queue.pop(0))
        queues = [one for one in queues if one]
    return _with_steps(trace, steps)


def company(trace: Trace, other: Trace) -> Trace:
    """Put two runs of one model into the same batches, step by step; the other's blocks and requests count on.

    Engine k of the one shares its slots with engine k of the other, from one binding to the next; where one of the two
    has no step left in a binding, the other goes on alone.

    Args:
        trace, other: with rows, of equal configuration and map; engines of the same number with equal block sizes.

    Raises:
        ValueError: no rows, another configuration or map, or another block size of an engine.
    """
    for run in (trace, other):
        _check_rows(run)
    for name in ("config", "token_map_sha256"):
        if getattr(trace, name) != getattr(other, name):
            raise ValueError(f"{name}: got {getattr(other, name)!r}, expected that of the first run")
    queues = _shared(trace, other, zip_longest)
    engines = [{"first": one, "second": two} for one, two in zip_longest(trace.engines, other.engines)]
    steps = (one for turn in zip_longest(*queues) for one in turn if one is not None)
    named = replace(trace, name=f"{trace.name}, {other.name}", engines=engines)
    return _with_steps(named, steps)


METAMORPHOSES: dict[str, Callable[[Trace, Rng], Trace]] = {
    "split": split,
    "company": lambda trace, rng: company(trace, trace),
    "order": reorder,
    "placement": place,
    "padding": pad,
    "time-shift": shift,
}


def _halves(one: TracedStep, depth: int, rng: Rng) -> list[TracedStep]:
    if one.step.num_tokens < 2:
        return [one]
    one = _in_order(one, _writers_first(one, rng))
    step = replace(one.step, pieces=tuple(_cut_off(piece, depth) for piece in one.step.pieces))
    at, slots = 1 + rng.below(step.num_tokens - 1), step.slot_mapping
    knows_fed = slots is None or bool((slots[:at] < 0).any()) or rng.chance(1, 2)
    first, second = parts.split(step, at, knows_fed=knows_fed)
    assert one.rows is not None
    return [replace(one, step=first, rows=one.rows[:at]), replace(one, step=second, rows=one.rows[at:])]


def _cut_off(piece: Piece, depth: int) -> Piece:
    """Keep of a stream what rows depend on, so that a piece of a file can be cut like one of an engine."""
    first, true = max(0, piece.start - depth), len(piece.tokens) - piece.num_drafts
    return replace(
        piece,
        stream=np.concatenate([piece.stream[first : piece.start], piece.tokens[:true]]),
        dead=np.concatenate([piece.dead[first : piece.start], piece.token_dead[:true]]),
        start=piece.start - first,
        offset=piece.offset + first,
    )


def _writers_first(one: TracedStep, rng: Rng) -> list[int]:
    """Draw an order of rows in which each stands behind those that write, in this step, what it reads."""
    waits, order = _waits_for(one), list[int]()
    left = list(range(_requests(one.step)))
    while left:
        free = [row for row in left if not waits[row] & {*left}]
        if not free:
            raise ValueError(f"step {one.step.index}: got rows {left} that read one another's slots, expected no ring")
        order.append(rng.pick(free))
        left.remove(order[-1])
    return order


def _waits_for(one: TracedStep) -> list[set[int]]:
    step, size, bounds = one.step, one.block_size, one.step.query_start_loc.tolist()
    waits: list[set[int]] = [set() for _ in bounds[1:]]
    if step.slot_mapping is None or step.block_table is None:
        return waits
    slots, writers = step.slot_mapping.tolist(), dict[int, set[int]]()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        for slot in slots[begin:end]:
            writers.setdefault(slot, set()).add(row)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        for column, token in enumerate(step.lookback_token_ids[row].tolist()):
            if begin < end and token < 0 and (q := int(step.positions[begin]) - 1 - column) >= 0:
                slot = int(step.block_table[row, q // size]) * size + q % size
                waits[row] |= writers.get(slot, set()) - {row}
    return waits


def _in_order(one: TracedStep, order: Sequence[int]) -> TracedStep:
    """Let rows stand in another order with all that is theirs; the tail that belongs to nobody stays."""
    step, live = one.step, one.step.num_tokens
    rows, starts = torch.tensor(order, dtype=torch.int64), step.query_start_loc
    lengths = starts.long().diff()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[rows].cumsum(0)])
    tokens = torch.arange(len(step.input_ids))
    tokens[:live] += torch.repeat_interleave(starts.long()[:-1][rows] - ends[:-1], lengths[rows])
    filled = iter(step.pieces)
    pieces = [next(filled) if length else None for length in lengths.tolist()]
    table = step.block_table
    if table is not None:
        table = torch.cat([_taller(table, len(order))[rows], table[len(order) :]])
    assert one.rows is not None
    moved = replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        query_start_loc=ends.to(starts.dtype),
        dead_mask=step.dead_mask[tokens],
        lookback_token_ids=step.lookback_token_ids[rows],
        lookback_dead_mask=step.lookback_dead_mask[rows],
        slot_mapping=None if step.slot_mapping is None else step.slot_mapping[tokens],
        block_table=table,
        pieces=tuple(piece for row in order if (piece := pieces[row]) is not None),
    )
    return replace(one, step=moved, rows=one.rows[tokens[:live].numpy()])


def _placed(one: TracedStep, numbers: Sequence[int], blocks: int) -> TracedStep:
    """Give block b the number `numbers[b]` in a pool of `blocks`; what is no block's stays, as junk of the padding."""
    size, step = one.block_size, one.step
    if step.slot_mapping is None or step.block_table is None:
        return replace(one, blocks=blocks)
    new = torch.tensor(numbers, dtype=torch.int64)  # [blocks]
    slots = (new[:, None] * size + torch.arange(size)).flatten()
    moved = replace(
        step,
        slot_mapping=_looked_up(step.slot_mapping, slots),
        block_table=_looked_up(step.block_table, new),
        slot_copies=tuple((int(slots[source]), int(slots[target])) for source, target in step.slot_copies),
    )
    return replace(one, step=moved, blocks=blocks)


def _looked_up(values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    inside = (values >= 0) & (values < len(new))
    found = torch.where(inside, new[torch.where(inside, values.long(), 0)], values.long())
    return found if found.numel() and int(found.max()) >= 2**31 else found.to(values.dtype)


def _stuffed(one: TracedStep, ids: Sequence[int], slots: Sequence[int], rng: Rng, *, tokens: int, rows: int) -> Step:
    """Add stale tokens and rows at the end of a step."""

    def more(tensor: torch.Tensor, count: int, draw: Callable[[], int]) -> torch.Tensor:
        fresh = [[draw() for _ in range(tensor.shape[1:].numel())] for _ in range(count)]
        return torch.cat([tensor, torch.tensor(fresh).to(tensor.dtype).reshape(count, *tensor.shape[1:])])

    step, requests = one.step, _requests(one.step)
    table, mapping = step.block_table, step.slot_mapping
    starts = step.query_start_loc
    return replace(
        step,
        input_ids=more(step.input_ids, tokens, lambda: rng.pick(ids)),
        positions=more(step.positions, tokens, lambda: rng.below(1 << 10)),
        query_start_loc=torch.cat([starts, starts[-1:].expand(rows)]),
        dead_mask=more(step.dead_mask, tokens, lambda: rng.below(2)),
        lookback_token_ids=more(step.lookback_token_ids, rows, lambda: rng.pick((-1, rng.pick(ids)))),
        lookback_dead_mask=more(step.lookback_dead_mask, rows, lambda: rng.below(2)),
        slot_mapping=None if mapping is None else more(mapping, tokens, lambda: rng.pick(slots) if slots else -1),
        block_table=None
        if table is None
        else more(_taller(table, requests)[:requests], rows, lambda: rng.below(max(1, one.blocks))),
    )


def _shared(
    trace: Trace, other: Trace, meet: Callable[[Sequence[TracedStep], Sequence[TracedStep]], Iterable[Pair]]
) -> list[list[TracedStep]]:
    """Let two runs share their engines' slots: the steps by engine; `meet` pairs those of one binding."""
    left, right = _by_engine(trace), _by_engine(other)
    queues = []
    for engine in sorted({*left, *right}):
        mine, theirs = left.get(engine, []), right.get(engine, [])
        if len(sizes := {one.block_size for one in chain(*mine, *theirs)}) > 1:
            raise ValueError(f"block_size: got {sorted(sizes)} for engine {engine}, expected one size")
        pieces = [piece for one in chain(*mine) for piece in one.step.pieces]
        past = tuple(1 + max((getattr(p, name) for p in pieces), default=-1) for name in ("request_id", "handle"))
        queue: list[TracedStep] = []
        for binding, (own, strange) in enumerate(zip_longest(mine, theirs, fillvalue=())):
            before, added = (run[0].blocks if run else 0 for run in (own, strange))
            for one, two in meet(own, strange):
                one = one and _placed(one, range(before), before + added)
                two = two and _placed(_counted_on(two, past), range(before, before + added), before + added)
                both = _together(one, two) if one and two else one or two
                assert both is not None
                queue.append(replace(both, step=replace(both.step, binding=binding)))
        queues.append(queue)
    return queues


def _by_engine(trace: Trace) -> dict[int, list[list[TracedStep]]]:
    """Give each engine's steps, a list a binding."""
    found: dict[int, list[TracedStep]] = {}
    for one in trace.steps:
        found.setdefault(one.engine, []).append(one)
    return {
        engine: [list(run) for _, run in groupby(steps, key=lambda one: one.step.binding)]
        for engine, steps in found.items()
    }


def _counted_on(one: TracedStep, past: tuple[int, ...]) -> TracedStep:
    requests, handles = past
    pieces = (
        replace(piece, request_id=piece.request_id + requests, handle=piece.handle + handles * (piece.handle >= 0))
        for piece in one.step.pieces
    )
    return replace(one, step=replace(one.step, pieces=tuple(pieces)))


def _together(one: TracedStep, two: TracedStep) -> TracedStep:
    """Merge two steps whose blocks are apart: live tokens of both, then the tails of both; rows of both."""
    a, b = one.step, two.step

    def tokens(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.cat([left[: a.num_tokens], right[: b.num_tokens], left[a.num_tokens :], right[b.num_tokens :]])

    table = mapping = None
    if a.slot_mapping is not None and b.slot_mapping is not None:
        mapping = tokens(a.slot_mapping, b.slot_mapping)
    if a.block_table is not None and b.block_table is not None:
        width = max(a.block_table.shape[1], b.block_table.shape[1])
        tables = (_taller(a.block_table, _requests(a))[: _requests(a)], b.block_table)
        table = torch.cat([_wider(half, width) for half in tables])
    assert one.rows is not None
    assert two.rows is not None
    merged = replace(
        a,
        input_ids=tokens(a.input_ids, b.input_ids),
        positions=tokens(a.positions, b.positions),
        query_start_loc=torch.cat([a.query_start_loc, b.query_start_loc[1:] + a.num_tokens]),
        dead_mask=tokens(a.dead_mask, b.dead_mask),
        lookback_token_ids=torch.cat([a.lookback_token_ids, b.lookback_token_ids]),
        lookback_dead_mask=torch.cat([a.lookback_dead_mask, b.lookback_dead_mask]),
        slot_mapping=mapping,
        block_table=table,
        pieces=a.pieces + b.pieces,
        num_tokens=a.num_tokens + b.num_tokens,
        slot_copies=a.slot_copies + b.slot_copies,
        events=tuple(dict.fromkeys(a.events + b.events)),
    )
    return replace(one, step=merged, rows=np.concatenate([one.rows, two.rows]))


def _strangers(trace: Trace, rng: Rng) -> Trace:
    """Give each binding of each engine one request, in chunks, in a run of its own."""
    world, ids = world_of(trace), _ids(trace)
    steps = []
    for runs in _by_engine(trace).values():
        for run in runs:
            size, length = run[0].block_size, 2 + rng.below(8 * trace.lookback)
            stream = np.array([rng.pick(ids) for _ in range(length)], np.int64)
            dead = np.array([rng.chance(1, 6) for _ in range(length)])
            rows, blocks = world.alone(stream, dead), -(-length // size) if size else 1
            begin = 0
            while begin < length:
                end = min(length, begin + 1 + rng.below(4))
                step = _chunk(stream, dead, begin, end, size, trace.lookback, known=not size or rng.chance(1, 2))
                step = replace(step, binding=run[0].step.binding)
                steps.append(TracedStep(run[0].engine, size, blocks, step, rows[begin:end]))
                begin = end
    return replace(trace, steps=steps)


def _chunk(stream: np.ndarray, dead: np.ndarray, begin: int, end: int, size: int, depth: int, *, known: bool) -> Step:
    """Feed positions begin .. end - 1 of a request that lies in blocks 0, 1, ..., all its tokens known before."""
    before = np.arange(begin - 1, begin - 1 - depth, -1)  # [D]
    told = (before >= 0) & known
    positions = torch.arange(begin, end)
    sampled = int(end == len(stream))
    piece = Piece(0, stream, dead, begin, stream[begin:end], dead[begin:end], 0, sampled, frozenset(), handle=0)
    return Step(
        index=0,
        input_ids=torch.from_numpy(stream[begin:end]),
        positions=positions,
        query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        dead_mask=torch.from_numpy(dead[begin:end]),
        lookback_token_ids=torch.from_numpy(np.where(told, stream[before.clip(0)], -1))[None],
        lookback_dead_mask=torch.from_numpy(told & dead[before.clip(0)])[None],
        slot_mapping=positions.clone() if size else None,
        block_table=torch.arange(-(-len(stream) // size), dtype=torch.int32)[None] if size else None,
        pieces=(piece,),
        num_tokens=end - begin,
    )


def _dummy(one: TracedStep) -> TracedStep:
    """Give a step of which nothing is alive: all that it holds is padding."""
    starts = torch.zeros_like(one.step.query_start_loc)
    step = replace(one.step, query_start_loc=starts, pieces=(), num_tokens=0, slot_copies=(), events=("dummy step",))
    assert one.rows is not None
    return replace(one, step=step, rows=one.rows[:0])


def _requests(step: Step) -> int:
    return len(step.query_start_loc) - 1


def _taller(table: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([table, table.new_zeros(max(0, rows - len(table)), table.shape[1])])


def _wider(table: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat([table, table.new_zeros(len(table), width - table.shape[1])], 1)


def _ids(trace: Trace) -> list[int]:
    live = [one.step.input_ids[: one.step.num_tokens].long() for one in trace.steps]
    return torch.cat(live).unique().tolist() or [trace.config["engram_pad_token_id"]]


def _check_rows(trace: Trace) -> None:
    if any(one.rows is None for one in trace.steps):
        raise ValueError(f"rows: missing in trace {trace.name!r}, expected a trace with its expected rows")


def _with_steps(trace: Trace, steps: Iterable[TracedStep]) -> Trace:
    numbered = [replace(one, step=replace(one.step, index=number)) for number, one in enumerate(steps)]
    return replace(trace, steps=numbered)
