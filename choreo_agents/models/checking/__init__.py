"""Checks a model from its small files: how its prompts differ from its chat template's, and what memory it needs."""

from choreo_agents.models.checking.check import ModelCheck, check_model
from choreo_agents.models.checking.comparing import ViewComparison

__all__ = ["ModelCheck", "ViewComparison", "check_model"]
