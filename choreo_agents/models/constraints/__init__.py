"""Compiles grammars to constraints over a model's tokens; the only package that imports llguidance."""

from choreo_agents.models.constraints.grammars import Grammars, MakeConstraint, require_grammar

__all__ = ["Grammars", "MakeConstraint", "require_grammar"]
