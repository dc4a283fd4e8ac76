"""Grammars of answers, compiled before the engine is asked: it would keep the event loop that asks meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial

from choreo_agents.chat.tools import Described
from choreo_agents.chat.ways import CallsOrAnswer
from choreo_agents.engine import Guided
from choreo_agents.models import LoadedModel, MakeGuide, tools_format
from choreo_agents.sampling import Grammar, TokenGuide

_KEPT = 64


class CompiledGuides:
    """Of one tenant: the time that one takes would tell others what it asks for. May be used from any thread.

    Args:
        model: Whose answers are led.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._compiled = lru_cache(_KEPT)(partial(compiled, model))
        self._told_apart = lru_cache(_KEPT)(self._ways)

    def of(self, grammar: Grammar, tools: Described = ()) -> Guided:
        """Return the guide of an answer by a grammar, or of calls if it begins so.

        Raises `GrammarError` if there is none.

        Args:
            grammar: Of the answer.
            tools: What may be called in its place.
        """
        told = json.dumps(tools)
        calls = f", or calls of {told}" if tools else ""
        return Guided(f"an answer of {grammar.plain()!r}{calls}", Led(grammar, told, self._compiled(grammar, told)))

    def ways(self, grammar: Grammar, tools: Described) -> Callable[[], CallsOrAnswer] | None:
        """Return what tells whether a message that is led so calls; None: each reader does, by its header."""
        return self._told_apart(grammar, json.dumps(tools))

    def _ways(self, grammar: Grammar, told: str) -> Callable[[], CallsOrAnswer] | None:
        model, how = self._model, tools_format(self._model.chat)
        if how.is_headed:
            return None
        calls = model.grammars.compile_call(how, json.loads(told), model.controls, several=True)
        return partial(CallsOrAnswer, calls, model.grammars.compile(grammar), frozenset(model.adapter.end_tokens))


class Led:
    """Makes guides of what was compiled: here, or where it is sent to, for which what it is made of is enough.

    Args:
        grammar: As of `compiled`; `told`: likewise.
        made: Makes them, if that was compiled.
    """

    def __init__(self, grammar: Grammar | None, told: str, made: MakeGuide | None = None) -> None:
        self._source, self._made = (grammar, told), made

    def __call__(self, model: LoadedModel, ends: frozenset[int]) -> TokenGuide:
        if self._made is None:
            self._made = compiled(model, *self._source)
        return self._made(ends)

    def __reduce__(self) -> tuple[type[Led], tuple[Grammar | None, str]]:
        return Led, self._source


def compiled(model: LoadedModel, grammar: Grammar | None, told: str) -> MakeGuide:
    """Compile what leads an answer by a grammar, or calls of tools, or either.

    Raises `GrammarError` if nothing can be.

    Args:
        model: Whose answer it is.
        grammar: Of the answer; None: it is a call.
        told: The tools, as JSON.
    """
    if grammar is not None and told == "[]":
        return model.grammars.compile(grammar)
    return model.grammars.compile_call(tools_format(model.chat), json.loads(told), model.controls, grammar)
