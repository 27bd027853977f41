"""A request on its way from one engine to another: its tokens and KV travel, its slots do not."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Export:
    """Carry a request that another engine has prefilled.

    The engine that takes it in treats all tokens so far as the prompt, and asks its model first about the newest one.

    Attributes:
        tokens: [length] int64, prompt and the tokens sampled so far, a copy.
        dead: [length] bool, a copy.
        computed: leading tokens whose KV travels along; length - 1, as the newest token was never fed.
        max_new_tokens: how many tokens are still to be sampled.
    """

    tokens: np.ndarray
    dead: np.ndarray
    computed: int
    max_new_tokens: int
