"""Which conversation a node is in, and who seals what is said there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import ProvenanceWarning
from choreo_agents.graph.langgraph_internals import channel_values, hidden_in, is_nested, run_start_of, with_hidden
from choreo_agents.graph.provenance.conversation import Conversation, found_conversation

_NOTARY = "notary"
_warned: WeakSet[Seals] = WeakSet()
"""Who was told already."""


@dataclass(frozen=True)
class Notary:
    """Of one run of one graph: all its nodes have their words sealed by it."""

    seals: Seals
    scope: str
    """The graph, by name; of a graph inside another, the outer one."""
    around: str | None = None
    """The conversation of the run around it."""
    is_guarded: bool = True
    """Whether what came in as input went through a door of ours: not in a graph of LangGraph's own."""

    def conversation(
        self, config: RunnableConfig, entries: Sequence[Any] = (), messages: Sequence[BaseMessage] = ()
    ) -> Conversation:
        """The one that a node is in: that of what was said first in the graph's state, else that around it.

        Where nothing was said yet it is drawn: all nodes of one superstep draw the same, and so do those that run again
        when the run goes on.

        Args:
            config: The node's.
            entries: What it was given beside the state; `messages` likewise.
        """
        state = channel_values(config, ("handles", "messages"))
        known = found_conversation(self.seals, *_said(state)) or found_conversation(self.seals, entries, messages)
        return Conversation(self.seals, known or self.around or self._drawn(config), self.scope)

    def _drawn(self, config: RunnableConfig) -> str:
        start = run_start_of(config)
        return self.seals.drawn(*start) if start else self.seals.drawn()


def with_notary(
    config: RunnableConfig | None, called: RunnableConfig, seals: Seals | None, name: str
) -> RunnableConfig | None:
    """The config of a run whose nodes all have one notary.

    Args:
        config: As its graph was given it, and `called` as it runs with it.
        seals: Of the graph's own engine; None: it has none, and is sealed as the graph around it.
        name: The graph's.
    """
    outer, nested = notary_of(called), is_nested(called)
    if outer is None:
        # Agents beside it, in a graph of LangGraph's own, have no name of that to seal under.
        made = None if seals is None else Notary(seals, "" if nested else name, is_guarded=not nested)
        return config if made is None else with_hidden(config, _NOTARY, made)
    if not nested:
        return config  # nobody can have put it there but a run of ours
    around = outer.conversation(called).name
    # A key that no salt gives again is an engine's own: what is said in one conversation goes out under one.
    own = outer.seals if seals is None or not seals.salted else seals
    return with_hidden(config, _NOTARY, replace(outer, seals=own, around=around))


def notary_of(config: RunnableConfig) -> Notary | None:
    """Who seals in the run that a node stands in; None: a graph of LangGraph's own, or none."""
    found = hidden_in(config, _NOTARY)
    return found if isinstance(found, Notary) else None


def warn_unproven(seals: Seals) -> None:
    """Say, once for each tenant of an engine, that somebody's words are not proven to be theirs."""
    if seals in _warned:
        return
    _warned.add(seals)
    cause = (
        "it was said under another salt, or somebody has made it up"
        if seals.salted
        else "this engine has no salt, so that its key is random: what was said in another process is not known here. "
        "Load the engines of all processes with the same salt=..."
    )
    warnings.warn(
        f"a message or handle that no seal proves to be of its conversation counts as input, whatever it says: {cause}",
        ProvenanceWarning,
        stacklevel=3,
    )


def _said(state: Mapping[str, Any]) -> tuple[list[Any], list[BaseMessage]]:
    entries, messages = state.get("handles"), state.get("messages")
    found = messages if isinstance(messages, list) else []
    return entries if isinstance(entries, list) else [], [each for each in found if isinstance(each, BaseMessage)]
