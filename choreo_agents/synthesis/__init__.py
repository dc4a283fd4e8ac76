"""Merging of parallel branches by their KV caches (Parallel-Synthesis): positions, and the cache mapper."""
