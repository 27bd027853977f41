"""The Engram layer on the reference's table and gate."""

from reference.collectives.layer import EngramBase
from reference.embedding import EngramEmbedding
from reference.gate import engram_gate
from reference.sharding import select_rows


class Engram(EngramBase):
    """Add what a layer's n-gram rows say to the hyper-connection stream.

    See `EngramBase` for the formula, the arguments and how ranks share a step.
    """

    _embedding = EngramEmbedding
    _gate = staticmethod(engram_gate)
    _select = staticmethod(select_rows)
