"""Merging parallel branches from their caches (Parallel-Synthesis): strategies, and the cache mapper."""
