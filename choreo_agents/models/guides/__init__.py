"""The only room that knows llguidance: grammars over a model's tokens."""

from choreo_agents.models.guides.grammars import Grammars, MakeGuide
from choreo_agents.models.guides.sources import require_grammar

__all__ = ["Grammars", "MakeGuide", "require_grammar"]
