"""Parallel multi-agent debate (MADpar: Prompt Choreography, section 4 and figure 6).

Every agent answers at once; in each further round every agent sees its own answers and the others' last ones, and
answers again. Nothing is summarised in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage

from choreo_agents.graph import START, Agent, ChoreoGraph, ChoreoState
from choreo_agents.graph.visibility import Mode
from choreo_agents.sampling import Sampling

MODERATOR = "moderator"


class DebateState(ChoreoState, total=False):
    """A debate's channels: handles, messages, and how many rounds of it are over: 0 again at its end."""

    rounds_over: int


def debate(
    notes: Mapping[str, str | None],
    *,
    rounds: int = 3,
    system: str | None = None,
    question: str | None = None,
    revise: str | None = None,
    sampling: Sampling | None = None,
    visibility: Mode = "shared",
) -> ChoreoGraph:
    """The graph of a debate.

    Args:
        notes: Each agent's private system prompt, by its name; None for an agent that has none.
        rounds: How often each agent speaks.
        system: The public root that all of them share.
        question: What each is asked before it first speaks, in a turn of its own, behind its notes and the input. Then
            the input is what all have to read, such as a record: it is encoded once, for all of them.
        revise: What each is asked from its second round on, after it has heard the others.
        sampling: How they choose tokens.
        visibility: How they see each other: their own encodings, or fresh ones of their words.

    Raises:
        ValueError: Fewer than two agents or less than one round.
    """
    if len(notes) < 2:
        raise ValueError(f"a debate takes at least two agents, not {len(notes)}")
    if rounds < 1:
        raise ValueError(f"a debate takes at least one round, not {rounds}")
    graph = ChoreoGraph(DebateState, system=system)
    names = list(notes)

    def asked(state: Mapping[str, Any]) -> str | None:
        return revise if state.get("rounds_over", 0) else question

    for name in names:
        prompt = None if revise is None and question is None else asked
        graph.add_node(name, Agent(name, system=notes[name], prompt=prompt, sampling=sampling))
        # With notes, each reads the input in their light, unless that is the record before a question: this is long.
        graph.add_edge(START, name, visibility=None if question is None else "shared")

    def count_round(state: DebateState) -> dict[str, int]:
        return {"rounds_over": (state.get("rounds_over", 0) + 1) % rounds}

    def next_round(state: DebateState) -> Sequence[str] | Literal["__end__"]:
        return "__end__" if state.get("rounds_over", 0) == 0 else names

    graph.add_node(MODERATOR, count_round, writes=())
    graph.add_edge(names, MODERATOR, visibility=visibility, history="last")
    graph.add_conditional_edges(MODERATOR, next_round, [*names, "__end__"])
    return graph


def graph() -> ChoreoGraph:
    """Three debaters with notes of their own, two rounds: for the audit, and for Studio."""
    notes = {"Alice": "Ann has 3 red kites.", "Bruno": "Ann has 3 red kites.", "Clara": "Ann has 7 blue cups."}
    return debate(notes, rounds=2, system="Agents read their notes and answer the question.")


def final_answer(messages: Sequence[BaseMessage], agents: Sequence[str]) -> str:
    """The answer most agents ended with: the first sentence of each one's last message; the first of equals."""
    last: dict[str, str] = {}
    for message in messages:
        if isinstance(message, AIMessage) and message.name is not None and message.name in agents:
            head, stop, _ = str(message.text).strip().partition(".")
            last[message.name] = head + stop
    return Counter(last[name] for name in agents if name in last).most_common(1)[0][0]
