"""What an agent's own function makes of what was said: an update of any channel, or where control goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.provenance import handed_on, sign
from choreo_agents.graph.state import with_said
from choreo_agents.graph.view.reader_rules import ReaderRules
from choreo_agents.graph.words.told import called

Update = Callable[..., Any]
"""Of what an agent has said (a list, if it says several messages at a time) and, if it likes, of the graph's state with
that in it; of `runtime` and `config`, too, by name. Makes an update of the state, a `Command`, or None."""


class Updating(Protocol):
    """What is asked of an agent."""

    name: str
    persona: str | None
    confidential: bool
    update: Update | None

    def reader_rules(self) -> ReaderRules: ...


async def with_update(agent: Updating, said: dict[str, Any], state: Any, config: RunnableConfig) -> dict[str, Any]:
    """What a node writes when its agent has spoken: what was said, and what its function makes of that, if it has one.

    Args:
        agent: Who has spoken.
        said: What it writes by itself.
        state: The graph's, as it was before.
        config: The node's.

    Raises:
        InvalidRequestError: It makes of it what is no update, or writes handles, which are the agents' to write.
    """
    if agent.update is None:
        return said
    messages: Sequence[AIMessage] = said["messages"]
    words = messages[0] if len(messages) == 1 else list(messages)
    found = await called(agent.update, [words, with_said(state, said)], config)
    command = found if isinstance(found, Command) else None
    written = found if command is None else command.update
    added = dict(written) if isinstance(written, Mapping) else {} if written is None else None
    if added is None or "handles" in added:
        what = "handles, which only agents write" if added else f"a {type(written).__name__}"
        raise InvalidRequestError(
            f"the update of {agent.name!r} must be a dict of channels or a Command of one, not {what}"
        )
    signed = sign(added, config, agent.reader_rules().node, agent.persona, confidential=agent.confidential)
    more = signed.pop("messages", None) or []
    # Else it overwrites the channel.
    whole = {**said, **signed, "messages": [*messages, *more] if isinstance(more, list) else more}
    if command is None:
        return whole
    goto = handed_on(command.goto, config, messages)
    routed: Any = Command(graph=command.graph, update=whole, resume=command.resume, goto=goto)
    return routed  # type: ignore[no-any-return]
