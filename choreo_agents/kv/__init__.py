"""KV memory: the pool and its segments, tiers below it, message handles, and the prefix tree of `method="baseline"`."""
