"""A second bookkeeper that sees only what is public, and checks every step against the definition."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.engine import EngineConfig
from serving.runner import Policy
from serving.step import Piece, Step

Flagged = tuple[int, bool]


@dataclass
class Book:
    """What the witness knows of a request; `here` are positions that this engine's imports brought."""

    stream: list[Flagged]
    prompt: int
    most: int
    imported: int
    started: bool = False
    entry: int = 0
    computed: int = 0
    arrived: int = 0
    verdict: tuple[int, int] = (0, 0)
    row: list[int] = field(default_factory=list)
    last_step: int = -1


class Witness:
    """Follow an engine and compare.

    Two memories are simulated slot by slot. `kv` holds the identity of the whole prefix that ends in the slot's token;
    imports write it. `written` is the same, but only steps write it: what a per-slot state beside the KV would hold.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.books: dict[int, Book] = {}
        self.live: dict[int, Book] = {}
        self.kv: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.holders: dict[int, set[int]] = {}
        self.step: Step | None = None
        self.seen: set[str] = set()
        self.lookbacks = {"window": 0, "slot": 0}

    @property
    def decoding(self) -> list[int]:
        """Live requests whose prompt is computed."""
        return [i for i, book in self.live.items() if book.computed >= book.prompt]

    def added(self, request_id: int, tokens: np.ndarray, dead: np.ndarray, new: int, imported: int) -> None:
        """A request was added."""
        assert request_id not in self.books
        stream = [(int(t), bool(d)) for t, d in zip(tokens, dead, strict=True)]
        book = Book(stream, len(stream), len(stream) + new, imported)
        self.books[request_id] = self.live[request_id] = book

    def left(self, request_id: int) -> None:
        """A request was exported."""
        del self.live[request_id]

    def stepped(self, step: Step, budget: int | None) -> None:
        """A step was planned: check all of it, then let it write."""
        self.step = step
        most = self.config.token_budget if budget is None else min(budget, self.config.token_budget)
        bounds = step.query_start_loc.tolist()
        assert 0 < step.num_tokens <= most
        assert bounds[0] == 0
        assert bounds[len(step.pieces) :] == [step.num_tokens] * (len(bounds) - len(step.pieces))
        assert len({piece.request_id for piece in step.pieces}) == len(step.pieces)
        for row, piece in enumerate(step.pieces):
            self._check_piece(step, row, piece, bounds[row], bounds[row + 1])
        assert sum(book.started for book in self.live.values()) <= self.config.max_requests
        self._check_shapes(step)
        if step.slot_mapping is not None:
            self._check_memory(step, bounds)
        for row, piece in enumerate(step.pieces):
            self._check_window(step, row, piece)
            facts = self._events(step, row, piece, bounds)
            told = {name: name in piece.events for name in facts}
            assert told == facts, (piece.start, piece.tokens)
            self.seen |= piece.events
        for piece in step.pieces:
            for block in self.live[piece.request_id].row:
                self.holders.setdefault(int(block), set()).add(piece.request_id)

    def updated(self, sampled: Mapping[int, Sequence[int]]) -> None:
        """The model answered: grow the streams by greedy verification."""
        assert self.step is not None
        for book in self.live.values():
            book.arrived = len(book.stream)
        for piece in self.step.pieces:
            book = self.live[piece.request_id]
            given = sampled.get(piece.request_id, [])
            book.computed = piece.end - piece.num_drafts
            if not given:
                continue
            drafts = [int(t) for t in piece.tokens[len(piece.tokens) - piece.num_drafts :]]
            agree = [draft == said for draft, said in zip(drafts, given, strict=False)]
            accepted = [*agree, False].index(False)
            book.verdict = (accepted, len(drafts))
            book.stream = (book.stream + [(t, False) for t in given[: accepted + 1]])[: book.most]
            book.computed = len(book.stream) - 1
            if len(book.stream) == book.most:
                del self.live[piece.request_id]

    def _check_piece(self, step: Step, row: int, piece: Piece, first: int, last: int) -> None:
        book = self.live[piece.request_id]
        if not book.started:
            book.started, book.entry, book.computed = True, piece.start, piece.start
            if book.imported:
                assert piece.start == book.imported
            else:
                assert piece.start % self.config.block_size == 0
                assert self.config.share_prefixes or piece.start == 0
        assert piece.start == book.computed < len(book.stream)
        assert last - first == len(piece.tokens) == piece.end - piece.start > 0
        ids, drafts = piece.tokens.tolist(), piece.num_drafts
        fed = book.stream[piece.start : piece.end - drafts]
        assert len(fed) + drafts == len(ids)
        assert drafts == 0 or len(fed) == 1
        assert drafts <= self.config.num_drafts
        assert ids[: len(fed)] == [token for token, _ in fed]
        assert piece.token_dead.tolist() == [flag for _, flag in fed] + [False] * drafts
        assert step.input_ids[first:last].tolist() == ids
        assert step.dead_mask[first:last].tolist() == piece.token_dead.tolist()
        assert step.positions[first:last].tolist() == list(range(piece.start, piece.end))
        assert list(zip(piece.stream.tolist(), piece.dead.tolist(), strict=True)) == book.stream
        assert piece.num_sampled == (drafts + 1 if piece.end - drafts >= book.prompt else 0)

    def _check_shapes(self, step: Step) -> None:
        tokens, requests = len(step.input_ids), len(step.query_start_loc) - 1
        for got, live, sizes in (
            (tokens, step.num_tokens, self.config.pad_tokens),
            (requests, len(step.pieces), self.config.pad_requests),
        ):
            assert got == min([size for size in sizes if size >= live], default=live)
        assert step.positions.shape == step.dead_mask.shape == (tokens,)
        assert step.lookback_token_ids.shape == step.lookback_dead_mask.shape == (requests, self.config.lookback)
        assert (step.slot_mapping is None) == (step.block_table is None) == (self.config.policy is Policy.STATELESS)
        if step.slot_mapping is not None and step.block_table is not None:
            assert step.slot_mapping.shape == (tokens,)
            assert step.block_table.shape[0] == requests
            slots = self.config.num_blocks * self.config.block_size
            assert 0 <= int(step.slot_mapping.min()) <= int(step.slot_mapping.max()) < slots
            assert 0 <= int(step.block_table.min()) <= int(step.block_table.max()) < self.config.num_blocks

    def _check_memory(self, step: Step, bounds: list[int]) -> None:
        size = self.config.block_size
        assert step.slot_mapping is not None
        assert step.block_table is not None
        slot_mapping, writes = step.slot_mapping.tolist(), {}
        for row, piece in enumerate(step.pieces):
            book = self.live[piece.request_id]
            held = -(-piece.end // size)
            book.row, unused = np.split(step.block_table[row].numpy(), [max(held, len(book.row))])
            assert not unused.any()
            fed = book.stream[: piece.start] + list(zip(piece.tokens.tolist(), piece.token_dead.tolist(), strict=True))
            names = _identities(fed)
            for position in range(piece.start, piece.end):
                slot = slot_mapping[bounds[row] + position - piece.start]
                assert slot == book.row[position // size] * size + position % size
                assert writes.setdefault(slot, piece.request_id) == piece.request_id, "two pieces write one slot"
                self.kv[slot] = self.written[slot] = names[position]
            if piece.start == book.imported == book.entry:
                for position in range(book.imported):
                    self.kv[book.row[position // size] * size + position % size] = names[position]
        for request_id, book in self.live.items():
            if book.started:
                self._check_history(request_id, book, size)

    def _check_history(self, request_id: int, book: Book, size: int) -> None:
        own = self.config.policy is Policy.SLOTS_ONLY
        for position, name in enumerate(_identities(book.stream[: book.computed])):
            slot = int(book.row[position // size]) * size + position % size
            assert self.kv[slot] == name, f"request {request_id}, position {position}: its block holds something else"
            if own and position >= book.imported:
                assert self.written[slot] == name, f"request {request_id}, position {position}: a block from elsewhere"

    def _check_window(self, step: Step, row: int, piece: Piece) -> None:
        book, size = self.live[piece.request_id], self.config.block_size
        known = {
            Policy.STATELESS: len(book.stream),
            Policy.KNOWN_IDS: len(book.stream),
            Policy.PROMPT_ONLY: book.prompt,
            Policy.LAGGING: max(book.prompt, book.arrived),
            Policy.SLOTS_ONLY: book.imported,
        }[self.config.policy]
        names = _identities(book.stream[: piece.start])
        for column in range(self.config.lookback):
            position = piece.start - 1 - column
            got = (int(step.lookback_token_ids[row, column]), bool(step.lookback_dead_mask[row, column]))
            if 0 <= position < known:
                assert got == book.stream[position]
                self.lookbacks["window"] += 1
                continue
            assert got == (-1, False)
            if position >= 0:
                slot = int(book.row[position // size]) * size + position % size
                assert self.written[slot] == names[position], f"position {position}: neither window nor slot knows it"
                self.lookbacks["slot"] += 1

    def _events(self, step: Step, row: int, piece: Piece, bounds: list[int]) -> dict[str, bool]:
        book, size = self.live[piece.request_id], self.config.block_size
        start, end, prompt = piece.start, piece.end, book.prompt
        first, accepted, drafted = start == book.entry and start < prompt, *book.verdict
        cut = start < prompt and (start, end) != (book.entry, prompt)
        hit = first and start > 0 and not book.imported
        reach = book.stream[max(0, start - self.config.lookback) : end]
        rejected = start >= prompt and accepted < drafted
        padded = len(step.input_ids) > step.num_tokens or len(step.query_start_loc) - 1 > len(step.pieces)
        facts = {
            "prompt whole": start == 0 and end == prompt,
            "chunk": cut,
            "decode": start >= prompt,
            "verify": piece.num_drafts > 0,
            "after rejection": rejected,
            "all rejected": rejected and accepted == 0,
            "prefix hit": hit,
            "one token left": hit and start == prompt - 1,
            "import": first and book.imported > 0,
            "import at block edge": first and book.imported > 0 and start % size == 0,
            "dead span": any(flag for _, flag in reach),
            "dead at chunk edge": cut and (book.stream[start][1] or book.stream[end - 1][1]),
            "padding": padded,
            "same-step hit": "same-step hit" in piece.events,
            "block reuse": "block reuse" in piece.events,
        }
        if step.slot_mapping is not None:
            others = step.slot_mapping[: step.num_tokens].tolist()
            del others[bounds[row] : bounds[row + 1]]
            blocks = {slot // size for slot in others}
            facts["same-step hit"] = hit and any(int(b) in blocks for b in book.row[: start // size])
            before = self.holders.get(int(book.row[start // size]), set())
            facts["block reuse"] = bool(before - {piece.request_id})
        others = {other.num_drafts for other in step.pieces if other.num_drafts}
        facts |= {
            "several drafts": piece.num_drafts > 1,
            "ragged verify": piece.num_drafts > 0 and len(others) > 1,
            "one-token blocks": size == 1 and step.slot_mapping is not None,
            "large blocks": size == 256 and step.slot_mapping is not None,
            "several images": any(flag for _, flag in reach) and _spans(book.stream[:end]) > 1,
            "starved": not first and book.last_step < step.index - 1,
            "host lags": self.config.policy is Policy.LAGGING and book.arrived < start and book.arrived >= prompt,
        }
        book.last_step = step.index
        return facts


def _spans(stream: Sequence[Flagged]) -> int:
    flags = [False, *(flag for _, flag in stream)]
    return sum(now and not before for before, now in itertools.pairwise(flags))


def _identities(stream: Sequence[Flagged]) -> list[int]:
    names, name = [], 0
    for entry in stream:
        name = hash((name, entry))
        names.append(name)
    return names
