"""Debate in turns (MADiter: Prompt Choreography, section 4 and figure 6): one side answers, the other objects, and a
moderator ends the debate or asks for another round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choreo_agents.graph import END, START, Agent, ChoreoGraph, ChoreoState
from choreo_agents.graph.visibility import Mode
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.answers import turns_of

ROLES = AFFIRMATIVE, NEGATIVE, MODERATOR = "affirmative", "negative", "moderator"
Verdicts = Callable[[Sequence[str]], Sequence[str]]
"""Returns the verdicts that the moderator may choose from, given the texts of the two sides in turns."""


class IterativeDebateState(ChoreoState, total=False):
    """Channels of a debate: handles, messages, and the number of entries before it, since a thread may hold others."""

    before: int


@dataclass(frozen=True)
class Role:
    """Role in a debate: its agent's name, private system prompt, and prompt before each answer."""

    speaker: str
    system: str | None = None
    prompt: str | None = None


def iterative_debate(
    roles: Mapping[str, Role],
    *,
    verdicts: Verdicts,
    go_on: str,
    rounds: int = 3,
    system: str | None = None,
    sampling: Sampling | None = None,
    visibility: Mode = "shared",
) -> ChoreoGraph:
    """Return the graph of a debate in turns.

    The moderator is constrained to a verdict or `go_on`; in the last round to a verdict, if there is any.

    Args:
        roles: The roles `affirmative`, `negative` and `moderator`.
        verdicts: Returns the texts that end the debate.
        go_on: The moderator's text for another round.
        rounds: Most rounds.
        system: System prompt that all agents share.
        sampling: Sampling of all agents.
        visibility: How agents see each other. Only the moderator sees its own messages.

    Raises:
        ValueError: A role is missing, or there is no round.
    """
    missing = set(ROLES) - set(roles)
    if missing:
        raise ValueError(f"the debate needs three roles, but {', '.join(sorted(missing))} is missing")
    if rounds < 1:
        raise ValueError(f"a debate needs at least one round, not {rounds}")

    go_on = go_on.strip()

    def allowed(state: Mapping[str, Any]) -> list[str]:
        sides = [words for name, words in debate_turns(state) if name in (AFFIRMATIVE, NEGATIVE)]
        ends = list(verdicts(sides))
        last = sum(name == MODERATOR for name, _ in debate_turns(state)) + 1 >= rounds
        return ends if ends and last else [*ends, go_on]

    def after_verdict(state: Mapping[str, Any]) -> str:
        spoken = [words for name, words in debate_turns(state) if name == MODERATOR]
        return AFFIRMATIVE if spoken[-1] == go_on and len(spoken) < rounds else END

    graph = ChoreoGraph(IterativeDebateState, system=system)
    graph.add_node("begin", lambda state: {"before": len(state.get("handles") or [])}, writes=())
    for name in ROLES:
        role = roles[name]
        choices = allowed if name == MODERATOR else None
        agent = Agent(role.speaker, system=role.system, prompt=role.prompt, choices=choices, sampling=sampling)
        graph.add_node(name, agent)
    graph.add_edge(START, "begin")
    graph.add_edge("begin", AFFIRMATIVE)
    graph.add_edge(AFFIRMATIVE, NEGATIVE, visibility=visibility)
    graph.add_edge(NEGATIVE, MODERATOR, visibility={AFFIRMATIVE: visibility, NEGATIVE: visibility})
    graph.add_conditional_edges(MODERATOR, after_verdict, [AFFIRMATIVE, END], visibility={NEGATIVE: visibility})
    return graph


def debate_turns(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return node and text of each message since the debate began, in order."""
    return turns_of(state, state.get("before", 0))
