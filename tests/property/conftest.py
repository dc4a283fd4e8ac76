"""Hypothesis settings of all property tests: few examples, and no deadline because machines are shared."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine",
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared-machine")
