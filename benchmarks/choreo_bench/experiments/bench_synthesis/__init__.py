"""`choreo bench synthesis`: the first token about branches, from their caches and from their words."""
