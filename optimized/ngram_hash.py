"""The n-gram hash on the device: from values to rows, as part of a kernel.

`x mod p` is a multiplication: with m = floor(2^64 / p) and x < 2^63 the high word of x * m is the quotient or one less,
so one conditional subtraction is exact. A layer's constants are int64 words: N multipliers, C magics m, and C of
offset << 32 | prime.
"""

import numpy as np
import triton
import triton.language as tl

from reference.config import EngramConfig
from reference.multipliers import hash_multipliers
from reference.prime_layout import PrimeLayout


def pack_layers(config: EngramConfig) -> np.ndarray:
    """Pack every layer's constants, `[L * (N + 2 * C)]` int64."""
    layout = PrimeLayout(config)
    primes = layout.primes.reshape(len(layout.primes), -1)
    magics = np.array([[2**64 // prime for prime in layer] for layer in primes.tolist()], dtype=np.uint64)
    words = [hash_multipliers(config), magics.view(np.int64), layout.offsets << 32 | primes]
    return np.concatenate(words, axis=1).reshape(-1)


@triton.jit
def hash_side_by_side(
    rows,
    constants,
    t,
    live,
    values,
    layer,
    LAYERS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """Hash one layer with its columns across the threads: least latency for few tokens.

    rows [T, L, C] int32; t, live [BLOCK]; values N of [BLOCK] int64.
    """
    COLUMNS: tl.constexpr = (MAX_NGRAM - 1) * HEADS
    words = constants + layer * (MAX_NGRAM + 2 * COLUMNS)
    column = tl.arange(0, COLUMN_BLOCK)
    real = column < COLUMNS
    mix = values[0] * tl.load(words)
    mixes = tl.zeros((BLOCK, COLUMN_BLOCK), tl.int64)  # each column's: that of its order
    for k in tl.static_range(1, MAX_NGRAM):
        mix ^= values[k] * tl.load(words + k)
        mixes = tl.where((column >= (k - 1) * HEADS)[None, :], mix[:, None], mixes)
    magic = tl.load(words + MAX_NGRAM + column, real, other=0)[None, :]
    offset_prime = tl.load(words + MAX_NGRAM + COLUMNS + column, real, other=1)[None, :]
    target = rows + ((t * LAYERS + layer) * COLUMNS)[:, None] + column[None, :]
    tl.store(target, _bucket(mixes, magic, offset_prime), live[:, None] & real[None, :])


@triton.jit
def hash_a_token_a_thread(
    rows,
    constants,
    t,
    live,
    values,
    layer,
    LAYERS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Hash one layer with a token a thread: fewest instructions for many tokens."""
    COLUMNS: tl.constexpr = (MAX_NGRAM - 1) * HEADS
    words = constants + layer * (MAX_NGRAM + 2 * COLUMNS)
    target = rows + ((t * LAYERS + layer) * COLUMNS)[:, None]
    mix = values[0] * tl.load(words)
    for k in tl.static_range(1, MAX_NGRAM):
        mix ^= values[k] * tl.load(words + k)
        order = words + MAX_NGRAM + (k - 1) * HEADS
        _store_order(target + (k - 1) * HEADS, mix, live, order, COLUMNS, HEADS, HEAD_BLOCK)


@triton.jit
def hash_order(
    rows,
    constants,
    t,
    live,
    values,
    layer,
    order,
    LAYERS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Hash one n-gram order (0 for pairs) of one layer with a token a thread: more threads for a step in between."""
    COLUMNS: tl.constexpr = (MAX_NGRAM - 1) * HEADS
    words = constants + layer * (MAX_NGRAM + 2 * COLUMNS)
    mix = values[0] * tl.load(words)
    for k in tl.static_range(1, MAX_NGRAM):
        mix ^= values[k] * tl.where(order >= k - 1, tl.load(words + k), 0)
    target = rows + ((t * LAYERS + layer) * COLUMNS + order * HEADS)[:, None]
    _store_order(target, mix, live, words + MAX_NGRAM + order * HEADS, COLUMNS, HEADS, HEAD_BLOCK)


@triton.jit
def _store_order(target, mix, live, words, COLUMNS: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Store the HEADS columns of one order, a token a thread: `target` [BLOCK, 1] points at the first."""
    buckets = ()
    for head in tl.static_range(HEAD_BLOCK):
        word = words + head % HEADS  # where HEADS is no power of two, the last ones are computed and not stored
        buckets = buckets + (_bucket(mix, tl.load(word), tl.load(word + COLUMNS)),)
    head = tl.arange(0, HEAD_BLOCK)
    tl.store(target + head[None, :], _interleave(buckets, HEAD_BLOCK), live[:, None] & (head < HEADS)[None, :])


@triton.jit
def _bucket(mix, magic, offset_prime):
    """Give `mix mod prime + offset`, exact for mix < 2^63 and prime < 2^31."""
    prime = offset_prime.to(tl.uint32)
    quotient = tl.umulhi(mix.to(tl.uint64), magic.to(tl.uint64))
    # Below 2 * prime < 2^32, so the low words are all of it; where it is below prime, the difference wraps above it.
    remainder = mix.to(tl.uint32) - quotient.to(tl.uint32) * prime
    return tl.minimum(remainder, remainder - prime).to(tl.int32) + (offset_prime >> 32).to(tl.int32)


@triton.jit
def _interleave(parts, COUNT: tl.constexpr):
    """Join COUNT = 2^n tensors [BLOCK] to [BLOCK, COUNT]: the last join tells even from odd indices."""
    if COUNT == 1:
        joined = parts[0][:, None]
    elif COUNT == 2:
        joined = tl.join(parts[0], parts[1])
    else:
        HALF: tl.constexpr = COUNT // 2
        even = ()
        odd = ()
        for index in tl.static_range(HALF):
            even = even + (parts[2 * index],)
            odd = odd + (parts[2 * index + 1],)
        pair = tl.join(_interleave(even, HALF), _interleave(odd, HALF))
        joined = tl.reshape(pair, (parts[0].shape[0], COUNT))
    return joined
