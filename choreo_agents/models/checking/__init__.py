"""What can be told of a model from its small files: how it is fed beside its own template, and what it needs."""

from choreo_agents.models.checking.check import ModelCheck, check_model
from choreo_agents.models.checking.comparing import ViewComparison

__all__ = ["ModelCheck", "ViewComparison", "check_model"]
