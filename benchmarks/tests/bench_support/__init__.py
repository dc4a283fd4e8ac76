"""Helpers for the tests of the benchmarks."""
