"""A whole port in forty lines of PyTorch: `python -m parity --impl examples.port_in_40_lines`."""

import weakref

import torch

from reference.multipliers import hash_multipliers
from reference.prime_layout import PrimeLayout

ENGRAM_PORT = {"ids": "int64", "rows": "LTC", "local_ids": True}  # layers first; numbers within a column's bucket


class HashState:
    def __init__(self, config, token_map, *, slot_cache, block_size, device):
        self.slot_cache, self.block_size, self.device, self.bound = slot_cache, block_size, device, lambda: None
        self.map = torch.as_tensor(token_map, device=device).long()
        self.pad = int(self.map[config.engram_pad_token_id])
        self.multipliers = torch.from_numpy(hash_multipliers(config)).to(device)  # [L, N]
        self.primes = torch.from_numpy(PrimeLayout(config).primes).to(device)  # [L, N-1, H]

    def ensure_cache(self, kv_cache):
        if kv_cache.numel() and self.slot_cache and self.bound() is not kv_cache:
            self.cache = torch.zeros(len(kv_cache) * self.block_size, dtype=torch.int32, device=self.device)
            self.bound = weakref.ref(kv_cache)
        elif not kv_cache.numel():
            self.cache, self.bound = None, lambda: None
        return kv_cache.numel() > 0

    def forward(self, input_ids, positions, query_start_loc, dead_mask, lookback_token_ids, lookback_dead_mask,
                slot_mapping, block_table):  # fmt: skip
        live = int(query_start_loc[-1])
        request = torch.repeat_interleave(query_start_loc.diff())  # [live]
        t = torch.arange(live, device=self.device)
        place = t - query_start_loc[request]  # in its piece
        own = torch.where(dead_mask[:live], -1, self.map[input_ids[:live]])
        if self.slot_cache:
            writes = slot_mapping[:live] >= 0
            self.cache[slot_mapping[:live][writes]] = own[writes].int()
        (layers, orders, heads), mix, blocked = self.primes.shape, 0, t < 0
        rows = torch.full((layers, len(input_ids), orders * heads), -1, device=self.device)
        for k in range(orders + 1):
            q, column = positions[:live] - k, (k - 1 - place).clamp(0, orders - 1)
            window = lookback_token_ids[request, column]
            told = torch.where(lookback_dead_mask[request, column], -1, self.map[window.clamp(min=0)])
            kept, at = torch.full_like(q, self.pad), q.clamp(min=0)
            if self.slot_cache:
                kept = self.cache[block_table[request, at // self.block_size] * self.block_size + at % self.block_size]
            source = torch.where(place >= k, own[(t - k).clamp(min=0)], torch.where(window >= 0, told, kept.long()))
            blocked = blocked | (q < 0) | (source < 0)
            mix = mix ^ torch.where(blocked, self.pad, source) * self.multipliers[:, k, None]  # [L, live]
            if k > 0:
                rows[:, :live, (k - 1) * heads : k * heads] = mix[:, :, None] % self.primes[:, k - 1, None]
        return rows
