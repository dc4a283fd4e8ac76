"""What can be told of a model from its small files: how it is fed beside its own template, and what it needs."""

from choreo_agents.models.checking.check import ModelCheck, check_model
from choreo_agents.models.checking.comparing import TemplateDifference, ViewComparison
from choreo_agents.models.checking.facts import ModelFacts
from choreo_agents.models.checking.reasons import Reason

__all__ = ["ModelCheck", "ModelFacts", "Reason", "TemplateDifference", "ViewComparison", "check_model"]
