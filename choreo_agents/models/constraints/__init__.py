"""The only room that knows llguidance: grammars over a model's tokens."""

from choreo_agents.models.constraints.grammars import Grammars, MakeConstraint
from choreo_agents.models.constraints.sources import require_grammar

__all__ = ["Grammars", "MakeConstraint", "require_grammar"]
