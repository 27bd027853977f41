"""The Engram layer without its device work: staging, collectives and loading, which both sides share.

A side names its table, its gate and its `select_rows`; nothing here computes a row or a gate.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from reference.checkpoint import Checkpoint, TableShard
from reference.checks import INTEGERS, check_tensor
from reference.collectives.rows import FORMS, Form, Window, gather_ids, token_window, whole_rows, window_rows
from reference.config import EngramConfig
from reference.engram_weights import Described, check_weights, fill_wkv, find_scales
from reference.prime_layout import PrimeLayout
from reference.shard_plan import ShardPlan, check_count


class EngramBase(nn.Module):
    """Add what a layer's n-gram rows say to the hyper-connection stream.

        rows = table[hash_ids]                       [T, C, dim], looked up ahead of the layer
        kv   = rows.flatten @ wkv^T                  [T, (hc+1)*M], hc keys and one value
        out  = engram_gate(hidden, kv, q, k, mask)   [T, hc, M]

    The table is cut over the ranks of `process_group`; wkv, q and k are whole on each. How ranks share a step:

    - tensor parallel (neither form given): all ranks bring the same ids and get all rows.
    - `sequence_parallel`: all bring the same ids; rank r has a stream of exactly ceil(T/P) tokens and gets their rows.
    - `data_parallel`: each brings ids of its own, as many as all others (DEAD where it has no token, as an idle rank's
      `dummy_hashes` are), and gets their rows.

    A form says how rows travel, "all_to_all" or "gather_select"; it changes no bit.

    Args:
        config: the model's Engram configuration.
        layer_index: which entry of `engram_layer_ids`.
        max_tokens: the longest step; for each microbatch so many rows are staged, at addresses that never change.
        microbatches: steps that may be prepared at once.
        process_group: the ranks, in the order of their shards; None for one rank that holds the whole table.
        sequence_parallel, data_parallel: None, or the form; at most one of them.
        placement: "device" or "pinned", where the table lies.
        device: where everything else lies, inputs too.
        dtype: of wkv, bfloat16 or float32.

    Attributes:
        table: the rank's shard, to be loaded with the layer.
        staged_rows: for each microbatch [max_tokens, local_heads, dim] bfloat16 (P times as many, data parallel).

    Raises:
        TypeError, ValueError: naming the argument, what it is and what was expected.
    """

    _embedding: ClassVar[type[TableShard]]
    _gate: ClassVar[Callable[..., torch.Tensor]]
    _select: ClassVar[Callable[..., torch.Tensor]]

    def __init__(
        self,
        config: EngramConfig,
        layer_index: int,
        *,
        max_tokens: int,
        microbatches: int = 1,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: Form | None = None,
        data_parallel: Form | None = None,
        placement: Literal["device", "pinned"] = "device",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        check_count("layer_index", layer_index, 0, len(config.engram_layer_ids) - 1)
        check_count("max_tokens", max_tokens, 1)
        check_count("microbatches", microbatches, 1)
        _check_forms(sequence_parallel, data_parallel)
        if dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"dtype: got {dtype}, expected torch.bfloat16 or torch.float32")
        ranks = 1 if process_group is None else dist.get_world_size(process_group)
        rank = 0 if process_group is None else dist.get_rank(process_group)
        sizes = PrimeLayout(config).primes[layer_index].flatten().tolist()
        self.plan = ShardPlan.of(sizes, ranks=ranks, rank=rank)
        self.table = self._embedding(self.plan, config.engram_head_dim, device=device, placement=placement)
        self.device, self.dtype, self.max_tokens = self.table.device, dtype, max_tokens
        self.process_group = process_group if ranks > 1 else None
        self.sequence_parallel, self.data_parallel = sequence_parallel, data_parallel

        copies, width, dim = config.hc_mult, config.hidden_size, config.engram_head_dim
        self.copies, self.width, self.eps = copies, width, float(config.rms_norm_eps)
        self.wkv = nn.Linear(config.columns * dim, (copies + 1) * width, bias=False, dtype=dtype, device="meta")
        self.wkv.weight = nn.Parameter(
            torch.empty(self.wkv.weight.shape, dtype=dtype, device=self.device), requires_grad=False
        )
        self.q_weight, self.k_weight = (
            nn.Parameter(torch.empty(copies, width, dtype=torch.bfloat16, device=self.device), requires_grad=False)
            for _ in range(2)
        )
        self._loaded = False

        staged = max_tokens * (ranks if data_parallel else 1)
        self.staged_rows = tuple(
            torch.empty(staged, self.plan.local_heads, dim, dtype=torch.bfloat16, device=self.device)
            for _ in range(microbatches)
        )
        self._prepared: list[int | None] = [None] * microbatches  # T
        self._pending: list[tuple[torch.cuda.Event, bool] | None] = [None] * microbatches

    def prepare_embeddings(
        self, hash_ids: torch.Tensor, *, microbatch: int = 0, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Look a step's rows up into the staged rows, ahead of the layer.

        Args:
            hash_ids: [T, C] int32 or int64, T <= max_tokens, this layer's columns of what `HashState` gives.
            microbatch: which staged rows to fill; they must not be in use by a step that is still to be embedded.
            stream: look up there, in the background, behind what the current stream holds by now; `embed` waits for it.
                Both belong into one CUDA graph, or neither.

        Raises:
            TypeError, ValueError: an argument that does not fit, or a step longer than max_tokens.
            RuntimeError: the layer is not loaded.
        """
        self._require_loaded()
        tokens = self._check_ids(hash_ids)
        check_count("microbatch", microbatch, 0, len(self.staged_rows) - 1)
        if tokens > self.max_tokens:
            raise ValueError(f"hash_ids: got {tokens} tokens, expected at most max_tokens {self.max_tokens}")
        self._prepared[microbatch] = self._pending[microbatch] = None
        if stream is None:
            self._look_up(hash_ids, self.staged_rows[microbatch], background=False)
        else:
            if self.device.type != "cuda":
                raise ValueError(f"stream: got one for {self.device}, expected None on a device without streams")
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._look_up(hash_ids, self.staged_rows[microbatch], background=True)
                event = torch.cuda.Event()
                event.record(stream)
                self._pending[microbatch] = (event, torch.cuda.is_current_stream_capturing())
            hash_ids.record_stream(stream)
        self._prepared[microbatch] = tokens

    def embed(self, hash_ids: torch.Tensor, *, microbatch: int = 0) -> torch.Tensor:
        """Give the rows that were prepared, put together over the ranks.

        Args:
            hash_ids: [T, C] as they were prepared.
            microbatch: as it was prepared.

        Returns:
            [T, C, dim] bfloat16; sequence parallel [ceil(T/P), C, dim], zero rows past the live tokens. On one rank a
            view of the staged rows, which the next `prepare_embeddings` overwrites.

        Raises:
            TypeError, ValueError: an argument that does not fit, or another T than was prepared.
            RuntimeError: a graph is captured without the side stream's lookup that it needs.
        """
        tokens = self._check_ids(hash_ids)
        check_count("microbatch", microbatch, 0, len(self.staged_rows) - 1)
        if self._prepared[microbatch] != tokens:
            raise ValueError(
                f"hash_ids: got {tokens} tokens, expected the {self._prepared[microbatch]} that were prepared for "
                f"microbatch {microbatch}"
            )
        self._wait(microbatch)
        staged = self.staged_rows[microbatch]
        if self.process_group is None:
            return staged[:tokens]
        if self.data_parallel:
            part = staged[: tokens * self.plan.ranks]
            return window_rows(part, self.plan, self.process_group, self._select, self.data_parallel)
        if self.sequence_parallel:
            return window_rows(staged[:tokens], self.plan, self.process_group, self._select, self.sequence_parallel)
        return whole_rows(staged[:tokens], self.plan, self.process_group, self._select)

    def forward(
        self,
        hidden: torch.Tensor,
        hash_ids: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        *,
        microbatch: int = 0,
    ) -> torch.Tensor:
        """Gate the prepared rows into the stream.

        Args:
            hidden: [rows, hc, M] the stream; rows >= T, those past T being padding that passes through. Sequence
                parallel: this rank's window of it, exactly ceil(T/P) rows.
            hash_ids: [T, C] as they were prepared.
            token_mask: [T] bool, live and not dead; a token that is False passes through bit for bit.
            microbatch: as it was prepared.

        Returns:
            like hidden.

        Raises:
            TypeError, ValueError: an argument that does not fit. RuntimeError: see `embed`.
        """
        tokens = self._check_ids(hash_ids)
        check_tensor("hidden", hidden, ("rows", self.copies, self.width), (hidden.dtype,), self.device)
        if token_mask is not None:
            check_tensor("token_mask", token_mask, (tokens,), (torch.bool,), self.device)
        window = self._window(tokens)
        if hidden.shape[0] < window.size or (self.sequence_parallel and hidden.shape[0] != window.size):
            exactly = "exactly" if self.sequence_parallel else "at least"
            raise ValueError(f"hidden: got {hidden.shape[0]} rows, expected {exactly} {window.size}")
        rows = self.embed(hash_ids, microbatch=microbatch)[: window.live]
        kv = self.wkv(rows.flatten(1).to(self.dtype))
        if token_mask is not None:
            token_mask = token_mask[window.first : window.first + window.live]
        return self._gate(hidden, kv, self.q_weight, self.k_weight, token_mask, eps=self.eps)

    def load_checkpoint(self, checkpoint: Checkpoint | str | Path, prefix: str) -> None:
        """Load the layer from files: this rank's rows of the table, and the rest whole.

        Args:
            checkpoint: what holds `{prefix}.embed.weight` [rows, dim] float8_e4m3fn with its scales; `.wkv.weight`
                [(hc+1)*M, C*dim] of dtype or float8_e4m3fn, the latter with one ue8m0 scale for 32 x 32 of it; and
                `.q_weight`, `.k_weight` [hc, M] bfloat16. Scales are `weight_scale_inv` or `scale`.
            prefix: such as "layers.1.engram".

        Raises:
            KeyError: a tensor is missing. TypeError, ValueError: another dtype or shape. RuntimeError: loaded already.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        entries = checkpoint.entries

        def read(name: str) -> torch.Tensor:
            dtype = entries[name].dtype
            assert dtype is not None  # checked before anything is read
            out = torch.empty(entries[name].shape, dtype=dtype, device=self.device)
            checkpoint.read(name, out)
            return out

        scale = self._check_weights(entries, prefix)
        self.table.load_checkpoint(checkpoint, f"{prefix}.embed")
        self._fill(read, prefix, scale)

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Load the layer from tensors named as `load_checkpoint` says; the table shares their storage where it can.

        Raises:
            KeyError: a tensor is missing. TypeError, ValueError: another dtype or shape. RuntimeError: loaded already.
        """
        scale = self._check_weights(tensors, prefix)
        weight, scales = f"{prefix}.embed.weight", find_scales(tensors, f"{prefix}.embed")
        if weight not in tensors or scales is None:
            raise KeyError(f"{weight}: got {scales or 'no scales'}, expected the table and its scales")
        self.table.load_weight(tensors[weight])
        self.table.load_scales(tensors[scales])
        self._fill(tensors.__getitem__, prefix, scale)

    def _check_weights(self, found: Mapping[str, Described], prefix: str) -> str | None:
        if self._loaded:
            raise RuntimeError(f"{prefix}: got it a second time, expected the layer to be loaded once")
        return check_weights(found, prefix, self.wkv.weight, self.q_weight)

    def _fill(self, read: Callable[[str], torch.Tensor], prefix: str, scale: str | None) -> None:
        fill_wkv(self.wkv.weight, read(f"{prefix}.wkv.weight"), None if scale is None else read(scale))
        self.q_weight.copy_(read(f"{prefix}.q_weight"))
        self.k_weight.copy_(read(f"{prefix}.k_weight"))
        self._loaded = True

    def _look_up(self, hash_ids: torch.Tensor, staged: torch.Tensor, *, background: bool) -> None:
        if self.data_parallel and self.process_group is not None:
            hash_ids = gather_ids(hash_ids, self.process_group)
        self.table.lookup(hash_ids, out=staged[: hash_ids.shape[0]], background=background)

    def _wait(self, microbatch: int) -> None:
        pending = self._pending[microbatch]
        if pending is None:
            return
        event, captured = pending
        if captured != torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"microbatch {microbatch}: prepared on a side stream {'inside' if captured else 'outside'} of a CUDA "
                "graph, expected prepare_embeddings and embed in the same graph or both in none"
            )
        event.wait(torch.cuda.current_stream(self.device))

    def _window(self, tokens: int) -> Window:
        if self.sequence_parallel:
            return token_window(tokens, ranks=self.plan.ranks, rank=self.plan.rank)
        return Window(0, tokens, tokens)

    def _check_ids(self, hash_ids: torch.Tensor) -> int:
        check_tensor("hash_ids", hash_ids, ("T", self.plan.columns), INTEGERS, self.device)
        return hash_ids.shape[0]

    def _require_loaded(self) -> None:
        if not self._loaded:
            raise RuntimeError("Engram: not loaded, expected load_checkpoint or load_tensors before the first step")


def _check_forms(sequence_parallel: object, data_parallel: object) -> None:
    for name, form in (("sequence_parallel", sequence_parallel), ("data_parallel", data_parallel)):
        if form is not None and form not in FORMS:
            raise ValueError(f"{name}: got {form!r}, expected None or one of {', '.join(FORMS)}")
    if sequence_parallel and data_parallel:
        raise ValueError("data_parallel: got it beside sequence_parallel, expected at most one of them")
