"""Which parts of the main job are run, on which implementations, and who is skipped."""

from __future__ import annotations

from collections.abc import Sequence

from parity.protocol import Implementation

# What a part judges, under the name that an implementation must offer.
PARTS = {
    "hash": "hash_state.HashState",
    "lookup": "embedding.lookup",
    "gate": "gate.engram_gate",
    "layer": "engram.Engram",
}


def parse_parts(text: str) -> list[str]:
    """Read `--what`: names of PARTS with commas between; they are run in the order of PARTS.

    Raises:
        ValueError: a name that is not one of them.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(names) - {*PARTS}):
        raise ValueError(f"what: got {unknown}, expected some of {', '.join(PARTS)}")
    return [part for part in PARTS if part in names]


def choose(
    parts: Sequence[str], implementations: Sequence[Implementation]
) -> tuple[dict[str, list[Implementation]], list[str]]:
    """Give each part those who offer it, and a line for each implementation that does not.

    A part that only the reference offers is left out, unless the reference alone is judged.

    Args:
        parts: names of PARTS.
        implementations: the reference first.

    Raises:
        ValueError: an implementation offers none of the parts.
    """
    chosen: dict[str, list[Implementation]] = {}
    skipped = []
    for part in parts:
        offering = [one for one in implementations if one.find(PARTS[part])]
        skipped += [f"{one.name}: {part} not offered, skipped" for one in implementations if one not in offering]
        if len(offering) > 1 or len(implementations) == 1:
            chosen[part] = offering
    for one in implementations[1:] or implementations:
        if not any(one in offering for offering in chosen.values()):
            wanted = ", ".join(PARTS[part] for part in parts)
            raise ValueError(f"implementation: got {one.name}, which offers none of what is chosen: {wanted}")
    return chosen, skipped
