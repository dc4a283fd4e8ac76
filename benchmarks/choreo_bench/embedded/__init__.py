"""The embedded model from nothing: its tokenizer, what it learns from, and the training."""
