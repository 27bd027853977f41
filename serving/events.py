"""Name what a piece exercises."""

from serving.block_pool import BlockPool
from serving.scheduler import Cut


def events_of(cut: Cut, *, pool: BlockPool, block_size: int, lookback: int, padded: bool) -> frozenset[str]:
    """Return the keys of `step.EVENT_MEANINGS` that hold for a piece.

    Args:
        cut: the piece as planned, its blocks already given.
        pool: knows which blocks had an owner before.
        block_size: B.
        lookback: D, positions before the piece that its window reaches.
        padded: whether the step has padding.
    """
    request, start, end = cut.request, cut.start, cut.start + cut.count
    names = ["padding"] if padded else []
    if pool.owners(request.blocks[start // block_size]) > 1:
        names.append("block reuse")
    if start >= request.prompt_length:
        names += _decode_events(cut)
    else:
        names += _prompt_events(cut, block_size)
    if request.dead_end > start - lookback and request.dead[max(0, start - lookback) : end].any():
        names.append("dead span")
        if "chunk" in names and (request.dead[start] or request.dead[end - 1]):
            names.append("dead at chunk edge")
    return frozenset(names)


def _decode_events(cut: Cut) -> list[str]:
    request = cut.request
    names = ["decode"] if cut.drafts is None else ["decode", "verify"]
    if request.accepted < request.drafted:
        names.append("after rejection")
        if request.accepted == 0:
            names.append("all rejected")
    return names


def _prompt_events(cut: Cut, block_size: int) -> list[str]:
    request, start = cut.request, cut.start
    first, last = start == request.entry, start + cut.count == request.prompt_length
    names = []
    if not (first and last):
        names.append("chunk")
    elif start == 0:
        names.append("prompt whole")
    if first and request.imported:
        names += ["import", "import at block edge"] if start % block_size == 0 else ["import"]
    elif first and start > 0:
        names.append("prefix hit")
        if request.hit_in_step:
            names.append("same-step hit")
        if start == request.prompt_length - 1:
            names.append("one token left")
    return names
