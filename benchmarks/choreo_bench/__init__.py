"""Measures, evaluates and trains with choreo-agents: benchmarks, and a small language to measure by."""
