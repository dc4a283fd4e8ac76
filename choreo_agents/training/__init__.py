"""Training: the embedded model from scratch."""
