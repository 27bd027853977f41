"""How fast: one file a question, one command for all, results as data, table and plots from the data."""
