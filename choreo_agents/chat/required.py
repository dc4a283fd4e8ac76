"""Calls that a model has to make."""

from __future__ import annotations

import json
from collections.abc import Collection

from choreo_agents.chat.tools import Described, ToolChoice, required_tools
from choreo_agents.engine import Guided
from choreo_agents.models import LoadedModel, tools_format


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
    # Made before the engine asks for it, which waits for it.
    made = model.grammars.compile_call(tools_format(model.chat), wanted, model.controls)
    return Guided(f"one call of {json.dumps(wanted, sort_keys=True)}", lambda _, ends: made(ends))


def must_call(tools: Described, choice: ToolChoice, model: LoadedModel) -> Guided | None:
    """What makes an agent write one call, where it must.

    Args:
        tools: That it is told of.
        choice: Of which it must call one.
        model: Its own.

    Raises what `required_call` raises.
    """
    return required_call(model, *required_tools(tools, choice))
