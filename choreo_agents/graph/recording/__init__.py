"""Recording of a graph's runs: their inputs, calls of agents, functions, and outcomes."""
