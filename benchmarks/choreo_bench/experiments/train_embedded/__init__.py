"""`choreo train embedded`: the embedded model from nothing."""
