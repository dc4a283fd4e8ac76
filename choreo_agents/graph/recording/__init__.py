"""What a run of a graph tells whoever records it or plays it again: calls of agents, functions, and how it began and
ended."""
