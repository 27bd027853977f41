"""What is fast: Engram's device work as Triton kernels, equal to `reference` bit for bit."""
