"""Training data of synthesizers, drawn from the embedded language."""
