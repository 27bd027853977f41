"""What is true: Engram in plain NumPy and PyTorch, written to be checked by eye."""
