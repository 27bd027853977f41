"""One forward call as tensors, and who owns which part of it."""

from dataclasses import dataclass

import numpy as np
import torch

EVENT_MEANINGS: dict[str, str] = {
    "prompt whole": "the whole prompt in one piece",
    "chunk": "a piece of a prompt that the token budget cut",
    "decode": "the newest sampled token is fed back",
    "verify": "drafts follow the newest token",
    "after rejection": "first piece after a verify in which at least one draft was rejected",
    "all rejected": "first piece after a verify in which no draft was accepted",
    "prefix hit": "first piece of a request that starts on cached blocks",
    "same-step hit": "a hit block gets its last token from another piece of this very step",
    "one token left": "a prefix hit that leaves exactly one prompt token to compute",
    "import": "first piece of a request whose leading KV came from elsewhere",
    "import at block edge": "the import ends where a block ends",
    "dead span": "a token of the piece, or one that its lookback window reaches, is dead",
    "dead at chunk edge": "the first or last token of a cut chunk is dead",
    "block reuse": "the piece starts on a block that another request owned before",
    "padding": "tokens or requests of this step are padding",
    "several drafts": "a verify of at least two drafts",
    "ragged verify": "another request of this step verifies another number of drafts",
    "draft runs ahead": "a draft model feeds one token a step to the slots that the verify will write again",
    "host lags": "the window lacks a token that has not reached the host",
    "host lags by two": "the window lacks a token that two updates have not brought to the host",
    "starved": "first piece after a step in which the running request got no token",
    "reordered": "the piece stands before one that it stood behind in the step before",
    "budget change": "the step has another token budget than the one before",
    "packed documents": "a document that begins in the step and the sequence in which the one before it does",
    "several images": "two dead spans or more stand before the end of the piece",
    "long position": "the positions are past 2^31",
    "model's limit": "the piece feeds the last position that a request of the model's length feeds",
    "preempted, recompute": "first piece of a request that lost its blocks and computes all anew",
    "preempted, reload": "first piece of a request that lost its blocks and gets its KV back, without slots",
    "off-load reload": "first piece of a request that hits blocks which only the host had: their slots are lost",
    "fork": "first piece of a request that shares its computed blocks with the one it was forked from",
    "copy on write": "first piece of a fork whose last block was copied",
    "beam reorder": "first piece of a beam that goes on from another one's history",
    "after abort": "the piece starts on a block that an aborted request held before",
    "id reuse": "first piece of a request that has the handle of one that is gone",
    "sleep and wake": "first piece after the KV cache was lost and another one bound",
    "sliding window": "the table shows the null block for positions behind the window",
    "window edge": "the lookback reaches the oldest block that the window has left",
    "hybrid groups": "another group of layers takes blocks of another size from the same pool",
    "one-token blocks": "a block has one slot",
    "large blocks": "a block has 256 slots",
    "microbatch": "the step runs in two parts",
    "microbatch inside a request": "the part of a piece that was cut off from what stands before it",
    "dummy step": "a step without a request, for a rank that must take part",
}
EVENTS: tuple[str, ...] = tuple(EVENT_MEANINGS)


@dataclass(frozen=True, eq=False)
class Piece:
    """Name the part of a step that belongs to one request.

    Attributes:
        request_id: unique for ever in an engine.
        stream: [length] int64, read only: prompt, then accepted tokens; a view that is appended to, never rewritten.
        dead: [length] bool, the flags of the same positions.
        start: position of the piece's first token; stream[:start] is true and known.
        tokens: [n] int64, the ids fed at positions start, start + 1, ...; the drafts are the last num_drafts of them.
        token_dead: [n] bool.
        num_drafts: how many of the tokens are drafts.
        num_sampled: how many tokens the model is to return: 0 for an unfinished prompt, else 1 + num_drafts.
        events: what this piece exercises, keys of EVENT_MEANINGS.
        handle: what the engine's user calls the request: not that of another living one, but maybe that of one before.
        offset: positions before the stream, whose ids nobody kept; the tensors' positions have it added.
    """

    request_id: int
    stream: np.ndarray
    dead: np.ndarray
    start: int
    tokens: np.ndarray
    token_dead: np.ndarray
    num_drafts: int
    num_sampled: int
    events: frozenset[str]
    handle: int = -1
    offset: int = 0

    @property
    def end(self) -> int:
        """The position behind the piece's last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class Step:
    """Hold the tensors of one forward call; they are the step's own and stay as they are.

    T tokens and R requests both include padding; D columns of lookback; B slots a block.

    Attributes:
        index: steps of this engine before this one.
        input_ids: [T] int32 or int64. Past num_tokens stands stale data, as in every per-token tensor.
        positions: [T] int64.
        query_start_loc: [R+1] int32, repeats its last boundary for padded requests.
        dead_mask: [T] bool.
        lookback_token_ids: [R, D] like input_ids; column c is position start - 1 - c; -1: the runner does not know.
        lookback_dead_mask: [R, D] bool, False where the id is -1.
        slot_mapping: [T] int64, block * B + offset; None in the stateless way.
        block_table: [R, blocks] int32, 0 where a request has no block; None in the stateless way.
        pieces: one a request with tokens, in batch order; padded requests have none.
        num_tokens: live tokens, query_start_loc[-1].
        slot_copies: (source, target) slots of forked blocks: before the step's own writes, whoever keeps state by slot
            copies it, all sources read before any target is written.
        binding: KV caches that were bound before the present one; where it changes, all slots are lost.
        events: what the step as a whole exercises.
    """

    index: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    dead_mask: torch.Tensor
    lookback_token_ids: torch.Tensor
    lookback_dead_mask: torch.Tensor
    slot_mapping: torch.Tensor | None
    block_table: torch.Tensor | None
    pieces: tuple[Piece, ...]
    num_tokens: int
    slot_copies: tuple[tuple[int, int], ...] = ()
    binding: int = 0
    events: tuple[str, ...] = ()

    def arguments(self) -> dict[str, torch.Tensor | None]:
        """Return the eight tensors under the parameter names of a forward call."""
        return {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "query_start_loc": self.query_start_loc,
            "dead_mask": self.dead_mask,
            "lookback_token_ids": self.lookback_token_ids,
            "lookback_dead_mask": self.lookback_dead_mask,
            "slot_mapping": self.slot_mapping,
            "block_table": self.block_table,
        }
