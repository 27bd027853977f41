"""Find the block that already holds a prefix, by its content."""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np


def chain_key(before: bytes, tokens: np.ndarray, dead: np.ndarray) -> bytes:
    """Name a full block by its content and by all that stands before it.

    key_i = blake2b(key_{i-1}, tokens of block i, dead flags of block i); key_{-1} is empty. Equal keys mean equal
    (token, dead) content from position 0 to the end of the block.

    Args:
        before: key of the block before, empty for the first.
        tokens: [B] int64.
        dead: [B] bool; a span that is masked has other rows behind it than the same ids alive.
    """
    digest = blake2b(before, digest_size=16)
    digest.update(tokens.tobytes())
    digest.update(dead.tobytes())
    return digest.digest()


class PrefixCache:
    """Remember which block holds which content, until the block is handed out again.

    The first block published under a key keeps it; a second copy of the same content stays private to its request.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, tuple[bytes, int, bool]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def publish(self, key: bytes, block: int, step: int, *, slotless: bool = False) -> None:
        """Offer a full block to later requests.

        Args:
            key: its `chain_key`.
            block: a block that is in no entry yet.
            step: index of the step that writes the block's last token, -1 if none does (it was imported).
            slotless: whether a position of the block was loaded, so that no step wrote its slot.

        Raises:
            RuntimeError: the block already has an entry.
        """
        if block in self._entries:
            raise RuntimeError(f"block {block}: got a second entry, expected one that was dropped when it was reused")
        if key not in self._blocks:
            self._blocks[key] = block
            self._entries[block] = key, step, slotless

    def find(self, key: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._blocks.get(key)

    def filled_in(self, block: int) -> int:
        """The step that wrote the last token of a published block."""
        return self._entries[block][1]

    @property
    def keys(self) -> list[bytes]:
        """The keys of all published blocks, in the order in which they were."""
        return list(self._blocks)

    def slotless(self, block: int) -> bool:
        """Whether a position of a published block has no slot that a step wrote."""
        return self._entries[block][2]

    def drop(self, block: int) -> bytes | None:
        """Forget a block that is about to be overwritten; the key of its entry if it had one."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return None
        del self._blocks[entry[0]]
        return entry[0]


class HostStore:
    """Remember which blocks were copied to the host when they were overwritten: their KV, and nothing else of them.

    Args:
        capacity: blocks; the one that was stored or loaded longest ago makes room.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def save(self, key: bytes) -> None:
        """Store a block under its key, or make it the newest if it is there."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)  # at once, where there is no room at all
