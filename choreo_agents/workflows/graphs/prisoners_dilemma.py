"""The prisoner's dilemma (Prompt Choreography, section 3.4): measures what private context leaks through shared KV.

Each player has a private strategy and makes a private plan; both talk in turns, then decide at once. The graph only
chooses whether a player reads the other's own encodings, which have attended to strategy and plan, or re-encoded text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from choreo_agents.graph import START, Agent, ChoreoGraph, Policy, VisibilityRule
from choreo_agents.graph.visibility import Mode
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.phrasing import load_prompts

ASKS = ("What is your plan?", "Tell the other what you will do.", "What do you do?")
"""Prompts of the players: to plan, to talk, to decide."""


def prisoners_dilemma(
    strategies: Mapping[str, str],
    *,
    game: str,
    talks: int = 2,
    visibility: Mode | VisibilityRule = "shared",
    policy: Policy | None = None,
    asks: tuple[str, str, str] = ASKS,
    decisions: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> ChoreoGraph:
    """Return the graph of a game: `alice.plan` and `bob.plan`, then `alice` and `bob` in turns; both decide at once.

    Args:
        strategies: Private system prompts by player; the first player speaks first.
        game: System prompt that both share: the rules.
        talks: How often each player speaks before the decisions.
        visibility: How each player sees the other's messages.
        policy: Contexts that must not reach the other player.
        asks: Prompts of the players: to plan, to talk, to decide.
        decisions: Texts that a decision is constrained to; by default it is free.
        sampling: Sampling of both players.

    Raises:
        ValueError: There are not two players, or less than one talk.
    """
    if len(strategies) != 2:
        raise ValueError(f"the game needs two players, not {len(strategies)}")
    if talks < 1:
        raise ValueError(f"each player must talk at least once, not {talks} times")
    graph = ChoreoGraph(system=game, policy=policy)
    first, second = nodes = [name.lower() for name in strategies]
    plan, *prompts = asks
    for node, (name, strategy) in zip(nodes, strategies.items(), strict=True):
        speaker: dict[str, Any] = {"system": strategy, "persona": node, "sampling": sampling}
        graph.add_node(f"{node}.plan", Agent(name, prompt=plan, confidential=True, **speaker))
        choices = _choices_for(node, talks, decisions)
        graph.add_node(node, Agent(name, prompt=_prompt_for(node, talks, *prompts), choices=choices, **speaker))
        graph.add_edge(START, f"{node}.plan")
    # Nobody reads the other's plan. It can still leak: shared messages have attended to their own player's plan.
    graph.add_edge([f"{node}.plan" for node in nodes], first, visibility={})

    def after_first(state: Mapping[str, Any]) -> str:
        return second if _turn_in_game(state, first, talks) <= talks else "__end__"

    def after_second(state: Mapping[str, Any]) -> Sequence[str]:
        spoken = _turn_in_game(state, second, talks)
        return [first] if spoken < talks else nodes if spoken == talks else ["__end__"]

    graph.add_conditional_edges(first, after_first, [second, "__end__"], visibility=visibility)
    graph.add_conditional_edges(second, after_second, [*nodes, "__end__"], visibility=visibility)
    return graph


def graph() -> ChoreoGraph:
    """Return a game for `choreo audit` and LangGraph Studio: Alice always defects, and Bob follows what she says."""
    prompts = load_prompts("prisoners_dilemma", "embedded")
    strategies = {"Alice": prompts("defect"), "Bob": prompts("follow")}
    return prisoners_dilemma(strategies, game=prompts("game", both=20, neither=7))


def _prompt_for(node: str, talks: int, talk: str, decide: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a player's prompt function: to talk on its first turn, to decide after `talks` turns, else no prompt."""
    return lambda state: {0: talk, talks: decide}.get(_count_turns(state, node) % (talks + 1))


def _choices_for(node: str, talks: int, decisions: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    """Return a player's function of allowed texts: `decisions` for the decision, anything while they talk."""
    return lambda state: decisions if _count_turns(state, node) % (talks + 1) == talks else ()


def _turn_in_game(state: Mapping[str, Any], node: str, talks: int) -> int:
    """Return the number of a node's turns in this game, after a turn; a thread may hold earlier games."""
    return (_count_turns(state, node) - 1) % (talks + 1) + 1


def _count_turns(state: Mapping[str, Any], node: str) -> int:
    """Return the number of a node's messages in the thread, in any subgraph."""
    return sum(entry["author"].rpartition("|")[2] == node for entry in state.get("handles") or [])
