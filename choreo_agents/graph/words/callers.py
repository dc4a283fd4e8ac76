"""Whose a tool's result is: that of who has called it."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.chat import calls_made
from choreo_agents.graph.signer import writer_of
from choreo_agents.graph.visibility import START_SOURCE


def calls_of(messages: Sequence[BaseMessage]) -> dict[str, str]:
    """Return the ids of messages that made calls, by those of the results, whoever wrote either.

    Args:
        messages: In the order in which they were said: ids of calls may come again.
    """
    made: dict[str, str] = {}
    found: dict[str, str] = {}
    for message in messages:
        made |= {call.id: str(message.id) for call in calls_made(message) if call.id}
        if isinstance(message, ToolMessage) and message.tool_call_id in made:
            found[str(message.id)] = made[message.tool_call_id]
    return found


def callers_of(messages: Sequence[BaseMessage]) -> dict[str, BaseMessage]:
    """Return the messages that called tools, by the ids of the results that nodes of the graph have written.

    A result that comes as input is input's, whatever call it names; so is what answers a call that came as input.

    Args:
        messages: Of the state, as far as it is proven who said them.
    """
    said = [message for message in messages if writer_of(message) != START_SOURCE]
    # Whoever names a call later has it from who made it.
    calls = {call.id: message for message in reversed(said) for call in reversed(calls_made(message))}
    results = [each for each in said if isinstance(each, ToolMessage) and each.tool_call_id in calls]
    return {str(each.id): calls[each.tool_call_id] for each in results}
