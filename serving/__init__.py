"""A small serving engine that cuts, caches, drafts, rolls back, moves and pads requests."""
