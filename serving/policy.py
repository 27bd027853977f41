"""What the lookback windows hold."""

from enum import StrEnum


class Policy(StrEnum):
    """Say what the lookback windows hold; -1 stands wherever the policy does not know."""

    STATELESS = "stateless"  # every id, from the history on the device; no slots
    PROMPT_ONLY = "prompt_only"  # prompt positions
    KNOWN_IDS = "known_ids"  # every true id
    LAGGING = "lagging"  # every true id that reached the host: what the last `lag` updates appended has not
    SLOTS_ONLY = "slots_only"  # imported positions, for which there is no slot

    @property
    def slot_cache(self) -> bool:
        """Whether steps carry slots and block tables."""
        return self is not Policy.STATELESS

    @property
    def knows_drafts(self) -> bool:
        """Whether windows also hold what is fed but not yet true, as the parts of a step need it."""
        return self in (Policy.STATELESS, Policy.KNOWN_IDS)
