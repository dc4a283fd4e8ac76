"""Branches: mapping what parallel calls said, and merging it into one message."""

from choreo_agents.engine.branches.branches import Branches
from choreo_agents.engine.branches.steps import SHORTER, MergedView

__all__ = ["SHORTER", "Branches", "MergedView"]
