"""What ranks do together, the same on both sides: how rows travel, and the layer around lookup, gate and selection."""
