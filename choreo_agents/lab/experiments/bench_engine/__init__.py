"""`choreo bench engine`: the same work on the same weights, by this engine and by others."""

from choreo_agents.lab.experiments.bench_engine.measure import Measured, Report, measure_all
from choreo_agents.lab.experiments.bench_engine.scenarios import SCENARIOS, Scenario, scaled

__all__ = ["SCENARIOS", "Measured", "Report", "Scenario", "measure_all", "scaled"]
