"""KV memory: pool, segments, handles, and the prefix tree of the baseline method."""
