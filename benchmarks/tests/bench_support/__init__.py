"""What tests of the benchmarks share."""
