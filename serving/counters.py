"""What happened in an engine, as plain counts."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Count what an engine did since it was made.

    `steps`, `pieces`, `tokens` (scheduled, drafts included), `sampled` (tokens appended), `prefix_hits` (requests),
    `hit_tokens`, `same_step_hits` (requests), `drafts`, `rejected_drafts`, `evictions` (cached blocks overwritten),
    `imports`, `exports`, `finished` (requests that reached their last token), `padded_steps`, `preemptions`,
    `loaded_blocks` (from the host's store), `given_up` (blocks behind a sliding window), `forks`, `aborts`, `sleeps`.
    """

    steps: int = 0
    pieces: int = 0
    tokens: int = 0
    sampled: int = 0
    prefix_hits: int = 0
    hit_tokens: int = 0
    same_step_hits: int = 0
    drafts: int = 0
    rejected_drafts: int = 0
    evictions: int = 0
    imports: int = 0
    exports: int = 0
    finished: int = 0
    padded_steps: int = 0
    preemptions: int = 0
    loaded_blocks: int = 0
    given_up: int = 0
    forks: int = 0
    aborts: int = 0
    sleeps: int = 0
