"""Mistakes in the layer's module: the rows that are staged ahead of it."""

from __future__ import annotations

from typing import Any

import torch

from parity.faults.fault import plant
from reference.engram import Engram

_MODULE = "engram.Engram"


@plant("H6", "two microbatches share one staging buffer", offers=_MODULE)
class MicrobatchesShareABuffer(Engram):
    """The second microbatch is prepared while the first still waits, into the same rows.

    Source: vllm#56476. Law: staging.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.staged_rows = (self.staged_rows[0],) * len(self.staged_rows)


@plant("T13", "the staging buffer is smaller than the largest step", offers=_MODULE)
class BufferTooSmall(Engram):
    """The buffer is made for the tokens of a decode, the graph is captured for more, and what is past it is stale.

    Source: vllm-ascend#16423. Law: staging.
    """

    def prepare_embeddings(self, hash_ids: torch.Tensor, *, microbatch: int = 0, stream: Any = None) -> None:
        """Fill half of the buffer at most."""
        room = max(self.max_tokens // 2, 1)
        super().prepare_embeddings(hash_ids[:room], microbatch=microbatch, stream=stream)
        self._prepared[microbatch] = len(hash_ids)


@plant("T18", "a step is gated by the rows of the step before it", offers=_MODULE)
class RowsOfTheStepBefore(Engram):
    """The layer does not wait for the lookup on the side stream, and finds what was staged before.

    Law: staging.
    """

    def prepare_embeddings(self, hash_ids: torch.Tensor, *, microbatch: int = 0, stream: Any = None) -> None:
        """Let the rows arrive one step late."""
        late = vars(self).setdefault("_late", {})
        before, late[microbatch] = late.get(microbatch, hash_ids), hash_ids.clone()
        rows = before[torch.arange(len(hash_ids)) % max(len(before), 1)] if len(before) else hash_ids
        super().prepare_embeddings(rows, microbatch=microbatch, stream=stream)


@plant("H29b", "a captured lookup replays the ids that it was captured with", offers=_MODULE)
class LookupReplaysItsIds(Engram):
    """The ids are copied to the host when the graph is captured; every replay of that size looks the same rows up.

    Law: staging.
    """

    def prepare_embeddings(self, hash_ids: torch.Tensor, *, microbatch: int = 0, stream: Any = None) -> None:
        """Look up what the first step of this size asked for."""
        graphs = vars(self).setdefault("_graphs", {})
        captured = graphs.setdefault((microbatch, len(hash_ids)), hash_ids.clone())
        super().prepare_embeddings(captured, microbatch=microbatch, stream=stream)
