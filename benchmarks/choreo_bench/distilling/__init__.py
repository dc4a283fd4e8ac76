"""A workflow distilled into an adapter: its traces, and the training on them."""
