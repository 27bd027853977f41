"""The Engram layer on the kernels of table, gate and selection."""

from optimized.embedding import EngramEmbedding
from optimized.gate import engram_gate
from optimized.sharding import select_rows
from reference.collectives.layer import EngramBase


class Engram(EngramBase):
    """Add what a layer's n-gram rows say to the hyper-connection stream.

    See `EngramBase` for the formula, the arguments and how ranks share a step. Steps can be captured in a CUDA graph:
    `prepare_embeddings`, `embed` and `forward` never wait for the device.
    """

    _embedding = EngramEmbedding
    _gate = staticmethod(engram_gate)
    _select = staticmethod(select_rows)
