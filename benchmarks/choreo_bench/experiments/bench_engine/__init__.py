"""`choreo bench engine`: the same work on the same weights, by this engine and by others."""

from choreo_bench.experiments.bench_engine.measure import Measured, SpeedReport, measure_all
from choreo_bench.experiments.bench_engine.scenarios import SCENARIOS, SpeedScenario, scaled

__all__ = ["SCENARIOS", "Measured", "SpeedReport", "SpeedScenario", "measure_all", "scaled"]
