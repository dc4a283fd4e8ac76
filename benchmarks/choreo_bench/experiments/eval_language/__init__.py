"""`choreo eval language`: how well a model speaks the embedded language."""
