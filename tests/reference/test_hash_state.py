"""Laws of one step: small steps by hand, each with the n-grams it must hash, and random ones against the definition."""

import gc
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.world import World
from reference.hash_state import HashState
from tests.reference.steps import D, PlainStep, Raw, plain_row, raw_steps

B = 4  # slots a block, where nothing else is said
POLICY = {"slot": {"slot_cache": True, "block_size": B}, "stateless": {"slot_cache": False, "block_size": None}}


class StepLaws:
    """Hold the laws that each side's HashState must keep; a subclass named Test... says which side."""

    HashState: Any
    world_name = "another_pad"

    @pytest.fixture(autouse=True)
    def _bind(self, worlds: dict[str, World], device: torch.device) -> None:
        self.world, self.device = worlds[self.world_name], device
        self.pad, self.map = self.world.pad_id, self.world.token_map.tolist()

    def state(self, way: str = "slot", blocks: int = 8) -> Any:
        """Make a state; in the slot way it is bound to a KV cache of so many blocks."""
        state = self.HashState(self.world.config, self.world.token_map, **POLICY[way], device=self.device)
        self.kv_cache = torch.ones(blocks, 2, 3, device=self.device)
        assert state.ensure_cache(self.kv_cache) is True
        return state

    def check(self, state: Any, raw: Raw, ngrams: list[list[int]]) -> None:
        """Run a step: each live token must have hashed these compressed ids, newest first."""
        rows = state.forward(**raw.tensors(self.device))
        assert (rows.dtype, rows.shape) == (torch.int32, (len(raw.ids), 2, 24))
        assert rows[: len(ngrams)].tolist() == [plain_row(self.world, ngram) for ngram in ngrams]

    def test_a_whole_request_looks_back_into_the_batch(self) -> None:
        """From position 0 on, each token sees those before it and pads in front; nothing else is read."""
        a, b, c, d, e = (self.map[token] for token in (500, 129000, 7, 7, 31000))
        p = self.pad
        ngrams = [[a, p, p, p], [b, a, p, p], [c, b, a, p], [d, c, b, a], [e, d, c, b]]
        for way in POLICY:
            raw = Raw([500, 129000, 7, 7, 31000], [0, 1, 2, 3, 4], [0, 5])
            if way == "slot":
                raw.slots, raw.table = [-1] * 5, [[0, 1]]
            self.check(self.state(way), raw, ngrams)

    def test_the_batch_lookback_stops_at_the_request_before(self) -> None:
        """What stands before a request in the batch is a neighbour's, also where the two positions would join up."""
        a, b, c, p = self.map[50], self.map[51], self.map[52], self.pad
        self.check(
            self.state("stateless"), Raw([50, 51, 52], [0, 1, 0], [0, 2, 3]), [[a, p, p, p], [b, a, p, p], [c, p, p, p]]
        )
        self.check(
            self.state("stateless"), Raw([50, 51, 52], [0, 1, 2], [0, 2, 3]), [[a, p, p, p], [b, a, p, p], [c, p, p, p]]
        )

    def test_column_0_of_the_window_is_the_newest(self) -> None:
        """Column c stands for chunk_start - 1 - c: the second token of the chunk sees one column fewer."""
        window = [[60, 61, 62]]
        a, b, c, d = (self.map[token] for token in (50, 51, 52, 53))
        w = [self.map[token] for token in window[0]]
        ngrams = [[a, *w], [b, a, w[0], w[1]], [c, b, a, w[0]], [d, c, b, a]]
        self.check(self.state("stateless"), Raw([50, 51, 52, 53], [9, 10, 11, 12], [0, 4], window=window), ngrams)

    def test_each_request_has_its_own_window_row(self) -> None:
        """Row r of the window belongs to request r, also behind requests without tokens."""
        window = [[1, 1, 1], [60, 61, 62], [2, 2, 2], [70, 71, 72]]
        raw = Raw([50, 51], [9, 9], [0, 0, 1, 1, 2], window=window)
        ngrams = [[self.map[token] for token in ngram] for ngram in ([50, 60, 61, 62], [51, 70, 71, 72])]
        self.check(self.state("stateless"), raw, ngrams)

    def test_an_unknown_id_without_slots_is_a_pad_that_blocks_nothing(self) -> None:
        """In the stateless way -1 stands for one pad; what stands further back still counts."""
        window = [[-1, 61, 62]]
        raw = Raw([50], [9], [0, 1], window=window, window_dead=[[True, False, False]])
        self.check(self.state("stateless"), raw, [[self.map[50], self.pad, self.map[61], self.map[62]]])

    @pytest.mark.parametrize("start", [0, 1, 2])
    @pytest.mark.parametrize("way", POLICY)
    def test_nothing_stands_before_position_0(self, way: str, start: int) -> None:
        """A window may hold ids in columns that reach before position 0, and a table blocks: neither is read."""
        raw = Raw([50], [start], [0, 1], window=[[60, 61, 62]])
        if way == "slot":
            raw.slots, raw.table = [-1], [[5]]
        seen = [self.map[token] for token in [60, 61, 62][:start]]
        self.check(self.state(way), raw, [[self.map[50], *seen, *[self.pad] * (3 - start)]])

    @pytest.mark.parametrize("known", list(product([False, True], repeat=D)))
    @pytest.mark.parametrize("way", POLICY)
    def test_the_window_goes_before_the_slots(self, way: str, known: tuple[bool, ...]) -> None:
        """Column by column: a known id counts; an unknown one is read from its slot, or is a pad without slots."""
        state = self.state(way)
        window = [60 + column if is_known else -1 for column, is_known in enumerate(known)]
        raw = Raw([50], [9], [0, 1], window=[window])
        if way == "slot":
            # Position 8 is block 6's slot 0, positions 7 and 6 are block 3's slots 3 and 2.
            raw.slots, raw.table = [25], [[1, 3, 6]]
            for slot, held in ((24, 100), (15, 101), (14, 102)):
                state.cache[slot] = held
        back = [100, 101, 102] if way == "slot" else [self.pad] * D
        want = [self.map[60 + c] if is_known else back[c] for c, is_known in enumerate(known)]
        self.check(state, raw, [[self.map[50], *want]])

    @pytest.mark.parametrize("column", range(D))
    def test_a_dead_token_in_the_window_ends_the_ngram(self, column: int) -> None:
        """Dead latches: ids that stand behind it in the window are not seen."""
        flags = [at == column for at in range(D)]
        raw = Raw([50], [9], [0, 1], window=[[60, 61, 62]], window_dead=[flags])
        alive = [self.map[60 + at] for at in range(column)]
        self.check(self.state("stateless"), raw, [[self.map[50], *alive, *[self.pad] * (D - column)]])

    def test_a_dead_token_in_the_batch_ends_the_ngram(self) -> None:
        """Also its own: the row of a dead token is that of pads alone."""
        raw = Raw([50, 51, 52], [9, 10, 11], [0, 3], dead=[False, True, False], window=[[60, 61, 62]])
        w, p = [self.map[token] for token in (60, 61, 62)], self.pad
        self.check(self.state("stateless"), raw, [[self.map[50], *w], [p, p, p, p], [self.map[52], p, p, p]])

    def test_a_dead_slot_ends_the_ngram(self) -> None:
        """What a dead token wrote blocks whoever reads it in a later step."""
        state = self.state()
        raw = Raw([50, 51, 52], [0, 1, 2], [0, 3], dead=[False, True, False], slots=[20, 21, 22], table=[[5]])
        p = self.pad
        self.check(state, raw, [[self.map[50], p, p, p], [p, p, p, p], [self.map[52], p, p, p]])
        later = Raw([53], [3], [0, 1], slots=[23], table=[[5]])
        self.check(state, later, [[self.map[53], self.map[52], p, p]])
        assert state.cache[20:24].tolist() == [self.map[50], -1, self.map[52], self.map[53]]

    @pytest.mark.parametrize("reader_first", [False, True])
    def test_this_step_s_writes_are_there_before_its_reads(self, reader_first: bool) -> None:
        """A request that starts on a block sees what another request of the same step puts there, in either order."""
        state = self.state()
        state.cache.fill_(77)
        writer, reader = [40, 41, 42, 43], [50, 51]
        positions, slots = [0, 1, 2, 3], [12, 13, 14, 15]
        w, r, p = [self.map[t] for t in writer], [self.map[t] for t in reader], self.pad
        written = [[w[0], p, p, p], [w[1], w[0], p, p], [w[2], w[1], w[0], p], [w[3], w[2], w[1], w[0]]]
        hit = [[r[0], w[3], w[2], w[1]], [r[1], r[0], w[3], w[2]]]
        if reader_first:
            raw = Raw(reader + writer, [4, 5, *positions], [0, 2, 6], slots=[8, 9, *slots], table=[[3, 2], [3, 7]])
            self.check(state, raw, hit + written)
        else:
            raw = Raw(writer + reader, [*positions, 4, 5], [0, 4, 6], slots=[*slots, 8, 9], table=[[3, 7], [3, 2]])
            self.check(state, raw, written + hit)

    def test_a_step_writes_its_slots_and_no_others(self) -> None:
        """-1 is not written; two tokens may write one slot if they are the same."""
        state = self.state()
        state.cache.fill_(77)
        raw = Raw([50, 51, 50, 52], [0, 1, 0, 1], [0, 2, 4], slots=[9, -1, 9, 31], table=[[2], [2]])
        state.forward(**raw.tensors(self.device))
        want = [77] * 32
        want[9], want[31] = self.map[50], self.map[52]
        assert state.cache.tolist() == want

    @pytest.mark.parametrize("boundaries", [[0, 2], [0, 0, 2], [0, 2, 2, 2, 2]])
    def test_a_token_of_nobody_reads_and_writes_nothing(self, boundaries: list[int]) -> None:
        """Past the last boundary ids and positions may be anything, and valid slots stand there: none is written."""
        state = self.state()
        state.cache.fill_(77)
        raw = Raw(
            [50, 51, -(2**40), 2**40, 129280],
            [0, 1, -5, 2**60, 3],
            boundaries,
            dead=[False, False, True, False, False],
            slots=[4, 5, 6, 7, 10**9],
            table=[[1]] * (len(boundaries) - 1),
        )
        p = self.pad
        self.check(state, raw, [[self.map[50], p, p, p], [self.map[51], self.map[50], p, p]])
        want = [77] * 32
        want[4], want[5] = self.map[50], self.map[51]
        assert state.cache.tolist() == want

    def test_what_an_empty_request_holds_is_never_looked_at(self) -> None:
        """Padded requests come with stale windows and tables, which may hold anything."""
        state = self.state()
        raw = Raw(
            [50], [5], [0, 0, 1, 1],
            window=[[10**9, -5, 129280], [60, 61, 62], [2**40, 0, 0]],
            slots=[1], table=[[-9, 10**9], [0, 0], [8, 8]],
        )  # fmt: skip
        self.check(state, raw, [[self.map[token] for token in (50, 60, 61, 62)]])

    def test_the_table_may_end_with_the_last_request_that_has_tokens(self) -> None:
        """R' rows cover every request with tokens; empty ones behind them need none."""
        state = self.state()
        state.cache[8:11] = torch.tensor([100, 101, 102], device=self.device)
        raw = Raw([50], [3], [0, 1, 1, 1], slots=[-1], table=[[2]])
        self.check(state, raw, [[self.map[50], 102, 101, 100]])

    @pytest.mark.parametrize("way", POLICY)
    @pytest.mark.parametrize(
        ("tokens", "boundaries"), [(0, [0]), (0, [0, 0]), (0, [0, 0, 0]), (3, [0]), (3, [0, 0, 0])], ids=str
    )
    def test_a_step_without_live_tokens_does_nothing(self, way: str, tokens: int, boundaries: list[int]) -> None:
        """R = 0, T = 0, or requests without tokens: rows of the right shape, and not a slot changes."""
        state = self.state(way)
        raw = Raw([50] * tokens, [0] * tokens, boundaries)
        if way == "slot":
            state.cache.fill_(77)
            raw.slots, raw.table = [3] * tokens, [[0]] * (len(boundaries) - 1)
        rows = state.forward(**raw.tensors(self.device))
        assert (rows.dtype, rows.shape) == (torch.int32, (tokens, 2, 24))
        assert state.cache is None or state.cache.tolist() == [77] * 32

    def test_no_argument_is_written(self) -> None:
        """A step's tensors are the caller's."""
        state = self.state()
        given = Raw([50, 51], [4, 5], [0, 2], window=[[-1, 60, -1]], slots=[1, 2], table=[[1, 0]]).tensors(self.device)
        before = {name: tensor.clone() for name, tensor in given.items()}
        state.forward(**given)
        assert all(torch.equal(given[name], before[name]) for name in before)

    def test_the_cache_has_one_zeroed_int32_a_kv_slot(self) -> None:
        """S = blocks * B, whatever the shape behind the blocks, and the same tensor stays bound from step to step."""
        state = self.state(blocks=5)
        cache = state.cache
        assert (cache.dtype, cache.tolist(), cache.device) == (torch.int32, [0] * 20, self.device)
        cache.fill_(7)
        assert state.ensure_cache(self.kv_cache) is True
        assert state.cache is cache
        assert cache.tolist() == [7] * 20

    @pytest.mark.parametrize("blocks", [3, 5, 8])
    def test_another_kv_cache_starts_with_zeros(self, blocks: int) -> None:
        """A KV cache that is bound anew holds nobody's tokens, also where its shape is the old one's."""
        state = self.state(blocks=5)
        state.cache.fill_(7)
        assert state.ensure_cache(torch.ones(blocks, 2, 3, device=self.device)) is True
        assert state.cache.tolist() == [0] * 4 * blocks

    def test_a_kv_cache_at_an_old_one_s_address_starts_with_zeros(self) -> None:
        """The old one may be freed first, and the new one lie where it lay."""
        state = self.state(blocks=5)
        state.cache.fill_(7)
        del self.kv_cache
        gc.collect()
        assert state.ensure_cache(torch.ones(5, 2, 3, device=self.device)) is True
        assert state.cache.tolist() == [0] * 20

    def test_an_unbound_kv_cache_drops_the_slots(self) -> None:
        """While nothing is bound there is no cache, and what is bound then starts with zeros, even the same tensor."""
        state = self.state(blocks=5)
        state.cache.fill_(7)
        assert state.ensure_cache(torch.empty(0)) is False
        assert state.cache is None
        with pytest.raises(RuntimeError, match=r"^forward: got no slot cache, expected ensure_cache"):
            state.forward(**Raw([50], [0], [0, 1], slots=[0], table=[[0]]).tensors(self.device))
        assert state.ensure_cache(self.kv_cache) is True
        assert state.cache.tolist() == [0] * 20

    def test_the_state_keeps_no_kv_cache_alive(self) -> None:
        """A KV cache is freed as soon as its engine lets go of it, whatever the state still holds."""
        state = self.state(blocks=5)
        freed = weakref.ref(self.kv_cache)
        state.forward(**Raw([50], [0], [0, 1], slots=[0], table=[[0]]).tensors(self.device))
        del self.kv_cache
        gc.collect()
        assert freed() is None
        assert state.cache.numel() == 20

    def test_the_stateless_way_allocates_nothing(self) -> None:
        """It says whether hashing can run, and has no slots."""
        state = self.state("stateless")
        assert state.cache is None
        assert state.ensure_cache(torch.empty(0)) is False
        assert state.cache is None

    def test_a_state_before_ensure_cache_refuses_a_step(self) -> None:
        """The slot way needs its slots; the stateless way runs without."""
        raw = Raw([50], [0], [0, 1])
        stateless = self.HashState(self.world.config, self.world.token_map, **POLICY["stateless"], device=self.device)
        assert stateless.forward(**raw.tensors(self.device)).shape == (1, 2, 24)
        slot = self.HashState(self.world.config, self.world.token_map, **POLICY["slot"], device=self.device)
        raw.slots, raw.table = [0], [[0]]
        assert slot.cache is None
        with pytest.raises(RuntimeError, match=r"^forward: got no slot cache, expected ensure_cache with a bound KV"):
            slot.forward(**raw.tensors(self.device))

    @pytest.mark.parametrize("way", POLICY)
    @pytest.mark.parametrize("tokens", [0, 1, 5])
    def test_dummy_hashes_are_dead_and_touch_nothing(self, way: str, tokens: int) -> None:
        """A rank without real tokens takes part with DEAD ids and keeps none of the rows."""
        state = self.HashState(self.world.config, self.world.token_map, **POLICY[way], device=self.device)
        hashes, keep = state.dummy_hashes(torch.full((tokens,), 10**9, device=self.device))
        assert (hashes.dtype, hashes.tolist()) == (torch.int32, [[[-1] * 24] * 2] * tokens)
        assert (keep.dtype, keep.tolist()) == (torch.bool, [False] * tokens)
        assert {hashes.device, keep.device} == {self.device}
        assert hashes.shape == (tokens, 2, 24)
        assert state.cache is None

    @pytest.mark.parametrize("kind", ["array", "int64 array", "tensor", "list"])
    def test_the_token_map_may_be_any_integers(self, kind: str) -> None:
        """NumPy, torch or a list; the caller's own is copied or left as it is."""
        token_map: Any = {
            "array": self.world.token_map,
            "int64 array": self.world.token_map.astype(np.int64),
            "tensor": torch.from_numpy(self.world.token_map.copy()),
            "list": self.map,
        }[kind]
        state = self.HashState(self.world.config, token_map, **POLICY["stateless"], device=self.device)
        p = self.pad
        self.check(state, Raw([129279], [0], [0, 1]), [[self.map[129279], p, p, p]])

    @pytest.mark.parametrize("name", ["float", "two axes", "past W", "negative", "no pad"])
    def test_a_token_map_that_is_none_is_refused(self, name: str) -> None:
        """Entries must be compressed ids in [0, W), and the pad token must have one."""
        wrong = self.world.token_map.copy()
        wrong[1234] = 99092 if name == "past W" else -1 if name == "negative" else wrong[1234]
        pad_token = self.world.config.engram_pad_token_id
        token_map, error, words = {
            "float": (
                wrong.astype(np.float32),
                TypeError,
                r"got float32 of shape \(129280,\), expected integers \[V\]",
            ),
            "two axes": (wrong[None], TypeError, r"got int32 of shape \(1, 129280\), expected integers \[V\]"),
            "past W": (wrong, ValueError, r"got 99092 for token 1234, expected compressed ids in \[0, 99092\)"),
            "negative": (wrong, ValueError, r"got -1 for token 1234, expected compressed ids in \[0, 99092\)"),
            "no pad": (
                wrong[:pad_token],
                ValueError,
                f"got {pad_token} ids, expected one for the pad token {pad_token}",
            ),
        }[name]
        with pytest.raises(error, match=f"^token_map: {words}"):
            self.HashState(self.world.config, token_map, **POLICY["stateless"], device=self.device)

    @pytest.mark.parametrize("size", [None, 0, -1, 16.0, True, "16"], ids=repr)
    def test_a_block_size_that_is_none_is_refused(self, size: Any) -> None:
        """A positive int; None only without a slot cache."""
        for slot_cache in {True, size is None} if size is not None else {True}:
            with pytest.raises(ValueError, match=f"^block_size: got {size!r}, expected an int >= 1"):
                self.HashState(
                    self.world.config, self.world.token_map, slot_cache=slot_cache, block_size=size, device=self.device
                )

    @pytest.mark.parametrize(
        ("kv_cache", "error", "words"),
        [(None, TypeError, "got NoneType, expected a torch.Tensor"), (torch.tensor(1), ValueError, r"got shape \(\)")],
        ids=["none", "no axes"],
    )
    def test_what_is_no_kv_cache_is_refused(self, kv_cache: Any, error: type[Exception], words: str) -> None:
        """A KV cache has blocks."""
        with pytest.raises(error, match=f"^kv_cache: {words}"):
            self.state().ensure_cache(kv_cache)

    @pytest.mark.parametrize("name", ["input_ids", "positions", "query_start_loc", "dead_mask", "lookback_token_ids",
                                      "lookback_dead_mask", "slot_mapping", "block_table"])  # fmt: skip
    def test_an_argument_of_another_kind_is_refused(self, name: str) -> None:
        """No tensor, another dtype, another number of axes, another device: each by the argument's name."""
        state = self.state()
        given = Raw([50, 51], [4, 5], [0, 2], slots=[1, 2], table=[[1, 0]]).tensors(self.device)
        right, flag = given[name], name.endswith("mask")
        for value, error, words in [
            ([0, 1], TypeError, "got list, expected a torch.Tensor"),
            (right.float(), TypeError, "got dtype torch.float32, expected torch.(bool|int32 or torch.int64)"),
            (
                right.int() if flag else right.bool(),
                TypeError,
                "got dtype torch.(int32|bool), expected torch.(bool|int32)",
            ),
            (right.short(), TypeError, "got dtype torch.int16, expected"),
            (right[None], ValueError, r"got shape \(1, .*expected \["),
            (right.to("meta"), ValueError, "got device meta, expected"),
        ]:
            with pytest.raises(error, match=f"^{name}: {words}"):
                state.forward(**given | {name: value})

    @pytest.mark.parametrize(
        ("name", "shape"),
        [("positions", (3,)), ("dead_mask", (1,)), ("slot_mapping", (3,)), ("lookback_token_ids", (2, 3)),
         ("lookback_token_ids", (1, 2)), ("lookback_dead_mask", (1, 4)), ("lookback_dead_mask", (0, 3)),
         ("query_start_loc", (0,))],
    )  # fmt: skip
    def test_sizes_that_disagree_are_refused(self, name: str, shape: tuple[int, ...]) -> None:
        """T, R and D are one number each: nothing is broadcast or cut."""
        given = Raw([50, 51], [4, 5], [0, 2], slots=[1, 2], table=[[1, 0]]).tensors(self.device)
        given[name] = given[name].new_zeros(shape)
        with pytest.raises(ValueError, match=f"^{name}: got (shape|0 entries).*, expected "):
            self.state().forward(**given)

    @pytest.mark.parametrize("name", ["slot_mapping", "block_table"])
    def test_slots_and_table_come_with_the_slot_way_alone(self, name: str) -> None:
        """Missing in the slot way and present in the stateless one are both mistakes."""
        given = Raw([50, 51], [4, 5], [0, 2], slots=[1, 2], table=[[1, 0]]).tensors(self.device)
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, expected a torch.Tensor"):
            self.state().forward(**given | {name: None})
        other = {"slot_mapping": "block_table", "block_table": "slot_mapping"}[name]
        with pytest.raises(ValueError, match=f"^{name}: got a tensor, expected None in the stateless way"):
            self.state("stateless").forward(**given | {other: None})


BASE = {
    "ids": [50, 51, 52, 53], "positions": [4, 5, 0, 1], "starts": [0, 2, 2, 4],
    "slots": [8, 9, 16, 17], "table": [[1, 2], [9, 9], [4, 9]],
}  # fmt: skip
UNKNOWN = [-1, -1, -1]
# What is changed in BASE, and the message.
WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "first boundary": ({"starts": [1, 2, 2, 4]}, r"query_start_loc: got \[1, 2, 2, 4\], expected it to start at 0"),
    "falling boundary": ({"starts": [0, 3, 2, 4]}, r"query_start_loc: got \[0, 3, 2, 4\], expected .* never to fall"),
    "boundary past T": ({"starts": [0, 2, 2, 5]}, r"query_start_loc: got \[0, 2, 2, 5\], expected .* end by T 4"),
    "id past V": ({"ids": [50, 129280, 52, 53]}, "input_ids: got 129280 at 1, expected 0 <= value < 129280"),
    "negative id": ({"ids": [50, 51, 52, -1]}, "input_ids: got -1 at 3, expected 0 <= value < 129280"),
    "negative position": ({"positions": [-1, 0, 0, 1]}, "positions: got -1 at 0, expected 0 <= value"),
    "gap in positions": ({"positions": [4, 6, 0, 1]}, "positions: got 6 at 1, expected 5: consecutive"),
    "falling positions": ({"positions": [4, 5, 1, 0]}, "positions: got 0 at 3, expected 2: consecutive"),
    "window id past V": (
        {"window": [UNKNOWN, UNKNOWN, [-1, 129280, -1]]},
        r"lookback_token_ids\[:, 1\]: got 129280 at 2, expected value < 129280",
    ),
    "slot past S": ({"slots": [8, 9, 16, 40]}, "slot_mapping: got 40 at 3, expected -1 <= value < 40"),
    "negative slot": ({"slots": [8, -2, 16, 17]}, "slot_mapping: got -2 at 1, expected -1 <= value < 40"),
    "slot of two ids": ({"slots": [8, 9, 16, 8]}, "slot_mapping: got slot 8 for tokens 0 and 3, which differ"),
    "slot of dead and alive": (
        {"ids": [50, 51, 52, 51], "dead": [False, False, False, True], "slots": [8, 9, 16, 9]},
        "slot_mapping: got slot 9 for tokens 1 and 3, which differ",
    ),
    "few table rows": ({"table": [[1, 2], [9, 9]]}, "block_table: got 2 rows, expected one for request 2"),
    "few table columns": (
        {"positions": [9, 10, 0, 1]},
        "block_table: got 2 columns, expected one for position 8 of request 0",
    ),
    "block past S": (
        {"table": [[10, 2], [9, 9], [4, 9]]},
        r"block_table: got 10 at \[0, 0\], expected 0 <= value < 10",
    ),
    "negative block": ({"table": [[-1, 2], [9, 9], [4, 9]]}, r"block_table: got -1 at \[0, 0\], expected 0 <= value"),
}


class TestReference(StepLaws):
    """The laws of one step, on the reference."""

    HashState = HashState

    @pytest.mark.parametrize("name", WRONG_VALUES)
    def test_a_caller_s_error_in_the_values_is_refused(self, name: str) -> None:
        """A step that breaks the contract of its values is refused by argument, place, value and expectation."""
        change, words = WRONG_VALUES[name]
        state = self.state(blocks=10)
        state.forward(**Raw(**BASE).tensors(self.device))
        state.cache.fill_(7)
        with pytest.raises(ValueError, match=f"^{words}"):
            state.forward(**Raw(**BASE | change).tensors(self.device))
        assert state.cache.tolist() == [7] * 40, "a refused step wrote slots"

    @given(st.data())
    def test_any_step_gives_the_rows_of_the_definition(self, data: st.DataObject) -> None:
        """Random legal steps, over slots that hold anything, give the rows and leave the slots of plain Python."""
        case = data.draw(raw_steps(self.world, requests=(0, 5), lengths=(0, 6)))
        state = case.state(HashState, self.device)
        plain = PlainStep(self.world, case.block_size, None if case.slots is None else list(case.slots))
        for raw, dtypes in case.steps:
            rows = state.forward(**raw.tensors(self.device, dtypes))
            assert rows[: raw.starts[-1]].tolist() == plain.rows(raw)
        assert case.slots is None or state.cache.tolist() == plain.slots


def test_options_of_the_state_are_named(worlds: dict[str, World]) -> None:
    """`True, 4` would not say what is true and of what there are four; config and map may be named too."""
    toy = worlds["toy"]
    with pytest.raises(TypeError, match="positional argument"):
        HashState(toy.config, toy.token_map, True, 4, "cpu")  # type: ignore[misc]
    named = {"config": toy.config, "token_map": toy.token_map, "slot_cache": True, "block_size": 4, "device": "cpu"}
    assert HashState(**named).block_size == 4
