"""Drafts: where they come from and how many of them the model keeps."""

from collections.abc import Callable, Sequence

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


def check_sampled(request_id: int, sampled: Sequence[int], expected: int, largest: int) -> list[int]:
    """Return the ids that the model gave for one piece as a list.

    Raises:
        TypeError, ValueError: another number of ids than `expected`, or an id outside [0, largest].
    """
    if len(sampled) != expected:
        raise ValueError(f"sampled[{request_id}]: got {len(sampled)} ids, expected {expected}")
    return check_ids(f"sampled[{request_id}]", sampled, largest).tolist() if expected else []
