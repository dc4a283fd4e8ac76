"""A call of an agent's node: build its view, decode, return the state update. Read `turn`."""
