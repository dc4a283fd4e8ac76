"""What is said of an engine: what it holds and has done, and what computes it."""
