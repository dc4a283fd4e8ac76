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
    """Channels of a debate: handles, messages, and the number of rounds that are over, which is 0 again at the end."""

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
    """Return the graph of a parallel debate.

    Args:
        notes: Private system prompts by agent; None for an agent without one.
        rounds: How often each agent speaks.
        system: System prompt that all agents share.
        question: Prompt before an agent's first answer, after its notes and the input. With a question the input is
            what all agents read, such as a record, and is encoded once for all of them.
        revise: Prompt from the second round on, after the others' answers.
        sampling: Sampling of all agents.
        visibility: Whether agents see each other's own encodings or re-encoded text.

    Raises:
        ValueError: Fewer than two agents or less than one round.
    """
    if len(notes) < 2:
        raise ValueError(f"a debate needs at least two agents, not {len(notes)}")
    if rounds < 1:
        raise ValueError(f"a debate needs at least one round, not {rounds}")
    graph = ChoreoGraph(DebateState, system=system)
    names = list(notes)

    def asked(state: Mapping[str, Any]) -> str | None:
        return revise if state.get("rounds_over", 0) else question

    for name in names:
        prompt = None if revise is None and question is None else asked
        graph.add_node(name, Agent(name, system=notes[name], prompt=prompt, sampling=sampling))
        # Without a question, an agent with notes encodes the input behind them; a long record is shared instead.
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
    """Return a debate of three agents with private notes and two rounds, for `choreo audit` and LangGraph Studio."""
    notes = {"Alice": "Ann has 3 red kites.", "Bruno": "Ann has 3 red kites.", "Clara": "Ann has 7 blue cups."}
    return debate(notes, rounds=2, system="Agents read their notes and answer the question.")


def final_answer(messages: Sequence[BaseMessage], agents: Sequence[str]) -> str:
    """Return the answer that most agents end with: the first sentence of each one's last message, the first on ties."""
    last: dict[str, str] = {}
    for message in messages:
        if isinstance(message, AIMessage) and message.name is not None and message.name in agents:
            head, stop, _ = str(message.text).strip().partition(".")
            last[message.name] = head + stop
    return Counter(last[name] for name in agents if name in last).most_common(1)[0][0]
