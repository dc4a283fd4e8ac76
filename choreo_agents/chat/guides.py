"""Grammars of answers, compiled before the engine is asked: it would keep the event loop that asks meanwhile."""

from __future__ import annotations

from functools import lru_cache

from choreo_agents.engine import Guided
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Grammar

_KEPT = 64


class CompiledGuides:
    """Of one tenant: the time that one takes would tell others what it asks for. May be used from any thread.

    Args:
        model: Whose answers are led.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._compiled = lru_cache(_KEPT)(model.grammars.compile)

    def of(self, grammar: Grammar) -> Guided:
        """What leads an answer by a grammar. Raises `GrammarError` if nothing can be."""
        made = self._compiled(grammar)
        return Guided(f"an answer of {grammar.plain()!r}", lambda _, ends: made(ends))
