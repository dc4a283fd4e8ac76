"""What several benchmarks time alike: a model by name, and the first token of a prompt."""
