"""One call of one node: it sees its view, speaks, and writes what comes of that. Read `turn`."""
