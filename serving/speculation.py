"""Drafts: where they come from and how many of them the model keeps."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serving.checks import check_ids

Propose = Callable[[int, np.ndarray], Sequence[int]]


class Drafter:
    """Ask the draft model for the tokens that may follow a stream.

    Args:
        propose: (request id, true stream so far [length] int64, read only) -> at most `most` draft ids;
            None without drafts.
        most: k, drafts of one request in one step.
        largest: the largest legal token id.

    Raises:
        ValueError: most > 0 without a draft model.
    """

    def __init__(self, propose: Propose | None, most: int, largest: int) -> None:
        if most and propose is None:
            raise ValueError(f"propose: got None with num_drafts {most}, expected a callable")
        self._propose = propose
        self._most = most
        self._largest = largest

    def draft(self, request_id: int, stream: np.ndarray, room: int) -> np.ndarray | None:
        """Return the drafts [n] int64, n <= min(k, room), or None where there are none.

        Raises:
            ValueError: the draft model gave more than k ids, or an id out of range.
        """
        if self._propose is None or self._most == 0 or room <= 0:
            return None
        drafts = check_ids("drafts", self._propose(request_id, stream), self._largest)
        if len(drafts) > self._most:
            raise ValueError(f"drafts: got {len(drafts)} of request {request_id}, expected at most {self._most}")
        return drafts[:room] if len(drafts) else None


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Count the leading drafts that the model agrees with: greedy verification.

    sampled[i] is what the model says after the first i drafts; draft i stands if draft j = sampled[j] for all j <= i.

    Args:
        drafts: [k] ids that were fed.
        sampled: [k + 1] ids that the model gave.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return accepted


def check_sampled(expected: Mapping[int, int], sampled: Mapping[int, Sequence[int]], largest: int) -> list[list[int]]:
    """Return the ids that the model gave, a list a request.

    Args:
        expected: request id -> how many ids it must give.
        sampled: request id -> what it gave; may lack those that give nothing, and hold others.
        largest: the largest legal token id.

    Raises:
        TypeError, ValueError: another number of ids than expected, or an id outside [0, largest].
    """
    given = [sampled.get(request_id, ()) for request_id in expected]
    for (request_id, count), ids in zip(expected.items(), given, strict=True):
        if len(ids) != count:
            raise ValueError(f"sampled[{request_id}]: got {len(ids)} ids, expected {count}")
    flat = [one for ids in given for one in ids]
    # One check of all ids; only where it fails are they looked at one by one, to name the request.
    if not all(type(one) is int for one in flat) or (flat and not 0 <= min(flat) <= max(flat) <= largest):
        named = zip(expected, given, strict=True)
        return [
            check_ids(f"sampled[{request_id}]", ids, largest).tolist() if len(ids) else [] for request_id, ids in named
        ]
    return [list(ids) for ids in given]
