"""The prisoner's dilemma (Prompt Choreography, section 3.4): what Bob learns of Alice that she never says.

Each player has a private strategy and thinks up a private plan; both talk in turns, then decide at once. Whether one
reads the other's own encodings, or fresh ones of the words, is the graph's only choice: the first have attended to the
strategy and the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from choreo_agents.graph import START, Agent, ChoreoGraph, Policy, VisibilityRule
from choreo_agents.graph.visibility import Mode
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.phrasing import load_prompts

ASKS = ("What is your plan?", "Tell the other what you will do.", "What do you do?")
"""What players are asked: to plan, to talk, to decide."""


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
    """The graph of one game. Nodes: `alice.plan`, `bob.plan`, then `alice` and `bob` in turns; both decide at once.

    Args:
        strategies: Each player's private system prompt, by its name; the first of them speaks first.
        game: The public root: the rules.
        talks: How often each speaks before they decide.
        visibility: How each sees what the other says.
        policy: What must not get across.
        asks: What players are asked: to plan, to talk, to decide.
        decisions: What they may decide; by default they say what they like.
        sampling: How they choose tokens.

    Raises:
        ValueError: There are not two players, or nobody is to talk.
    """
    if len(strategies) != 2:
        raise ValueError(f"the game has two players, not {len(strategies)}")
    if talks < 1:
        raise ValueError(f"each player talks at least once, not {talks} times")
    graph = ChoreoGraph(system=game, policy=policy)
    first, second = nodes = [name.lower() for name in strategies]
    plan, *asked = asks
    for node, (name, strategy) in zip(nodes, strategies.items(), strict=True):
        speaker: dict[str, Any] = {"system": strategy, "persona": node, "sampling": sampling}
        graph.add_node(f"{node}.plan", Agent(name, prompt=plan, confidential=True, **speaker))
        deciding = _deciding(node, talks, decisions)
        graph.add_node(node, Agent(name, prompt=_asking(node, talks, *asked), choices=deciding, **speaker))
        graph.add_edge(START, f"{node}.plan")
    # Nobody reads the other's plan, and nothing is promised of it: what they say was said behind it.
    graph.add_edge([f"{node}.plan" for node in nodes], first, visibility={})

    def after_first(state: Mapping[str, Any]) -> str:
        return second if _turns(state, first, talks) <= talks else "__end__"

    def after_second(state: Mapping[str, Any]) -> Sequence[str]:
        spoken = _turns(state, second, talks)
        return [first] if spoken < talks else nodes if spoken == talks else ["__end__"]

    graph.add_conditional_edges(first, after_first, [second, "__end__"], visibility=visibility)
    graph.add_conditional_edges(second, after_second, [*nodes, "__end__"], visibility=visibility)
    return graph


def graph() -> ChoreoGraph:
    """A game between Alice, who always defects, and Bob, who does what she says: for the audit, and for Studio."""
    prompts = load_prompts("prisoners_dilemma", "embedded")
    strategies = {"Alice": prompts("defect"), "Bob": prompts("follow")}
    return prisoners_dilemma(strategies, game=prompts("game", both=20, neither=7))


def _asking(node: str, talks: int, talk: str, decide: str) -> Callable[[Mapping[str, Any]], str | None]:
    """What a player is asked: to talk, the first time; to decide, when all has been said."""

    def ask(state: Mapping[str, Any]) -> str | None:
        return {0: talk, talks: decide}.get(_said(state, node) % (talks + 1))

    return ask


def _deciding(node: str, talks: int, decisions: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    """What a player may say: anything while they talk."""
    return lambda state: decisions if _said(state, node) % (talks + 1) == talks else ()


def _turns(state: Mapping[str, Any], node: str, talks: int) -> int:
    """How often a node that has just spoken has done so in this game: a thread may hold games that came before."""
    return (_said(state, node) - 1) % (talks + 1) + 1


def _said(state: Mapping[str, Any], node: str) -> int:
    """How often a node has spoken, whatever graphs it stands in."""
    return sum(entry["author"].rpartition("|")[2] == node for entry in state.get("handles") or [])
