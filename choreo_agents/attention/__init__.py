"""Attention over KV segments: which tokens read which slots at which positions, and how partial results merge."""
