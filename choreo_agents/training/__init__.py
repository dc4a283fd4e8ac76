"""Training on traces of runs: an adapter and a cache mapper, with gradients through every call of a workflow."""
