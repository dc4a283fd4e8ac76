"""`choreo bench debate`: how often debates end in the right answer."""
