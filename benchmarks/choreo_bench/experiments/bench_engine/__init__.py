"""`choreo bench engine`: the same work on the same weights, by this engine and by others."""
