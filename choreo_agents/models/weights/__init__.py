"""Storage of weights: dtypes, quantisation, and layouts for the CPU."""
