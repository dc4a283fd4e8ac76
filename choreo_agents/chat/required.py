"""Calls that a model has to make, and answers that it may give in the place of calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from choreo_agents.chat.guides import CompiledGuides, Led, compiled
from choreo_agents.chat.tools import Described
from choreo_agents.chat.ways import CallsOrAnswer
from choreo_agents.engine import Engine, Guided
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling


def required_call(model: LoadedModel, tools: Described, names: Collection[str]) -> Guided | None:
    """What leads an answer to one call of one of some tools; None: nothing has to be called.

    Args:
        model: Whose answer it is.
        tools: All that may be called.
        names: Of those of which one must be.

    Raises:
        GrammarError: The arguments of one cannot be led by their schema.
        InvalidRequestError: The extra `guided` is not installed, or the model's tokens cannot be guided.
    """
    wanted = [tool for tool in tools if tool["function"]["name"] in names]
    if not wanted:
        return None
    told = json.dumps(wanted)
    # Made before the engine asks for it, which waits for it.
    led_by = Led(None, told, compiled(model, None, told))
    return Guided(f"one call of {json.dumps(wanted, sort_keys=True)}", led_by)


def led(
    engine: Engine, tools: Described, names: Collection[str], sampling: Sampling
) -> tuple[Sampling, Guided | None, Callable[[], CallsOrAnswer] | None]:
    """How an answer is sampled, and what leads it: to one call, or, where none must be made, to calls or an answer.

    The third makes what tells these apart; None: the reader of calls does.

    Args:
        engine: Whose model answers.
        tools: All that may be called.
        names: Of those of which one must be; nothing else is said then.
        sampling: Its guide is that of an answer that calls nothing.

    Raises:
        GrammarError: Nothing can be led by its guide, or by what the arguments of a tool must be.
        InvalidRequestError: See `required_call`.
    """
    guide, ways = required_call(engine.model, tools, names), None
    if sampling.guide is None:
        return sampling, guide, ways
    if guide is None:
        compiled = engine.kv.keeper(CompiledGuides, engine.model)
        guide, ways = compiled.of(sampling.guide, tools), compiled.ways(sampling.guide, tools) if tools else None
    return sampling.model_copy(update={"guide": None}), guide, ways
