"""Attention over segments: who reads which slots from where, and how the parts are merged."""
