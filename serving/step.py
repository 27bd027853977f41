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
